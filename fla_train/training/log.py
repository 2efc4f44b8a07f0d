"""Write the output of a run: terminal, train.log, metrics.jsonl, and W&B and TensorBoard as views of it.

metrics.jsonl is the source of truth. This module does not import torch, because a worker handles requests to
stop before it imports torch.
"""

import json
import logging
import math
import os
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

from fla_train.training.checkpoint import TrainState
from fla_train.training.run_folder import RunFolder
from fla_train.utils.filesystem import reason
from fla_train.utils.ranks import is_first
from fla_train.utils.records import Record, drop_records_after

if TYPE_CHECKING:  # imports Hydra
    from fla_train.training.config import LoggerConfig, TrainConfig

PROGRESS_INTERVAL = 5.0  # seconds between lines of progress


def log(text: str, *, error: bool = False, end: str = "\n") -> None:
    """Print a line to stdout or, if `error`, to stderr, if it still exists. Only rank 0 prints."""
    if is_first():
        _print(text, sys.stderr if error else sys.stdout, end=end)


def _print(text: str, *streams: TextIO, end: str = "\n") -> None:
    """Print a line and flush it. A closed terminal or a full disk loses lines but does not end the run."""
    for stream in streams:
        with suppress(OSError):
            print(text, file=stream, end=end, flush=True)


def redirect_output(file: Path) -> TextIO:
    """Append this process's stdout and stderr, including native libraries, to `file`. Return the old stdout.

    Raises:
        OSError: `file` can't be written.
    """
    file.parent.mkdir(parents=True, exist_ok=True)
    console = os.fdopen(os.dup(1), "w", buffering=1)
    descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    sys.stdout.flush()
    sys.stderr.flush()
    for stream in (1, 2):
        os.dup2(descriptor, stream)
    os.close(descriptor)
    logging.basicConfig(stream=sys.stderr, level=logging.WARNING, format="%(asctime)s %(name)s %(message)s")
    return console


def log_both(console: TextIO, text: str) -> None:
    """Print a line to the terminal and, through the redirected stdout, to train.log."""
    _print(text, console, sys.stdout)


class MetricsFile:
    """Append records to metrics.jsonl at once, one JSON object per line.

    Bytes that could not be written to a full disk are kept, and written before the next record or at `close`.
    """

    name, errors = "metrics.jsonl", OSError

    def __init__(self, path: Path, resumed_step: int):
        drop_records_after(path, resumed_step)
        self._file = path.open("ab", buffering=0)
        self._unwritten = b""

    def write(self, record: Record) -> None:
        self._unwritten += json.dumps(record).encode() + b"\n"
        self._flush()

    def close(self) -> None:
        with self._file:
            self._flush()

    def _flush(self) -> None:
        while self._unwritten:  # a disk that fills up accepts only some bytes
            self._unwritten = self._unwritten[self._file.write(self._unwritten) :]


class Wandb:
    """Write to a W&B run, offline by default. `id` continues an earlier run.

    Raises:
        ValueError: the login is missing, or W&B rejects a setting.
    """

    name, errors = "W&B", Exception

    def __init__(self, config: "LoggerConfig", folder: RunFolder, settings: dict, run_id: str | None):
        import wandb  # optional

        options = asdict(config.wandb) | {"name": config.wandb.name or folder.name}
        try:
            self._run = wandb.init(
                **options, dir=str(folder.root), id=run_id, resume="allow", config=settings
            )
        except (wandb.errors.UsageError, wandb.errors.AuthenticationError) as error:
            raise ValueError(f"W&B: {reason(error)}; or set logger.wandb.mode=offline") from error
        self.id: str = self._run.id

    def write(self, record: Record) -> None:
        values = {key: value for key, value in record.items() if key != "step" and value is not None}
        self._run.log(values, step=int(record["step"]))

    def close(self) -> None:
        self._run.finish()


class Tensorboard:
    """Write event files to `folder`."""

    name, errors = "tensorboard", Exception

    def __init__(self, folder: Path, resumed_step: int):
        from torch.utils.tensorboard import SummaryWriter  # optional

        self._writer = SummaryWriter(str(folder), purge_step=resumed_step + 1)

    def write(self, record: Record) -> None:
        for key, value in record.items():
            if key != "step" and value is not None:
                self._writer.add_scalar(key, value, record["step"])

    def close(self) -> None:
        self._writer.close()


# `name` is for messages. `errors` are exceptions that do not end the run, such as those of a full disk.
Sink = MetricsFile | Wandb | Tensorboard


def open_sinks(
    config: "TrainConfig", folder: RunFolder, state: TrainState, log: Callable[[str], None]
) -> list[Sink]:
    """Open metrics.jsonl and the views that the config names, and continue them after `state.step`.

    A resumed run keeps its W&B id, which is stored in `state`. A view that can't be opened is logged and left
    out until the next start.

    Raises:
        ValueError: W&B rejects a setting or the login of a new run.
        OSError: metrics.jsonl can't be written.
    """
    sinks: list[Sink] = [MetricsFile(folder.metrics, state.step)]
    views: dict[str, Callable[[], Sink]] = {}
    if config.logger.wandb.mode != "disabled":
        views[Wandb.name] = lambda: Wandb(config.logger, folder, asdict(config), state.wandb_id)
    if config.logger.tensorboard:
        views[Tensorboard.name] = lambda: Tensorboard(folder.root / "tensorboard", state.step)
    for name, make in views.items():
        try:
            sinks.append(make())
        except Exception as error:
            if isinstance(error, ValueError) and not state.step:
                raise
            log(f"{name} is left out until the next start ({reason(error)})")
    state.wandb_id = next((sink.id for sink in sinks if isinstance(sink, Wandb)), state.wandb_id)
    return sinks


class RunLogger:
    """Write the records and lines of a run on rank 0. Other ranks call these methods without effect.

    Args:
        state: records after its step are dropped, and written again.
        stream: the terminal, or a substitute for it.
    """

    def __init__(
        self, config: "TrainConfig", folder: RunFolder, state: TrainState, stream: TextIO, rank: int
    ):
        self._stream = stream if rank == 0 else None
        self._sinks = open_sinks(config, folder, state, self.log) if rank == 0 else []
        self._refused: set[Sink] = set()  # sinks that could not write their last record
        self._total, self._first = config.trainer.max_steps, state.step
        self._start, self._last_line = time.monotonic(), -math.inf

    def log(self, text: str) -> None:
        """Write one line of text for the user."""
        if self._stream is not None:
            log_both(self._stream, text)

    def record(self, record: Record) -> None:
        """Write a record. NaN and infinite values become null, because JSON does not support them.

        Only the first of consecutive errors of a sink is logged. None ends the run.
        """
        record = {
            key: None if isinstance(value, float) and not math.isfinite(value) else value
            for key, value in record.items()
        }
        for sink in self._sinks:
            try:
                sink.write(record)
                self._refused.discard(sink)
            except sink.errors as error:
                if sink not in self._refused:
                    self.log(f"step {record['step']:,}: {sink.name} can't be written ({reason(error)})")
                self._refused.add(sink)

    def step(self, record: Record, *, skipped: bool) -> None:
        """Write the record of an optimizer step, with a line if it was skipped or as progress."""
        self.record(record)
        step, loss, norm = record["step"], record["loss"], record["grad_norm"]
        if skipped:
            self.log(f"step {step:,}: skipped, loss {loss:.4g}, gradient norm {norm:.4g}")
            return
        now = time.monotonic()
        if now - self._last_line < PROGRESS_INTERVAL and step < self._total:
            return
        self._last_line = now
        remaining = (now - self._start) / max(1, step - self._first) * (self._total - step)
        utilization = f"MFU {record['mfu']:.1%}  " if "mfu" in record else ""
        self.log(
            f"step {step:,}/{self._total:,}  loss {loss:.4f}  lr {record['lr']:.2e}  grad {norm:.3f}  "
            f"{record['tokens_per_second']:,.0f} tokens/s  {utilization}"
            f"ETA {timedelta(seconds=round(remaining))}"
        )

    def close(self) -> None:
        """Close the sinks after the last record, and log which of them lost records. Lines may follow."""
        for sink in self._sinks:
            try:
                sink.close()
            except sink.errors as error:
                self.log(f"{sink.name} can't be closed ({reason(error)})")
