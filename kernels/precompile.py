"""Compile the Triton kernels of a computation in parallel, before it runs.

Triton compiles each kernel at its first launch, which takes seconds, one kernel after another. Here the
computation first runs without launches. This takes milliseconds and collects every kernel with its
specialization. Triton's `AsyncCompileMode` compiles them in threads: the compiler's passes release Python's
lock, and `ptxas` is a separate process. Each thread also loads its kernel on the device, for which Triton 3.6
compiles a launcher in C. Otherwise the first launch would take half a second for it.
"""

from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import torch

from fla_train.kernels.optional_triton import triton


def precompile(work: Callable[[], object], threads: int) -> None:
    """Compile the kernels that `work` launches; return once they are compiled, or read from Triton's cache.

    `work` runs in this thread, including backward passes. No kernel fills its memory, so its results are
    meaningless: neither control flow nor an index may depend on them, because an index out of bounds makes
    the GPU unusable for the process. A kernel that does not compile raises its error later, at its launch. No
    other thread may launch a kernel meanwhile.

    Args:
        threads: number of threads that compile kernels.

    Raises:
        RuntimeError: `work` calls a kernel that tunes itself (`triton.autotune`), which must run to be timed.
    """
    with (
        _CompileAndLoad(threads) as pool,
        triton.AsyncCompileMode(pool, ignore_errors=True),
        _without_launches(),
        torch.autograd.set_multithreading_enabled(False),  # the mode holds in this thread only
    ):
        work()


class _CompileAndLoad(ThreadPoolExecutor):
    """Run Triton's jobs, each of which returns a kernel, in threads, and load the kernel on this device."""

    def __init__(self, threads: int):
        device = torch.cuda.current_device()  # in a new thread it is the first
        super().__init__(threads, initializer=torch.cuda.set_device, initargs=(device,))

    def submit(self, job: Callable[[], Any]) -> Future:
        def work() -> Any:
            kernel = job()
            _ = kernel.run  # the first access compiles the launcher and loads the kernel
            return kernel

        return super().submit(work)


@contextmanager
def _without_launches() -> Iterator[None]:
    """Make launches inside the `with` block compile the kernel and return None before it is compiled."""
    launch, tune = triton.JITFunction.run, triton.runtime.Autotuner.run

    def refuse(kernel: triton.runtime.Autotuner, *_: Any, **__: Any) -> None:
        raise RuntimeError(f"{kernel.base_fn.__name__} tunes itself: it must run")

    def compile_only(kernel: triton.JITFunction, *arguments: Any, **options: Any) -> None:
        launch(kernel, *arguments, **(options | {"warmup": True}))

    triton.JITFunction.run, triton.runtime.Autotuner.run = compile_only, refuse
    try:
        yield
    finally:
        triton.JITFunction.run, triton.runtime.Autotuner.run = launch, tune
