"""Precompile Triton kernels in parallel processes, which fill Triton's cache on disk.

One process compiles one kernel at a time, for seconds each, and Triton compiles a kernel only when it runs.
"""

import os
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from multiprocessing import get_context
from types import TracebackType

import torch

from fla_train.bench.implementations import make_problem, operator
from fla_train.bench.measure import forward_backward
from fla_train.bench.roofline import Shape
from fla_train.kernels.delta_product.select import override
from fla_train.kernels.delta_product.triton.launch_table import LaunchOptions

PROCESSES = min(12, os.cpu_count() or 1)
CONTEXT_BYTES = 1 << 30  # what a process takes of a GPU beyond its tensors, about


def pool(processes: int = PROCESSES) -> ProcessPoolExecutor:
    """Processes that compile: one torch thread each, since many of them starve each other."""
    context = get_context("spawn")
    return ProcessPoolExecutor(
        processes, mp_context=context, initializer=torch.set_num_threads, initargs=(1,)
    )


@dataclass(frozen=True)
class Trial:
    """A forward and backward pass of the operator under launch options."""

    shape: Shape
    norm: bool
    options: LaunchOptions
    segment_chunks: int | None = None  # as of `select.override`


class Precompiler:
    """Runs trials in other processes, so that this process finds their kernels in Triton's cache.

    A trial that fails there, or ends its process, is left to fail here. On a CPU nothing is done: the
    interpreter compiles nothing.

    Args:
        needed: bytes of device memory that a trial takes, which limit the number of processes.
    """

    def __init__(self, dtype: torch.dtype, device: torch.device, needed: int) -> None:
        self._once = partial(_once, dtype=dtype, device=device)
        self._pool = None
        if device.type == "cuda":
            free, _ = torch.cuda.mem_get_info(device)
            self._pool = pool(max(1, min(PROCESSES, free // (needed + CONTEXT_BYTES))))

    def __enter__(self) -> "Precompiler":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)

    def run(self, trials: Sequence[Trial]) -> None:
        """Return once every trial has run, or none can any more."""
        if self._pool is not None:
            with suppress(BrokenProcessPool):  # a process died, and with it the pool: all is compiled here
                wait([self._pool.submit(self._once, trial) for trial in trials])


def _once(trial: Trial, dtype: torch.dtype, device: torch.device) -> None:
    try:
        with override(options=trial.options, segment_chunks=trial.segment_chunks):
            forward_backward(operator, make_problem(trial.shape, dtype, device, norm=trial.norm))
    finally:
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()
