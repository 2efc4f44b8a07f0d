"""metrics.jsonl, the source of truth of a run, and wandb and tensorboard as views of it."""

import json
import math
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

from fla_train.training.config import LoggerConfig
from fla_train.training.run_folder import RunFolder
from fla_train.utils.records import Record, drop_records_after, read_metrics


def finite(record: Record) -> Record:
    """`record` with null where a value is NaN or infinite, which JSON can't hold."""
    return {key: None if isinstance(v, float) and not math.isfinite(v) else v for key, v in record.items()}


class Sink(Protocol):
    """Takes the records of a run in order of steps. Both raise `OSError`: a full disk, a service gone."""

    name: str

    def log(self, record: Record) -> None: ...

    def close(self) -> None: ...


class MetricsFile:
    """Appends records to metrics.jsonl, one JSON object a line, at once.

    What a full disk refuses is kept, and written before the next record or at `close`.
    """

    name = "metrics.jsonl"

    def __init__(self, path: Path, resumed_step: int):
        drop_records_after(path, resumed_step)
        self._file = path.open("ab", buffering=0)
        self._unwritten = b""

    def log(self, record: Record) -> None:
        self._unwritten += json.dumps(record).encode() + b"\n"
        self._write()

    def close(self) -> None:
        with self._file:
            self._write()

    def _write(self) -> None:
        while self._unwritten:  # a disk that fills up takes a part of it
            self._unwritten = self._unwritten[self._file.write(self._unwritten) :]


@contextmanager
def _as_os_error() -> Iterator[None]:
    """Raise whatever a view's package raises as an `OSError`, so that no view ends a run."""
    try:
        yield
    except OSError:
        raise
    except Exception as failure:
        raise OSError(" ".join(str(failure).split()) or type(failure).__name__) from failure


class Wandb:
    """A W&B run; offline unless asked otherwise. `id` continues an earlier one.

    Raises:
        ValueError: the package or the login is missing, or W&B refuses a setting.
        OSError: W&B does not answer, or its folder can't be written.
    """

    name = "W&B"

    def __init__(self, config: LoggerConfig, folder: Path, settings: dict, run_id: str | None):
        try:
            import wandb
        except ImportError:
            raise ValueError(
                "wandb is not installed: pip install wandb, or set logger.wandb.mode=disabled"
            ) from None
        try:
            with _as_os_error():
                self._run = wandb.init(
                    project=config.wandb.project,
                    entity=config.wandb.entity,
                    group=config.wandb.group,
                    tags=config.wandb.tags,
                    name=config.wandb.name or RunFolder(folder).name,
                    mode=config.wandb.mode,
                    dir=str(folder),
                    id=run_id,
                    resume="allow",
                    config=settings,
                )
        except OSError as failure:
            if isinstance(failure.__cause__, (wandb.errors.UsageError, wandb.errors.AuthenticationError)):
                raise ValueError(f"W&B: {failure}; or set logger.wandb.mode=offline") from failure
            raise
        self.id: str = self._run.id

    def log(self, record: Record) -> None:
        values = {key: value for key, value in record.items() if key != "step" and value is not None}
        with _as_os_error():
            self._run.log(values, step=int(record["step"]))

    def close(self) -> None:
        with _as_os_error():
            self._run.finish()


class Tensorboard:
    """Event files in `folder`.

    Raises:
        ValueError: the package is missing.
        OSError: the folder can't be written.
    """

    name = "tensorboard"

    def __init__(self, folder: Path, resumed_step: int):
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError:
            raise ValueError(
                "tensorboard is not installed: pip install tensorboard, or set logger.tensorboard=false"
            ) from None
        with _as_os_error():
            self._writer = SummaryWriter(str(folder), purge_step=resumed_step + 1)

    def log(self, record: Record) -> None:
        with _as_os_error():
            for key, value in record.items():
                if key != "step" and value is not None:
                    self._writer.add_scalar(key, value, record["step"])

    def close(self) -> None:
        with _as_os_error():
            self._writer.close()


def last_losses(path: Path) -> tuple[float | None, float | None]:
    """The last finite training and validation losses, nats per token; None where there is none."""
    return last_value(path, "loss"), last_value(path, "validation_loss")


def last_value(path: Path, key: str) -> float | None:
    """The last finite value of a key; None where there is none."""
    values = [record[key] for record in read_metrics(path) if record.get(key) is not None]
    return values[-1] if values else None


def checkpoint_seconds(path: Path) -> tuple[float, float]:
    """Seconds in which training stood still for checkpoints, and those in which it trained."""
    stood = trained = 0.0
    before = 0  # tokens
    for record in read_metrics(path):
        stood += record.get("checkpoint_stall_s") or 0.0
        rate, tokens = record.get("tokens_per_second"), record.get("tokens")
        if rate and tokens:
            trained += (tokens - before) / rate
            before = tokens
    return stood, trained
