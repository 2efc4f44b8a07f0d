"""Split the time of a training step by kind of work, from a profiler's trace.

On a GPU each kernel counts by its name. On a CPU each operation counts by the profiler's self time, its own
name and the names of those that called it: backward passes of custom functions carry the function's name.
"""

import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence

import torch
from torch.autograd.profiler_util import FunctionEvent
from torch.profiler import ProfilerActivity, profile

from fla_train.bench.measure import trace_events

KINDS = ("operator", "matmuls", "elementwise", "loss", "optimizer", "communication", "copies", "other")

# The first match counts. "operator" is what mixes tokens: the delta product, a peer's, or attention.
GPU_KERNELS = (
    ("communication", re.compile(r"^nccl")),
    ("copies", re.compile(r"multi_tensor_apply.*Copy")),  # gradients to one tensor that is reduced
    ("optimizer", re.compile(r"multi_tensor_apply|FusedAdam")),
    (
        "operator",
        re.compile(
            r"^(chunk|fused_recurrent|segment|mixer_step|attention_step)_|delta|wy_|tril|flash|fmha|sdpa"
        ),
    ),
    ("loss", re.compile(r"consume_kernel|cross_entropy|SoftMax|nll_loss")),
    ("matmuls", re.compile(r"gemm|cutlass|nvjet|xmma|splitK|cublas|^linear_step", re.IGNORECASE)),
    (
        "elementwise",
        re.compile(
            r"forward_kernel|backward_kernel|rotate_kernel|sum_rows|elementwise|reduce|norm|conv|swiglu|cast_kernel|amax_kernel|at::native"
        ),
    ),
)
MATMULS = re.compile(r"^aten::(_?addmm|mm|bmm|baddbmm|matmul|linear)_?$")
CPU_CALLERS = (
    ("communication", re.compile(r"c10d::|gloo:|record_param_comms")),
    ("optimizer", re.compile(r"Optimizer\.step")),
    ("operator", re.compile(r"DeltaProduct|[Aa]ttention")),
)
CPU_LOSS = re.compile(r"LinearCrossEntropy|log_softmax|LogSoftmax|nll_loss|NllLoss")


def breakdown(run: Callable[[], object], device: torch.device) -> dict[str, float]:
    """Milliseconds of `run` by kind; kinds without any are left out. Streams that overlap count in full."""
    activities = [ProfilerActivity.CPU]
    if device.type == "cuda":
        activities.append(ProfilerActivity.CUDA)
    with profile(activities=activities) as trace:
        run()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
    if device.type == "cuda":
        return gpu_time_by_kind(trace_events(trace))
    return _summed((cpu_kind(_path(event)), event.self_cpu_time_total) for event in trace.events())


def gpu_time_by_kind(events: Sequence[dict]) -> dict[str, float]:
    """The same, of the events of a Chrome trace (times in microseconds)."""
    return _summed(_gpu_times(events))


def _summed(microseconds: Iterable[tuple[str, float]]) -> dict[str, float]:
    times: defaultdict[str, float] = defaultdict(float)
    for kind, time in microseconds:
        times[kind] += time / 1e3
    return {kind: times[kind] for kind in KINDS if kind in times}


def _gpu_times(events: Sequence[dict]) -> Iterator[tuple[str, float]]:
    for event in events:
        category = event.get("cat")
        if category in ("gpu_memcpy", "gpu_memset"):
            yield "copies", event["dur"]
        elif category == "kernel":
            yield gpu_kind(event["name"]), event["dur"]


def gpu_kind(kernel: str) -> str:
    """What a GPU kernel of this name does."""
    return next((kind for kind, pattern in GPU_KERNELS if pattern.search(kernel)), "other")


def _path(event: FunctionEvent) -> list[str]:
    """Names from the outermost caller to the operation itself."""
    return [*(_path(event.cpu_parent) if event.cpu_parent else []), event.name]


def cpu_kind(path: Sequence[str]) -> str:
    """What an operation does, by the names from the outermost caller to itself."""
    names = " ".join(path)
    for kind, pattern in CPU_CALLERS:
        if pattern.search(names):
            return kind
    if any(MATMULS.match(name) for name in path):
        return "matmuls"
    if CPU_LOSS.search(names):
        return "loss"
    return "elementwise" if path[-1].startswith("aten::") else "other"
