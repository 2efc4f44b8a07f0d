"""`fla-doctor`: what this machine has, and whether each backend of the operator is right on it.

    fla-doctor               # environment, then every backend that can run here
    fla-doctor --verbose     # every comparison

Exit code 0: every backend that can run here is right. 1: one is not; training refuses to start on it.
"""

import argparse
import os
import shutil
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch

from fla_train.bench import precompile
from fla_train.kernels.delta_product.selfcheck import CASES, Case, CheckReport, check_backend
from fla_train.utils.environment import describe_environment

Combination = tuple[str, str, torch.dtype]  # backend, device, dtype of q, k and v


def checks() -> list[Combination]:
    """The (backend, device, dtype) combinations to check on this machine, in the order of use."""
    both = (torch.float32, torch.bfloat16)
    combinations = [(name, "cpu", dtype) for name in ("recurrent", "chunked") for dtype in both]
    if torch.cuda.is_available():
        combinations += [(name, "cuda", dtype) for name in ("triton", "chunked") for dtype in both]
    return combinations


def compiled_cases(dtype: torch.dtype) -> list[Case]:
    """Of float32, which compiles slowest, without the busy device: it has no other code there."""
    return [case for case in CASES if dtype.itemsize == 2 or not case.busy]


def run_checks(
    combinations: Sequence[Combination], processes: int = precompile.PROCESSES
) -> Iterator[CheckReport]:
    """The reports in order. Compiling takes the time of Triton's cases, so each has a process of its own."""
    torch.set_num_threads(1)
    with precompile.pool(processes) as pool:
        compiled = {
            (backend, device, dtype): [
                pool.submit(check_backend, backend, device, dtype, cases=[case])
                for case in compiled_cases(dtype)
            ]
            for backend, device, dtype in combinations
            if backend == "triton"
        }
        for combination in combinations:
            if combination in compiled:
                yield merge([future.result() for future in compiled[combination]])
            else:
                yield check_backend(*combination)


def merge(parts: Sequence[CheckReport]) -> CheckReport:
    """One report of the reports on several cases."""
    rows = tuple(row for part in parts for row in part.rows)
    failure = next((part.failure for part in parts if part.failure), None)
    return replace(parts[0], rows=rows, failure=failure)


def environment_lines() -> list[str]:
    """Versions, devices and the tools that a training run may need."""
    found = describe_environment("cuda" if torch.cuda.is_available() else "cpu")
    versions = ", ".join(f"{name} {number or 'MISSING'}" for name, number in found["packages"].items())
    lines = [
        f"fla_train    {found['fla_train']}, commit {found['commit'] or 'unknown'}",
        f"Python       {found['python']} on {found['platform']}",
        f"packages     {versions}",
        f"CPU          {found['cpu_count']} cores, {torch.get_num_threads()} torch threads",
    ]
    lines += [f"GPU          {name}" for name in found["devices"]] or [
        "GPU          none: training runs on the CPU"
    ]
    if torch.cuda.is_available():
        lines.append(f"CUDA         {torch.version.cuda}, ptxas {_ptxas()}")
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    lines.append(f"C compiler   {compiler or 'MISSING: Triton needs one to launch kernels'}")
    return lines


def _ptxas() -> str:
    """The assembler that Triton will use: its own, or that of TRITON_PTXAS_PATH.

    Neither old nor new versions are right as such (docs/kernels.md, "Compilers"): the comparisons tell.
    """
    from triton import knobs

    return f"{knobs.nvidia.ptxas.version} ({knobs.nvidia.ptxas.path})"


def main() -> None:
    """Console command."""
    parser = argparse.ArgumentParser(
        prog="fla-doctor", description="Check this machine and the operator's backends."
    )
    parser.add_argument("--verbose", action="store_true", help="print every comparison")
    arguments = parser.parse_args()
    for line in environment_lines():
        print(line)
    print(f"\nBackends against the fp64 recurrence (default here: {_default()})")
    start = time.perf_counter()
    reports = []
    for report in run_checks(checks()):
        reports.append(report)
        print_report(report, arguments.verbose)
    bad = [report for report in reports if not report.ok]
    seconds = time.perf_counter() - start
    if bad:
        names = ", ".join(sorted({f"{r.backend} on {r.device}" for r in bad}))
        print(f"\nNOT READY ({seconds:.0f} s): {names} is wrong on this machine; {_remedy(bad)}")
        sys.exit(1)
    print(f"\nREADY: {len(reports)} checks passed in {seconds:.0f} s")


def _remedy(bad: Sequence[CheckReport]) -> str:
    other = "set another model.backend"
    if all(report.backend != "triton" for report in bad):
        return other
    return f"{other}, or another assembler for Triton, TRITON_PTXAS_PATH=.../ptxas (12.8 and 13.5 were right)"


def _default() -> str:
    return os.environ.get("FLA_TRAIN_BACKEND") or ("triton" if torch.cuda.is_available() else "chunked")


def print_report(report: CheckReport, verbose: bool) -> None:
    """One line a report; with `verbose` also one a comparison."""
    print(f"  {'ok    ' if report.ok else 'FAILED'} {report.summary()}", flush=True)
    if verbose:
        for row in report.rows:
            mark = " " if row.ok else "!"
            print(f"       {mark} {row.case:36s} {row.tensor:16s} {row.error:.2e} of {row.tolerance:.0e}")


if __name__ == "__main__":
    main()
