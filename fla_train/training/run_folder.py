"""Manage a run folder: its paths, its lock, and the files that are written once before training."""

import json
import os
import shutil
import time
from contextlib import suppress
from datetime import datetime
from itertools import count
from pathlib import Path

from fla_train.hub.paths import last_component
from fla_train.training.checkpoint import CheckpointStore
from fla_train.utils.filesystem import write_whole
from fla_train.utils.locks import open_lock, try_lock
from fla_train.utils.records import Record, read_metrics

LOCK = ".lock"
LOCK_WAIT = 10.0  # seconds; workers of a killed launcher end within them


class RunFolder:
    """Name the paths inside a run folder (docs/metrics.md lists them).

    Attributes:
        name: name of the run in plots, cards and loggers.
        config: file with the user's request, with absolute paths.
        plan: file with the `RunPlan` of the newest start.
        starts: a numbered folder per start of workers: start.json, config.yaml, environment.json.
        accuracy: file with the curves of the newest evaluation on a task.
    """

    def __init__(self, root: Path):
        self.root = root
        self.name = last_component(root)
        self.config = root / "config.yaml"
        self.environment = root / "environment.json"
        self.plan = root / "plan.json"
        self.run_id = root / "run_id"
        self.metrics = root / "metrics.jsonl"
        self.starts = root / "starts"
        self.checkpoints = root / "checkpoints"
        self.accuracy = root / "accuracy.json"
        self.loss_plot = root / "plots" / "loss.png"
        self.accuracy_plot = root / "plots" / "accuracy.png"

    def log(self, rank: int) -> Path:
        """Return the log file of a rank.

        Each rank has a file, because NFS loses lines that two machines append to one file.
        """
        return self.root / ("train.log" if rank == 0 else f"logs/rank-{rank}.log")

    def export(self, step: int) -> Path:
        return self.root / "hf" / f"step-{step:07d}"

    def id(self) -> str | None:
        """Return the random id that the run's checkpoints also record, or None before the first start."""
        return self.run_id.read_text().strip() or None if self.run_id.is_file() else None

    @property
    def store(self) -> CheckpointStore:
        """Return the run's checkpoints."""
        return CheckpointStore(self.checkpoints, self.id())

    def owns(self, checkpoint: Path) -> bool:
        """Return whether a checkpoint belongs to this run's folder."""
        return checkpoint.resolve().parent == self.checkpoints.resolve()

    def check(self) -> None:
        """Check that the path can be a run folder before there is any work to lose.

        Raises:
            ValueError: it is a checkpoint, an export, a sweep or a file, or it is not writable.
        """
        for name, what in (("manifest.json", "a checkpoint"), ("config.json", "an export")):
            if (self.root / name).is_file():
                run = self.root.parent.parent
                raise ValueError(f"run.dir={self.root} is {what} of a run: give the run's folder, {run}")
        if jobs := sorted(file.parent.name for file in self.root.glob("[0-9]*/config.yaml")):
            raise ValueError(f"run.dir={self.root} is a sweep: give run.dir={self.root / jobs[0]}")
        root = self.root.absolute()
        existing = next(path for path in (root, *root.parents) if path.exists())
        if not existing.is_dir() or not os.access(existing, os.W_OK):
            raise ValueError(f"run.dir={self.root} can't be written: give another run.dir")

    def create(self) -> None:
        """Create the folder, if it is missing."""
        self.checkpoints.mkdir(parents=True, exist_ok=True)

    def record_start(self, step: int, tokens: int, processes: int) -> None:
        """Record that workers start after `step`, with copies of config and environment.

        If the disk is full the record is lost, but the start continues.
        """
        now = datetime.now().astimezone().isoformat(timespec="seconds")
        record = {"time": now, "step": step, "tokens": tokens, "processes": processes}
        with suppress(OSError):
            self.starts.mkdir(exist_ok=True)
            number = max((int(f.name) for f in self.starts.iterdir() if f.name.isdecimal()), default=0) + 1
            folder = self.starts / f"{number:04d}"
            folder.mkdir()
            for file in (self.config, self.environment):
                shutil.copyfile(file, folder / file.name)
            write_whole(folder / "start.json", json.dumps(record) + "\n")

    def start_records(self) -> list[Record]:
        """Return the records of `record_start`, oldest first."""
        files = sorted(self.starts.glob("*/start.json"))
        return [record for file in files for record in read_metrics(file)]


class RunLock:
    """Lock a run folder by its file `.lock` against other trainers while this process lives.

    Raises:
        ValueError: another trainer holds it.
        OSError: the folder is not writable, or `.lock` is a symbolic link.
    """

    def __init__(self, folder: RunFolder):
        self._root, self._path = folder.root, folder.root / LOCK
        self._take(wait=LOCK_WAIT)
        self._identity = os.stat(self._root)

    def check(self) -> None:
        """Check that the folder was not replaced and that this process still holds the lock.

        Raises:
            ValueError: it was renamed or deleted, or another trainer holds it now.
        """
        if not _is_at(self._root, self._identity):
            raise ValueError(f"run.dir={self._root} was renamed or deleted while it was trained")
        if not _is_at(self._path, os.fstat(self._file.fileno())):
            # The file was deleted, and another trainer may have locked a new one.
            self._file.close()
            self._take()

    def close(self) -> None:
        self._file.close()

    def _take(self, wait: float = 0.0) -> None:
        self._file = open_lock(self._path)
        deadline = time.monotonic() + wait
        while not try_lock(self._file.fileno()):
            if time.monotonic() > deadline:
                self._file.close()
                raise ValueError(f"another training process writes {self._root}: give another run.dir")
            time.sleep(0.2)


def is_locked(folder: RunFolder) -> bool:
    """Return whether a trainer writes the folder now, as far as its file system supports locks."""
    try:
        with (folder.root / LOCK).open("rb") as file:
            return not try_lock(file.fileno())
    except FileNotFoundError:
        return False


def _is_at(path: Path, identity: os.stat_result) -> bool:
    """Return whether `path` is the file or folder with this identity."""
    try:
        return os.path.samestat(os.lstat(path), identity)
    except FileNotFoundError:
        return False


def new_run_dir(label: str) -> Path:
    """Create `runs/<label>-<time>` at once, so that two launches in one second get two folders."""
    parent, base = Path("runs"), f"{label}-{datetime.now():%Y%m%d-%H%M%S}"
    for attempt in count(1):
        path = parent / (base if attempt == 1 else f"{base}-{attempt}")
        with suppress(FileExistsError):
            path.mkdir(parents=True)
            return path
