"""The run folder: its paths, its lock, and what is written once before training starts."""

import fcntl
import json
import os
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import IO

from fla_train.data.lock import open_lock
from fla_train.hub.environment import describe_environment
from fla_train.hub.paths import own_name
from fla_train.utils.filesystem import write_whole
from fla_train.utils.records import Record, read_metrics

LOCK_WAIT = 10.0  # seconds; the workers of a killed launcher need a moment to die


@dataclass(frozen=True)
class RunFolder:
    """Paths inside a run folder (docs/architecture.md lists them)."""

    root: Path

    @property
    def name(self) -> str:
        """What plots, cards and loggers call the run."""
        return own_name(self.root)

    @property
    def environment(self) -> Path:
        return self.root / "environment.json"

    @property
    def plan(self) -> Path:
        return self.root / "plan.json"

    @property
    def metrics(self) -> Path:
        return self.root / "metrics.jsonl"

    @property
    def starts(self) -> Path:
        """A numbered folder each time workers were started: start.json, config.yaml, environment.json."""
        return self.root / "starts"

    @property
    def checkpoints(self) -> Path:
        return self.root / "checkpoints"

    @property
    def loss_plot(self) -> Path:
        return self.root / "plots" / "loss.png"

    @property
    def accuracy(self) -> Path:
        """Curves of the newest evaluation on a task."""
        return self.root / "accuracy.json"

    @property
    def accuracy_plot(self) -> Path:
        return self.root / "plots" / "accuracy.png"

    def config(self, machine: int) -> Path:
        """The resolved config; machines after the first, whose launch section differs, have their own."""
        return self.root / ("config.yaml" if machine == 0 else f"config-machine-{machine}.yaml")

    def log(self, machine: int) -> Path:
        """What a machine's ranks print. One file each: NFS loses lines that two machines append."""
        return self.root / ("train.log" if machine == 0 else f"train-machine-{machine}.log")

    def export(self, step: int) -> Path:
        return self.root / "hf" / f"step-{step:07d}"

    def check(self) -> None:
        """Refuse what can't be a run folder, before there is any work to lose.

        Raises:
            ValueError: it is a checkpoint, an export, a sweep or a file, or nothing can be written there.
        """
        for name, what in (("manifest.json", "a checkpoint"), ("config.json", "an export")):
            if (self.root / name).is_file():
                run = self.root.parent.parent
                raise ValueError(f"run.dir={self.root} is {what} of a run: give the run's folder, {run}")
        if jobs := sorted(file.parent.name for file in self.root.glob("[0-9]*/config.yaml")):
            raise ValueError(
                f"run.dir={self.root} holds the runs of a sweep: give run.dir={self.root / jobs[0]}"
            )
        place = self.root.absolute()
        while not place.exists():
            place = place.parent
        if not place.is_dir() or not os.access(place, os.W_OK):
            reason = "Permission denied" if place.is_dir() else f"{place} is a file"
            raise _unwritable(self.root, OSError(None, reason))

    def create(self) -> None:
        """Make the folder. Raises `ValueError` where that can't be done."""
        try:
            self.checkpoints.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise _unwritable(self.root, error) from error

    def record_start(self, step: int, tokens: int, processes: int) -> None:
        """Record that workers start after `step`, with copies of config and environment.

        A full disk costs the record, not the start.
        """
        now = datetime.now().astimezone().isoformat(timespec="seconds")
        record = {"time": now, "step": step, "tokens": tokens, "processes": processes}
        with suppress(OSError):
            self.starts.mkdir(exist_ok=True)
            number = max((int(f.name) for f in self.starts.iterdir() if f.name.isdecimal()), default=0) + 1
            folder = self.starts / f"{number:04d}"
            folder.mkdir()
            for file in (self.config(0), self.environment):
                shutil.copyfile(file, folder / file.name)
            write_whole(folder / "start.json", json.dumps(record) + "\n")

    def start_records(self) -> list[Record]:
        """What `record_start` recorded, oldest first; of earlier versions the lines of starts.jsonl."""
        files = [self.root / "starts.jsonl", *sorted(self.starts.glob("*/start.json"))]
        return [record for file in files for record in read_metrics(file)]

    @contextmanager
    def locked(self) -> Iterator[int]:
        """Hold the run; yields the lock's descriptor. A process that inherits it holds the run too.

        Raises:
            ValueError: another trainer holds it, or the folder is not to be written to.
        """
        try:
            lock = open_lock(self.root / ".lock")
        except OSError as error:
            raise _unwritable(self.root, error) from error
        with lock as file:
            deadline = time.monotonic() + LOCK_WAIT
            while not _try_lock(file):
                if time.monotonic() > deadline:
                    raise ValueError(
                        f"another training process writes {self.root}: wait for it or give another run.dir"
                    )
                time.sleep(0.2)
            yield file.fileno()


def _unwritable(path: Path, error: OSError) -> ValueError:
    return ValueError(f"run.dir={path} can't be written ({error.strerror}): give another run.dir")


def _try_lock(file: IO) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def new_run_dir(label: str, parent: Path = Path("runs")) -> Path:
    """`runs/<label>-<time>`, made here, so that two launches in one second get two folders."""
    base = f"{label}-{datetime.now():%Y%m%d-%H%M%S}"
    for attempt in range(1, 1000):
        path = parent / (base if attempt == 1 else f"{base}-{attempt}")
        try:
            path.mkdir(parents=True)
            return path
        except FileExistsError:
            continue
        except OSError as error:
            raise _unwritable(path, error) from error
    raise ValueError(f"{parent} already holds a thousand runs named {base}: give run.dir")


def write_environment(folder: RunFolder, device: str) -> None:
    write_whole(folder.environment, json.dumps(describe_environment(device), indent=2) + "\n")
