"""metrics.jsonl, the source of truth of a run, and wandb and tensorboard as views of it."""

import json
import math
from pathlib import Path
from typing import Protocol

from fla_train.training.runfolder import RunFolder, write_whole
from fla_train.training.schema import LoggerConfig

# `step`, `tokens`, and training keys (loss, lr, grad_norm, tokens_per_second, ...) or validation keys.
Record = dict[str, float | int | bool | None]


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
        truncate(path, resumed_step)
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


class Wandb:
    """A W&B run; offline unless asked otherwise. `id` continues an earlier one.

    Raises:
        ValueError: the package is missing.
        ConnectionError: W&B gives no run.
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
        except wandb.Error as failure:
            raise ConnectionError(" ".join(str(failure).split())) from failure
        self.id: str = self._run.id

    def log(self, record: Record) -> None:
        values = {key: value for key, value in record.items() if key != "step" and value is not None}
        self._run.log(values, step=int(record["step"]))

    def close(self) -> None:
        self._run.finish()


class Tensorboard:
    """Event files in `folder`."""

    name = "tensorboard"

    def __init__(self, folder: Path, resumed_step: int):
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError:
            raise ValueError(
                "tensorboard is not installed: pip install tensorboard, or set logger.tensorboard=false"
            ) from None
        self._writer = SummaryWriter(str(folder), purge_step=resumed_step + 1)

    def log(self, record: Record) -> None:
        for key, value in record.items():
            if key != "step" and value is not None:
                self._writer.add_scalar(key, value, record["step"])

    def close(self) -> None:
        self._writer.close()


def read_metrics(path: Path) -> list[Record]:
    """The records of a metrics.jsonl; a last line cut short by a kill is left out."""
    records = []
    for line in path.read_text().splitlines():
        try:
            records.append(json.loads(line))
        except ValueError:
            break
    return records


def last_losses(path: Path) -> tuple[float | None, float | None]:
    """The last finite training and validation losses, nats per token; None where there is none."""
    last: dict[str, float | None] = {"loss": None, "validation_loss": None}
    for record in read_metrics(path):
        for key in last:
            if record.get(key) is not None:
                last[key] = record[key]
    return last["loss"], last["validation_loss"]


def checkpoint_seconds(path: Path) -> tuple[float, float]:
    """Seconds in which training stood still for checkpoints, and those in which it trained."""
    stood = trained = 0.0
    before = 0  # tokens
    for record in read_metrics(path):
        stood += record.get("checkpoint_stall_s") or 0.0
        if rate := record.get("tokens_per_second"):
            trained += (record["tokens"] - before) / rate
            before = record["tokens"]
    return stood, trained


def truncate(path: Path, step: int) -> None:
    """Drop the records after `step`, which a resumed run writes again. The file is replaced in one move."""
    if not path.exists():
        return
    kept = [record for record in read_metrics(path) if record["step"] <= step]
    write_whole(path, "".join(json.dumps(record) + "\n" for record in kept))
