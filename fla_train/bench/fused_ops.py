"""`fla-bench fused_ops`: time the fused ops, compared with their PyTorch definitions and Liger-Kernel."""

from fla_train.bench import liger
from fla_train.bench.compare import COLUMNS, compare
from fla_train.bench.fused_op_cases import FUNCTIONS, make_cases, ours
from fla_train.bench.options import FusedOps, check_names
from fla_train.bench.report import Report

SIZES = ("batch", "tokens", "hidden", "vocabulary", "num_householder")


def run(options: FusedOps, report: Report) -> None:
    """Measure each case.

    Raises:
        ValueError: the options do not fit together.
    """
    check_names("--functions", options.functions, FUNCTIONS)
    sizes = {name: getattr(options, name) for name in SIZES}
    sizes["head_dim"] = options.head_dim or min(128, options.hidden)
    sizes["intermediate"] = options.intermediate or options.hidden * 11 // 4
    if options.hidden % sizes["head_dim"]:
        raise ValueError(f"--hidden {options.hidden} is not a multiple of --head-dim {options.head_dim}")
    implementations = ours(report.device)
    peers = liger.IMPLEMENTATIONS if options.peers and report.device.type == "cuda" else {}
    rows = (
        {"function": case.function, "case": case.name} | row
        for case in make_cases(options.functions or FUNCTIONS, sizes, report.dtype, report.device)
        for row in compare(case, implementations + peers.get(case.function, []), report, graphs=case.graph)
    )
    report.table("rows", ("case", *COLUMNS), rows)
