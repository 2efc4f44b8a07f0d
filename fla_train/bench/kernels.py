"""`fla-bench kernels`: time the operator's backends and peers on the same inputs."""

from itertools import product

from fla_train.bench.compare import COLUMNS, compare
from fla_train.bench.implementations import Problem, make_problem, ours, peers
from fla_train.bench.options import Kernels
from fla_train.bench.report import Report
from fla_train.bench.roofline import Shape
from fla_train.kernels.delta_product import resolve_backend


def run(options: Kernels, report: Report) -> None:
    """Measure each shape.

    Raises:
        ValueError: the options do not fit together.
    """
    if options.heads % options.group:
        raise ValueError(f"--heads {options.heads} is not a multiple of --group {options.group}")
    if options.peers and options.group > 1:
        raise ValueError("--peers need as many heads of q and k as of v: leave out --group")
    device, dtype = report.device, report.dtype
    implementations = ours(dict.fromkeys(resolve_backend(name, device) for name in options.backends))
    if options.peers:
        others, missing = peers(device)
        implementations += others
        report.print(f"not installed: {', '.join(missing) or 'none'}")
    sizes = (options.batch, options.tokens, options.heads, options.head_dim)
    value_dim, gates = options.value_dim or options.head_dim, (True, False)

    def problem(num_householder: int, gated: bool) -> Problem:
        shape = Shape(*sizes, value_dim, num_householder, gated, dtype.itemsize, options.group)
        return make_problem(shape, dtype, device, norm=options.norm)

    rows = (
        {"n_h": n, "gate": gated} | row
        for n, gated in product(options.num_householder, gates if options.gate is None else [options.gate])
        for row in compare(problem(n, gated), implementations, report, graphs=options.graphs)
    )
    report.table("rows", ("n_h", "gate", *COLUMNS), rows)
