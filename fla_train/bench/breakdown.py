"""Split the time of a training step by kind of work, from a profiler's trace.

On a GPU each kernel counts by its name. On a CPU each operation counts, without those it calls, by its own
name and the names of those that called it: backward passes of custom functions carry the function's name.
"""

import json
import re
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

KINDS = ("operator", "matmuls", "elementwise", "loss", "optimizer", "communication", "copies", "other")

# The first match counts. "operator" is what mixes tokens: the delta product, a peer's, or attention.
GPU_KERNELS = (
    ("communication", re.compile(r"^nccl")),
    ("optimizer", re.compile(r"multi_tensor_apply|FusedAdam")),
    (
        "operator",
        re.compile(r"^(chunk|fused_recurrent|segment)_|delta|wy_|tril|flash|fmha|sdpa"),
    ),
    ("loss", re.compile(r"consume_kernel|cross_entropy|SoftMax|nll_loss")),
    ("matmuls", re.compile(r"gemm|cutlass|nvjet|xmma|splitK|cublas", re.IGNORECASE)),
    (
        "elementwise",
        re.compile(
            r"forward_kernel|backward_kernel|rotate_kernel|elementwise|reduce|norm|conv|swiglu|at::native"
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
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "trace.json"
        trace.export_chrome_trace(str(file))
        events = json.loads(file.read_text())["traceEvents"]
    return time_by_kind(events, on_gpu=device.type == "cuda")


def time_by_kind(events: Sequence[dict], *, on_gpu: bool) -> dict[str, float]:
    """The same, of the events of a Chrome trace (times in microseconds)."""
    times: defaultdict[str, float] = defaultdict(float)
    for kind, microseconds in _gpu_times(events) if on_gpu else _cpu_times(events):
        times[kind] += microseconds / 1e3
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


def _cpu_times(events: Sequence[dict]) -> Iterator[tuple[str, float]]:
    """Self times: each thread's operations form a tree by the time they begin and end."""
    threads = defaultdict(list)
    for event in events:
        if event.get("ph") == "X" and event.get("cat") in ("cpu_op", "user_annotation"):
            threads[event["tid"]].append(event)
    for spans in threads.values():
        spans.sort(key=lambda event: (event["ts"], -event["dur"]))
        open_spans: list[dict] = []  # from the outermost; each entry's "self" shrinks by what it calls
        for event in spans:
            while open_spans and event["ts"] >= open_spans[-1]["end"]:
                closed = open_spans.pop()
                yield closed["kind"], closed["self"]
            path = [span["name"] for span in open_spans] + [event["name"]]
            if open_spans:
                open_spans[-1]["self"] -= event["dur"]
            open_spans.append(
                {
                    "name": event["name"],
                    "end": event["ts"] + event["dur"],
                    "self": event["dur"],
                    "kind": cpu_kind(path),
                }
            )
        for span in open_spans:
            yield span["kind"], span["self"]


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
