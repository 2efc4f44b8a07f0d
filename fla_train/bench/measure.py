"""Time, memory and error of functions on this machine."""

import json
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from fla_train.bench.implementations import Problem
from fla_train.kernels.delta_product import delta_product
from fla_train.kernels.delta_product.selfcheck import relative_rms

CHECKED_TOKENS = 256  # against the recurrence; its autograd keeps a state per Householder step
# A gradient whose RMS is less than this share of the largest gradient's has its error relative to that share:
# some are zero, or vanish beside the terms that they are sums of. In usual shapes they have 2e-2 and more.
LEAST_SHARE = 1e-2
MIN_SAMPLE_MS = 20.0  # on a CPU: shorter functions are repeated within a sample


def median_times(
    runs: Mapping[str, Callable[[], object]], device: torch.device, rounds: int
) -> dict[str, float]:
    """Median milliseconds of each function, after warm-up.

    On a GPU each is timed by `triton.testing.do_bench`. On a CPU they take turns, A B A B, `rounds` times, so
    that what else the machine does meets all of them alike.
    """
    if device.type == "cuda":
        from triton.testing import do_bench

        return {name: do_bench(run, return_mode="median") for name, run in runs.items()}
    repeats = {
        name: max(1, round(MIN_SAMPLE_MS / max(_milliseconds(run), 1e-3))) for name, run in runs.items()
    }
    samples: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(rounds):
        for name, run in runs.items():
            samples[name].append(_milliseconds(run, repeats[name]))
    return {name: statistics.median(times) for name, times in samples.items()}


def _milliseconds(run: Callable[[], object], repeats: int = 1) -> float:
    start = time.perf_counter()
    for _ in range(repeats):
        run()
    return (time.perf_counter() - start) * 1e3 / repeats


def peak_memory(run: Callable[[], object], device: torch.device) -> int:
    """Bytes allocated at the highest point of `run` beyond those before it.

    On a GPU by the allocator's count, on a CPU by adding up the allocations and frees that the profiler saw.
    """
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        run()
        torch.cuda.synchronize(device)
        return torch.cuda.max_memory_allocated(device) - before
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as trace:
        run()
    events = [event for event in trace_events(trace) if event.get("name") == "[memory]"]
    changes = [(event["ts"], event["args"]["Bytes"]) for event in events]
    held = peak = 0
    for _, change in sorted(changes, key=lambda pair: pair[0]):
        held += change
        peak = max(peak, held)
    return peak


def trace_events(trace: profile) -> list[dict]:
    """What a profiler has seen, as the events of a Chrome trace (times in microseconds)."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "trace.json"
        trace.export_chrome_trace(str(file))
        return json.loads(file.read_text())["traceEvents"]


def allocated(device: torch.device) -> int:
    """Most bytes of a GPU that tensors of this process have taken; 0 on a CPU."""
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else 0


def recorded(run: Callable[[], object], device: torch.device) -> Callable[[], object]:
    """`run` as a CUDA graph, for its time without that of its launches; itself on a CPU."""
    if device.type != "cuda":
        return run
    current, stream = torch.cuda.current_stream(device), torch.cuda.Stream(device)
    stream.wait_stream(current)
    with torch.cuda.stream(stream):
        run()  # compiles, and makes what cuBLAS and autograd keep for this stream
    torch.cuda.synchronize(device)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        run()
    return graph.replay


class Differentiable(Protocol):
    """Inputs of a function and the gradients of its outputs."""

    @property
    def leaves(self) -> dict[str, Tensor]:
        """The tensors that get a gradient."""

    @property
    def output_gradients(self) -> dict[str, Tensor]:
        """By output, in the order in which the function returns them."""


def forward_backward(
    run: Callable[..., Tensor | tuple[Tensor, ...]], problem: Differentiable
) -> dict[str, Tensor]:
    """The outputs by name and the gradients as dq, dk, ... for the problem's output gradients."""
    outputs = run(problem)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    names, leaves = problem.output_gradients, problem.leaves
    gradients = torch.autograd.grad(outputs, list(leaves.values()), list(names.values()))
    found = {name: y.detach() for name, y in zip(names, outputs, strict=True)}
    return found | {f"d{name}": x for name, x in zip(leaves, gradients, strict=True)}


def errors(run: Callable[[Problem], Tensor], problem: Problem) -> dict[str, float]:
    """Relative RMS error |x - reference| / |reference| of o and each gradient, at the sizes that are timed.

    Against the fp64 recurrence for the first CHECKED_TOKENS of the first and the last head of q, with the
    heads of v that share it, in the first and the last sequence: it is causal, so with `do` zeroed after
    these tokens, what belongs to them is that of a sequence that ends there. Longer sequences also against
    the `chunk` backend in fp64, for the whole of the last head of the last sequence. The larger error counts.
    The error of a gradient that vanishes is relative to the size of the largest gradient (LEAST_SHARE).
    """
    shape = problem.shape
    tokens = min(CHECKED_TOKENS, shape.tokens)
    rows, heads = (sorted({0, size - 1}) for size in (shape.batch, shape.heads // shape.group))
    found = _compare(run, problem, "recurrent", rows, heads, tokens)
    if tokens < shape.tokens:
        whole = _compare(run, problem, "chunk", rows[-1:], heads[-1:], shape.tokens)
        found = {name: torch.tensor([error, whole[name]]).max().item() for name, error in found.items()}
    return found  # a NaN of either is a NaN here


def _compare(
    run: Callable[[Problem], Tensor],
    problem: Problem,
    backend: str,
    rows: Sequence[int],
    heads: Sequence[int],
    tokens: int,
) -> dict[str, float]:
    """Errors of these rows and heads of q, as if sequences ended after `tokens`; `backend` runs in fp64."""
    group = problem.shape.group
    value_heads = [head * group + i for head in heads for i in range(group)]
    do = problem.do.clone()
    do[:, tokens:] = 0
    results = forward_backward(run, replace(problem, do=do))

    def sample(x: Tensor, name: str) -> Tensor:
        head_axis = 3 if name in ("k", "v", "beta") else 2
        index = torch.tensor(heads if name in ("q", "k") else value_heads, device=x.device)
        return x.detach()[list(rows), :tokens].index_select(head_axis, index).cpu().double()

    def reference(p: Problem) -> Tensor:
        return delta_product(p.q, p.k, p.v, p.beta, p.g, qk_l2norm=p.norm, backend=backend)[0]

    leaves = {name: sample(x, name).requires_grad_() for name, x in problem.leaves.items()}
    expected = forward_backward(reference, replace(problem, **leaves, do=sample(do, "o")))
    largest = max(x.square().mean() for name, x in expected.items() if name != "o").sqrt().item()
    found = {}
    for name, x in expected.items():
        least = 1e-30 if name == "o" else LEAST_SHARE * largest * x.numel() ** 0.5
        found[name] = relative_rms(sample(results[name], name.removeprefix("d")), x, least)
    return found


def tolerance(tensor: str, dtype: torch.dtype) -> float:
    """Above this error a kernel is wrong rather than rounded, and its speed means nothing.

    About twice the largest error that sound kernels have on these inputs; how accurate ours must be is the
    business of tests/kernels.
    """
    if dtype == torch.float32:
        return 1e-3  # products may run in TF32x3
    return {"o": 1e-2, "dbeta": 3e-2, "dg": 3e-2}.get(tensor, 1.5e-2)
