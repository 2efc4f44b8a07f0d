"""Check every backend of the operator on this machine, Triton's cases in parallel processes."""

from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch

from fla_train.bench import precompile
from fla_train.kernels.delta_product.selfcheck import CASES, Case, CheckReport, check_backend

Combination = tuple[str, str, torch.dtype]  # backend, device, dtype of q, k and v


def checks() -> list[Combination]:
    """The (backend, device, dtype) combinations to check on this machine, in the order of use."""
    both = (torch.float32, torch.bfloat16)
    combinations = [(name, "cpu", dtype) for name in ("recurrent", "chunk") for dtype in both]
    if torch.cuda.is_available():
        combinations += [(name, "cuda", dtype) for name in ("triton", "chunk") for dtype in both]
    return combinations


def compiled_cases(dtype: torch.dtype) -> list[Case]:
    """The cases for Triton; in float32 the busy ones run no other kernel, and it compiles slowest."""
    return [case for case in CASES if dtype.itemsize == 2 or not case.busy]


def run_checks(
    combinations: Sequence[Combination], processes: int = precompile.PROCESSES
) -> Iterator[CheckReport]:
    """The reports in order. Each of Triton's cases runs in a process, because compiling takes its time."""
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
