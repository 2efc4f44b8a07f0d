"""Measure time, memory and numerical error of kernels on the same inputs: check each kernel, then time it."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.utils.benchmark import Timer

from fla_train.bench.report import Report, Row
from fla_train.bench.roofline import Ceilings
from fla_train.utils.errors import described

CPU_SECONDS = 0.5  # time spent on each measurement on a CPU
COLUMNS = (
    "kernel forward_ms forward_%_of_bound both_ms both_%_of_bound extra_memory_MiB output_error "
    "worst_gradient note"
).split()


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


def as_cuda_graph(run: Callable[[], object], device: torch.device) -> Callable[[], object]:
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
    """Inputs of a kernel: a `Problem` of the operator, or a fused op's `Case`.

    Attributes:
        leaves: get a gradient.
        output_gradients: in the order of the outputs.
    """

    leaves: dict[str, Tensor]
    output_gradients: dict[str, Tensor]

    def errors(self, run: Callable[[Any], Tensor | tuple[Tensor, ...]]) -> dict[str, float]:
        """Return relative RMS errors of the outputs and gradients of `run`."""

    def bounds(self, ceilings: Ceilings) -> tuple[float, float]:
        """Return the least seconds of a forward pass, and of forward and backward."""


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


@dataclass(frozen=True)
class Implementation:
    """A kernel under its name: a function of some `Work`.

    `limit` returns why it does not support some inputs, or None.
    """

    name: str
    run: Callable[[Any], Tensor | tuple[Tensor, ...]]
    limit: Callable[[Any], str | None] = lambda inputs: None


def compare(
    work: Work, implementations: Sequence[Implementation], report: Report, *, graphs: bool = False
) -> Iterator[Row]:
    """Measure the implementations. One that fails or computes wrong numbers gets no time.

    Args:
        report: has the device and the dtype of the inputs, which decides what error is rounding.
        graphs: time CUDA graphs on a GPU, for kernels that are shorter than their launch.
    """
    for implementation in implementations:
        row: Row = {"kernel": implementation.name}
        if reason := implementation.limit(work):
            yield row | {"note": reason}
            continue
        try:
            row |= _measure(implementation, work, report, graphs)
        except Exception as failure:  # raised by a compiler, a launch, or a peer's own check
            row["note"] = described(failure)[:160]
        yield row


def _measure(implementation: Implementation, work: Work, report: Report, graphs: bool) -> Row:
    """Return errors, times and memory; only the errors and a note if the numbers are wrong."""
    errors = work.errors(implementation.run)
    outputs = {name: error for name, error in errors.items() if name in work.output_gradients}
    gradients = {name: error for name, error in errors.items() if name not in outputs}
    row = {"errors": errors, "output_error": worst(outputs), "worst_gradient": worst(gradients)}
    if wrong := out_of_bounds(errors, report.dtype):
        return row | {"note": f"wrong: {wrong}"}

    def forward() -> None:
        with torch.no_grad():
            implementation.run(work)

    both = partial(forward_backward, implementation.run, work)
    if report.device.type == "cuda":
        row["extra_memory_MiB"] = peak_memory(both) / 2**20
    for name, run in (("forward", forward), ("both", both)):
        timed = as_cuda_graph(run, report.device) if graphs else run
        row[f"{name}_ms"] = median_ms(timed, report.device)
    if report.ceilings:
        forward_bound, both_bound = work.bounds(report.ceilings)
        row["forward_%_of_bound"] = 1e5 * forward_bound / row["forward_ms"]
        row["both_%_of_bound"] = 1e5 * both_bound / row["both_ms"]
    return row


def out_of_bounds(errors: dict[str, float], dtype: torch.dtype) -> str:
    """Return the errors above their tolerance as text; a NaN is above any."""
    bounds = {name: tolerance(name, dtype) for name in errors}
    wrong = [name for name, error in errors.items() if not error <= bounds[name]]
    return ", ".join(f"{name} {errors[name]:.1e} > {bounds[name]:.0e}" for name in wrong)


def worst(errors: dict[str, float]) -> str:
    """Return the largest error with the name of its tensor."""
    name = max(errors, key=errors.__getitem__)
    return f"{name} {errors[name]:.1e}"
