"""Compile the Triton kernels of some work in parallel, before the work runs.

Triton compiles a kernel at its first launch, for seconds, and one after another. Here the work is run once
without launches, which takes milliseconds and tells every kernel with its specialization; Triton's
`AsyncCompileMode` compiles them in threads. The compiler's passes release Python's lock, and `ptxas` is a
separate process. Each thread also loads its kernel on the device, for which Triton 3.6 compiles a launcher
in C: half a second that the first launch would take otherwise.
"""

from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import torch

from fla_train.kernels.optional_triton import triton


def precompile(work: Callable[[], object], threads: int) -> None:
    """Compile the kernels that `work` launches; return once they are compiled, or read from Triton's cache.

    `work` runs in this thread, backward passes included, on memory that no kernel has filled: its results
    mean nothing. Neither control flow nor an index may depend on them: an index out of bounds makes the GPU
    unusable for the process. A kernel that does not compile fails at its launch, later. No other thread may
    launch a kernel meanwhile.

    Args:
        threads: in which kernels are compiled.

    Raises:
        RuntimeError: `work` calls a kernel that tunes itself (`triton.autotune`), which needs its times.
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
            _ = kernel.run  # it is made, and the kernel loaded, when first asked for
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
