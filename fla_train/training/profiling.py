"""Traces and memory snapshots of chosen steps, in run.dir/profile."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

MEMORY_EVENTS = 100_000  # newest allocations and frees that a snapshot keeps


@contextmanager
def profiled(folder: Path, step: int, rank: int) -> Iterator[None]:
    """Record what runs inside.

    `step-N-rank-R.json` opens in https://ui.perfetto.dev, `...-memory.pickle` (GPU only) in
    https://pytorch.org/memory_viz, and `...-operators.txt` is a table of the costliest operators.
    """
    folder.mkdir(parents=True, exist_ok=True)
    stem = folder / f"step-{step:07d}-rank-{rank}"
    on_gpu = torch.cuda.is_available()
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])]
    if on_gpu:
        torch.cuda.memory._record_memory_history(max_entries=MEMORY_EVENTS)
    with profile(activities=activities, record_shapes=True, profile_memory=True) as trace:
        yield
        if on_gpu:
            torch.cuda.synchronize()
    trace.export_chrome_trace(f"{stem}.json")
    order = "self_device_time_total" if on_gpu else "self_cpu_time_total"
    Path(f"{stem}-operators.txt").write_text(trace.key_averages().table(sort_by=order, row_limit=40))
    if on_gpu:
        torch.cuda.memory._dump_snapshot(f"{stem}-memory.pickle")
        torch.cuda.memory._record_memory_history(enabled=None)
