"""Profile one step: a trace, a table of its costliest operators, a snapshot of the GPU's memory."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

from fla_train.utils.filesystem import reason

logger = logging.getLogger(__name__)

MEMORY_EVENTS = 100_000  # newest allocations and frees in a memory snapshot


@contextmanager
def profiled(folder: Path, step: int, rank: int) -> Iterator[None]:
    """Profile the code inside the `with` block.

    `step-N-rank-R.json` opens in https://ui.perfetto.dev, `...-memory.pickle` (GPU only) in
    https://pytorch.org/memory_viz, and `...-operators.txt` is a table of the costliest operators. Files that
    a full disk rejects are left out, and the error is logged.
    """
    stem = folder / f"step-{step:07d}-rank-{rank}"
    on_gpu = torch.cuda.is_available()
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])]
    if on_gpu:
        torch.cuda.memory._record_memory_history(max_entries=MEMORY_EVENTS)
    with profile(activities=activities, record_shapes=True, profile_memory=True) as trace:
        yield
        if on_gpu:
            torch.cuda.synchronize()
    order = "self_device_time_total" if on_gpu else "self_cpu_time_total"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        trace.export_chrome_trace(f"{stem}.json")
        Path(f"{stem}-operators.txt").write_text(trace.key_averages().table(sort_by=order, row_limit=40))
        if on_gpu:
            torch.cuda.memory._dump_snapshot(f"{stem}-memory.pickle")
    except (OSError, RuntimeError) as error:
        logger.warning("step %d: the trace can't be written (%s)", step, reason(error))
    finally:
        if on_gpu:
            torch.cuda.memory._record_memory_history(enabled=None)
