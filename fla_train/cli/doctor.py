"""`fla-doctor`: print the environment, check each backend of the operator, and explain the kernel selection.

    fla-doctor                                # environment, checks of all backends, kernels of a 340M model
    fla-doctor --verbose                      # every comparison
    fla-doctor --shape 4 8192 16 128 128 1    # kernels for another shape: B T H K V N
    fla-doctor --mixer package.module:Class   # whether a custom mixer keeps its contract, and nothing else

Exit status 0: every backend that can run on this machine is correct. 1: a backend is wrong, and
training does not start with it; with --mixer, a check of the mixer failed.
"""

import argparse
import json
import os
import shutil
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fla_train.cli.app import plain_errors
from fla_train.cli.version import add_version
from fla_train.data.config import DataConfig, cache_folder
from fla_train.utils.environment import describe_environment, package_version
from fla_train.utils.errors import described
from fla_train.utils.hub_names import hub_failure

SHAPE = ("batch", "tokens", "heads", "key_dim", "value_dim", "num_householder")
OPTIONAL = {"flash-linear-attention": "model=fla/...", "tensorboard": "logger.tensorboard", "peft": "LoRA"}
MODEL_340M = (16, 2048, 8, 128, 128, 2)  # a micro-batch of model=gated_delta_product/340m


def environment(device: str) -> dict[str, Any]:
    """Return versions, devices, free disk space, and tools that a training run may need."""
    import torch

    facts = describe_environment(device)
    del facts["time"], facts["command"]
    facts["devices"] = ", ".join(facts["devices"]) or "no GPU: training runs on the CPU"
    packages = facts["packages"].items()
    facts["packages"] = ", ".join(f"{name} {number or 'MISSING'}" for name, number in packages)
    missing = (f"{name} ({use})" for name, use in OPTIONAL.items() if package_version(name) is None)
    facts["optional"] = f"missing: {', '.join(missing) or 'nothing'}"
    failure = hub_failure()
    facts["Hub"] = f"{failure}: data=local works without it" if failure else "answers"
    facts["threads"] = torch.get_num_threads()
    if device == "cuda":
        from triton import knobs

        ptxas = knobs.nvidia.ptxas  # from Triton, or from TRITON_PTXAS_PATH
        facts["CUDA"] = f"{torch.version.cuda}, ptxas {ptxas.version} ({ptxas.path})"
    for name, path in (("data cache", cache_folder(DataConfig())), ("this folder", Path.cwd())):
        existing = next(folder for folder in (path, *path.parents) if folder.exists())
        facts[name] = f"{path}, {shutil.disk_usage(existing).free / 1e9:,.0f} GB free"
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    facts["C compiler"] = compiler or "MISSING: Triton needs one to launch kernels"
    return facts


def kernel_lines(shape: Sequence[int], device: str) -> list[str]:
    """Return the decisions of `select_kernel`, with reasons, for bfloat16 of a shape (B, T, H, K, V, N)."""
    import torch

    from fla_train.kernels.delta_product.select import select_kernel

    sizes = dict(zip(SHAPE, shape, strict=True))
    named = ", ".join(f"{name} {size}" for name, size in sizes.items())
    lines = select_kernel(device, torch.bfloat16, **sizes).explain()
    if device == "cpu":
        lines.insert(0, "a CPU runs the chunk backend: these are the kernels of Triton's interpreter")
    return [f"Triton's kernels for {named}", *(f"  {line}" for line in lines)]


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of the command's options."""
    parser = argparse.ArgumentParser(
        prog="fla-doctor", description="Check this machine and the operator's backends."
    )
    add_version(parser)
    parser.add_argument("--verbose", action="store_true", help="print every comparison")
    parser.add_argument(
        "--shape",
        type=int,
        nargs=len(SHAPE),
        metavar=("B", "T", "H", "K", "V", "N"),
        help="explain the kernel selection for these numbers of sequences, tokens, heads, key and value "
        f"channels and Householder steps (default on a GPU: {' '.join(map(str, MODEL_340M))}, as 340m)",
    )
    parser.add_argument("--mixer", metavar="MODULE:CLASS", help="check a custom mixer only (docs/mixers.md)")
    parser.add_argument("--mixer-options", type=json.loads, default={}, metavar="JSON", help="its arguments")
    return parser


def check_mixer(path: str, options: dict[str, Any]) -> bool:
    """Print a line for each check of a custom mixer; return whether all of them passed."""
    from fla_train.models.mixers.contract import TOLERANCE, contract_checks, difference, small_model

    ok = []
    for check in contract_checks(small_model(path, options)):
        try:
            error = difference(check())
            ok.append(error <= TOLERANCE)
            result = f"off by {error:.1e} (allowed: {TOLERANCE:.0e})"
        except Exception as failure:  # anything that the class may raise
            ok.append(False)
            result = described(failure)
        print(f"  {'ok    ' if ok[-1] else 'FAILED'} {check.__doc__}: {result}", flush=True)
    return all(ok)


def check_machine(shape: Sequence[int] | None, verbose: bool) -> bool:
    """Print the environment, the kernels and a line per backend; return whether every backend is correct.

    Raises:
        ValueError: no kernel supports the shape.
    """
    import torch

    from fla_train.bench import backend_checks
    from fla_train.kernels.delta_product import resolve_backend

    device = "cuda" if torch.cuda.is_available() else "cpu"
    for name, value in environment(device).items():
        print(f"{name:<13}{value}")
    if shape is not None or device == "cuda":
        print("", *kernel_lines(shape or MODEL_340M, device), sep="\n")
    default = os.environ.get("FLA_TRAIN_BACKEND") or resolve_backend("auto", torch.device(device))
    print(f"\nBackends against the fp64 recurrence (default here: {default})")
    start = time.perf_counter()
    reports = []
    for report in backend_checks.run_checks(backend_checks.checks()):
        reports.append(report)
        print(f"  {'ok    ' if report.ok else 'FAILED'} {report.summary()}", flush=True)
        for row in report.rows if verbose else ():
            mark = " " if row.ok else "!"
            print(f"       {mark} {row.case:36s} {row.tensor:16s} {row.error:.2e} of {row.tolerance:.0e}")
    bad = [report for report in reports if not report.ok]
    seconds = time.perf_counter() - start
    if not bad:
        print(f"\nREADY: {len(reports)} checks passed in {seconds:.0f} s. fla-bench train measures the speed")
        return True
    names = ", ".join(sorted({f"{r.backend} on {r.device}" for r in bad}))
    remedy = "set another model.backend"
    if any(report.backend == "triton" for report in bad):
        remedy += ", or another assembler for Triton, TRITON_PTXAS_PATH=.../ptxas (12.8 and 13.5 were right)"
    print(f"\nNOT READY ({seconds:.0f} s): {names} is wrong on this machine; {remedy}")
    return False


@plain_errors()
def main() -> None:
    """Run the console command."""
    request = build_parser().parse_args()
    if request.mixer is not None:
        ok = check_mixer(request.mixer, request.mixer_options)
    else:
        ok = check_machine(request.shape, request.verbose)
    sys.exit(0 if ok else 1)


if __name__ == "__main__":
    main()
