"""Split the GPU time of a training step by kind of work, from a profiler's trace: each kernel by its name."""

import json
import re
import tempfile
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

# The first match counts. "operator" mixes tokens: the delta product, a peer's, or attention. Copies by
# multi_tensor_apply collect gradients in the one tensor that is reduced.
GPU_KERNELS = {
    "communication": r"^nccl",
    "copies": r"multi_tensor_apply.*Copy",
    "optimizer": r"multi_tensor_apply|FusedAdam",
    "operator": r"^(chunk|fused_recurrent|segment|mixer_step|attention_step)_|delta|wy_|tril|flash|fmha|sdpa",
    "loss": r"consume_kernel|cross_entropy|SoftMax|nll_loss",
    "matmuls": r"(?i:gemm|cutlass|nvjet|xmma|splitK|cublas)|^linear_step",
    "elementwise": (
        r"forward_kernel|backward_kernel|rotate_kernel|sum_rows|elementwise|reduce|norm|conv|swiglu"
        r"|cast_kernel|amax_kernel|at::native"
    ),
}


def breakdown(run: Callable[[], object]) -> dict[str, float]:
    """Return the milliseconds of `run` on the GPU by kind. Overlapping streams count in full."""
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as trace:
        run()
        torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "trace.json"
        trace.export_chrome_trace(str(file))
        return by_kind(json.loads(file.read_text())["traceEvents"])


def by_kind(events: Sequence[dict]) -> dict[str, float]:
    """Return the milliseconds by kind of the events of a Chrome trace, which have microseconds."""
    times = Counter()
    for event in events:
        if event.get("cat") in ("gpu_memcpy", "gpu_memset"):
            times["copies"] += event["dur"] / 1e3
        elif event.get("cat") == "kernel":
            matches = (kind for kind, pattern in GPU_KERNELS.items() if re.search(pattern, event["name"]))
            times[next(matches, "other")] += event["dur"] / 1e3
    return dict(times.most_common())
