"""Measure time, memory and numerical error of functions on this machine."""

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor
from torch.utils.benchmark import Timer

CPU_SECONDS = 0.5  # time spent on each measurement on a CPU


def median_ms(run: Callable[[], object], device: torch.device) -> float:
    """Return the median milliseconds of `run` after warm-up; on a GPU the L2 cache is cold."""
    if device.type == "cuda":
        from triton.testing import do_bench

        return do_bench(run, return_mode="median")
    timer = Timer("run()", globals={"run": run}, num_threads=torch.get_num_threads())
    return 1e3 * timer.blocked_autorange(min_run_time=CPU_SECONDS).median


def peak_memory(run: Callable[[], object]) -> int:
    """Return the peak bytes that a GPU allocates while `run` runs, minus those allocated before."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    run()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def recorded(run: Callable[[], object], device: torch.device) -> Callable[[], object]:
    """Record `run` as a CUDA graph and return its replay, which costs no launches; return `run` on a CPU.

    `triton.testing.do_bench_cudagraph` would leave the inputs in the L2 cache, so `median_ms` times the
    replay.
    """
    if device.type != "cuda":
        return run
    stream = torch.cuda.Stream(device)
    torch.cuda.synchronize(device)
    # The first run compiles, and allocates the workspaces of cuBLAS and autograd for this stream.
    with torch.cuda.stream(stream):
        run()
    torch.cuda.synchronize(device)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        run()
    return graph.replay


class Work(Protocol):
    """Inputs of a function: `leaves` get a gradient, `output_gradients` are in the order of the outputs."""

    leaves: dict[str, Tensor]
    output_gradients: dict[str, Tensor]


def forward_backward(run: Callable[..., Tensor | tuple[Tensor, ...]], inputs: Work) -> dict[str, Tensor]:
    """Return the outputs by name, and the gradients of the leaves as dq, dk, ..."""
    outputs = run(inputs)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    names, leaves = inputs.output_gradients, inputs.leaves
    gradients = torch.autograd.grad(outputs, list(leaves.values()), list(names.values()))
    results = {name: y.detach() for name, y in zip(names, outputs, strict=True)}
    return results | {f"d{name}": x for name, x in zip(leaves, gradients, strict=True)}


def tolerance(tensor: str, dtype: torch.dtype) -> float:
    """Return the relative RMS error above which a kernel is wrong rather than rounded.

    About twice the largest error of correct kernels on the benchmark's inputs. tests/kernels has tighter
    bounds for this project's kernels.
    """
    if dtype == torch.float32:
        return 1e-3  # products may run in TF32x3
    return {"o": 1e-2, "dbeta": 3e-2, "dg": 3e-2}.get(tensor, 1.5e-2)
