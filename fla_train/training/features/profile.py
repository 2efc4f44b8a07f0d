"""Trace the steps in `trainer.profile_steps`."""

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from fla_train.training.callback import Callback
from fla_train.utils.filesystem import reason

logger = logging.getLogger(__name__)

MEMORY_EVENTS = 100_000  # newest allocations and frees in a memory snapshot


@dataclass
class ProfileKeys:
    profile_steps: list[int] = field(default_factory=list)


class Profile(Callback):
    """Write a trace of the chosen steps to the folder `profile` of the run.

    `step-N-rank-R.json` opens in https://ui.perfetto.dev, `...-memory.pickle` (GPU only) in
    https://pytorch.org/memory_viz, and `...-operators.txt` is a table of the costliest operators. Files that
    a full disk rejects are left out, and the error is logged.
    """

    _trace = None

    def check(self, config) -> Iterator[str]:
        trainer = config.trainer
        if outside := [step for step in trainer.profile_steps if not 1 <= step <= trainer.max_steps]:
            yield f"trainer.profile_steps={outside} must lie in 1..{trainer.max_steps}"

    def before_step(self, step: int, micro_batches: Sequence) -> None:
        if step in self.trainer.config.trainer.profile_steps:
            import torch
            from torch.profiler import profile

            if torch.cuda.is_available():
                torch.cuda.memory._record_memory_history(max_entries=MEMORY_EVENTS)
            self._trace = profile(record_shapes=True, profile_memory=True)
            self._trace.start()

    def after_step(self, step: int, metrics: dict) -> None:
        if self._trace is None:
            return
        import torch

        trace, self._trace, on_gpu = self._trace, None, torch.cuda.is_available()
        if on_gpu:
            torch.cuda.synchronize()
        trace.stop()
        folder = self.trainer.folder.root / "profile"
        stem = folder / f"step-{step:07d}-rank-{self.trainer.rank}"
        order = "self_device_time_total" if on_gpu else "self_cpu_time_total"
        try:
            folder.mkdir(parents=True, exist_ok=True)
            trace.export_chrome_trace(f"{stem}.json")
            Path(f"{stem}-operators.txt").write_text(trace.key_averages().table(sort_by=order, row_limit=40))
            if on_gpu:
                torch.cuda.memory._dump_snapshot(f"{stem}-memory.pickle")
        except (OSError, RuntimeError) as error:
            logger.warning("step %d: the trace can't be written (%s)", step, reason(error))
        if on_gpu:
            torch.cuda.memory._record_memory_history(enabled=None)
