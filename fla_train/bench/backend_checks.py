"""Check every backend of the operator on this machine, Triton's cases in parallel processes.

Without compiled kernels in Triton's cache this takes 37 s on an H200. One process with the threads of
`kernels/precompile.py` takes 90 to 98 s.
"""

import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from multiprocessing import get_context

import torch

from fla_train.kernels.delta_product.selfcheck import CASES, CheckReport, check_backend

PROCESSES = min(12, os.cpu_count() or 1)
Combination = tuple[str, str, torch.dtype]  # backend, device, dtype of q, k and v


def checks() -> list[Combination]:
    """Return the (backend, device, dtype) combinations to check on this machine, in the order of use."""
    dtypes = (torch.float32, torch.bfloat16)
    combinations = [(name, "cpu", dtype) for name in ("recurrent", "chunk") for dtype in dtypes]
    if torch.cuda.is_available():
        combinations += [(name, "cuda", dtype) for name in ("triton", "chunk") for dtype in dtypes]
    return combinations


def run_checks(combinations: Sequence[Combination]) -> Iterator[CheckReport]:
    """Yield the reports in order. Each of Triton's cases compiles in a separate process."""
    torch.set_num_threads(1)
    with ProcessPoolExecutor(PROCESSES, get_context("spawn"), torch.set_num_threads, (1,)) as pool:
        compiled = {
            combination: [
                pool.submit(check_backend, *combination, cases=[case])
                for case in CASES
                if combination[2].itemsize == 2 or not case.busy  # busy cases in fp32 run no other kernel
            ]
            for combination in combinations
            if combination[0] == "triton"
        }
        for combination in combinations:
            if combination in compiled:
                yield merge([future.result() for future in compiled[combination]])
            else:
                yield check_backend(*combination)


def merge(reports: Sequence[CheckReport]) -> CheckReport:
    """Combine the reports on several cases of one backend."""
    rows = tuple(row for report in reports for row in report.rows)
    failure = next((report.failure for report in reports if report.failure), None)
    return replace(reports[0], rows=rows, failure=failure)
