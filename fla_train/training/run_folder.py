"""The run folder: its paths, its lock, and what is written once before training starts."""

import json
import os
import shutil
import time
from contextlib import suppress
from datetime import datetime
from pathlib import Path

from fla_train.hub.paths import own_name
from fla_train.training.checkpoint import CheckpointStore
from fla_train.utils.environment import describe_environment
from fla_train.utils.filesystem import halves_of, write_whole
from fla_train.utils.locks import open_lock, try_lock
from fla_train.utils.records import Record, read_metrics

LOCK_WAIT = 10.0  # seconds; the workers of a killed launcher need a moment to die


class RunFolder:
    """Paths inside a run folder (docs/metrics.md lists them).

    Attributes:
        name: what plots, cards and loggers call the run.
        config: what the user asked for, with absolute paths.
        plan: the `RunPlan` of the newest start.
        starts: a numbered folder each time workers were started: start.json, config.yaml, environment.json.
        accuracy: curves of the newest evaluation on a task.
    """

    def __init__(self, root: Path):
        self.root = root
        self.name = own_name(root)
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
        """What a rank prints. One file each: NFS loses lines that two machines append."""
        return self.root / ("train.log" if rank == 0 else f"logs/rank-{rank}.log")

    def export(self, step: int) -> Path:
        return self.root / "hf" / f"step-{step:07d}"

    def id(self) -> str | None:
        """Return the random id that the run's checkpoints record as well; None: there is none yet."""
        try:
            return self.run_id.read_text().strip() or None
        except OSError:
            return None

    @property
    def store(self) -> CheckpointStore:
        """The run's checkpoints."""
        return CheckpointStore(self.checkpoints, self.id())

    def owns(self, checkpoint: Path) -> bool:
        """Return whether a checkpoint lies among this run's."""
        return checkpoint.resolve().parent == self.checkpoints.resolve()

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

    def sweep(self) -> None:
        """Delete what a killed process left half-written of our files. Only with the run's lock held."""
        for file in (self.config, self.environment, self.plan, self.run_id, self.metrics, self.accuracy):
            for aside in halves_of(file):
                aside.unlink(missing_ok=True)

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
            for file in (self.config, self.environment):
                shutil.copyfile(file, folder / file.name)
            write_whole(folder / "start.json", json.dumps(record) + "\n")

    def start_records(self) -> list[Record]:
        """Return what `record_start` recorded, oldest first."""
        files = sorted(self.starts.glob("*/start.json"))
        return [record for file in files for record in read_metrics(file)]


class RunLock:
    """Keeps other trainers from writing a run folder while this process lives.

    Both the folder and its `.lock` are locked: whoever deletes the file does not unlock the folder, and not
    every file system locks folders.

    Raises:
        ValueError: another trainer holds it, or the folder is not to be written to.
    """

    def __init__(self, folder: RunFolder):
        self._root, self._path = folder.root, folder.root / ".lock"
        try:
            self._folder = os.open(self._root, os.O_RDONLY)
            self._file = open_lock(self._path)
        except OSError as error:
            raise _unwritable(self._root, error) from error
        deadline = time.monotonic() + LOCK_WAIT
        while not (try_lock(self._folder) and try_lock(self._file.fileno())):
            if time.monotonic() > deadline:
                self.close()
                raise ValueError(self._in_use())
            time.sleep(0.2)

    def check(self) -> None:
        """Look whether the folder is still this one, and still ours.

        Raises:
            ValueError: it was renamed or deleted, or another trainer holds it now.
        """
        if not _same(self._root, self._folder):
            raise ValueError(
                f"run.dir={self._root} was renamed or deleted while it was trained: give its name"
            )
        if _same(self._path, self._file.fileno()):
            return
        try:  # `.lock` was deleted or replaced, which the folder's lock survives where there is one
            again = open_lock(self._path)
        except OSError as error:
            raise _unwritable(self._root, error) from error
        if not try_lock(again.fileno()):
            raise ValueError(self._in_use())
        self._file.close()
        self._file = again

    def close(self) -> None:
        os.close(self._folder)
        self._file.close()

    def _in_use(self) -> str:
        return f"another training process writes {self._root}: wait for it or give another run.dir"


def is_locked(folder: RunFolder) -> bool:
    """Whether a trainer writes the folder now, as far as its file system has locks."""
    places = [place for place in (folder.root, folder.root / ".lock") if place.exists()]
    descriptors = [os.open(place, os.O_RDONLY) for place in places]
    try:
        return not all(map(try_lock, descriptors))
    finally:
        for descriptor in descriptors:
            os.close(descriptor)


def _same(path: Path, descriptor: int) -> bool:
    try:
        return os.path.samestat(os.lstat(path), os.fstat(descriptor))
    except FileNotFoundError:
        return False


def _unwritable(path: Path, error: OSError) -> ValueError:
    return ValueError(f"run.dir={path} can't be written ({error.strerror}): give another run.dir")


def new_run_dir(label: str) -> Path:
    """`runs/<label>-<time>`, made here, so that two launches in one second get two folders."""
    parent, base = Path("runs"), f"{label}-{datetime.now():%Y%m%d-%H%M%S}"
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
