"""`fla-runs queue`: train the runs of the papers' expressivity tables for a given time and write the tables.

fla-runs queue --only 'S3/*' --seeds 0 --dry-run      # what would run, how far it is, what is complete
fla-runs queue --seconds 3600 --jobs 4                # four runs at once on each GPU, for an hour
fla-runs queue --seconds 0                            # only write the tables of what has been tested

Each run has a folder with its newest checkpoint, and nothing else records how far the queue is. So a queue
that was killed continues with the same command, also on a machine to which its folder was copied.
"""

import argparse
import json
import os
import re
import signal
import subprocess
import tarfile
import time
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from importlib.resources import files
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING

import yaml

from fla_train.cli import train
from fla_train.cli.app import INTERRUPTED, compose
from fla_train.hub.saved_config import assign

if TYPE_CHECKING:  # they import torch, and are not needed for --help
    from fla_train.eval.expressivity_table import Run

HOME = "runs/expressivity"
GRACE = 45  # seconds that runs get to save a checkpoint before the time is over
POLL = 0.2  # seconds between looks at the runs
USER_ERROR = 2  # exit status of fla-train for what another attempt does not change
RECIPE, OUTPUT = "recipe", "output.txt"  # in a run's folder: see `recipe_of`; what it printed last
# Left out of an archive: what can be made again from the rest, and what belongs to this machine.
NOT_PACKED = {"plots", "profile", "logs", "starts", ".lock", OUTPUT, "train.log"}


def build_parser() -> argparse.ArgumentParser:
    """The command's options."""
    parser = argparse.ArgumentParser(
        prog="fla-runs queue",
        description="Train the runs of the papers' expressivity tables, several at once, and write the "
        "tables (FOLDER/tables.md, tables.json). Complete runs are left alone, others continue from their "
        "newest checkpoint. Runs that the papers' claims rest on come first; among them, those begun.",
    )
    parser.add_argument(
        "overrides", nargs="*", metavar="KEY=VALUE", help="more overrides of fla-train for every run"
    )
    parser.add_argument(
        "--only",
        action="append",
        metavar="GLOB",
        help="runs whose name (TABLE/ROW/COLUMN/seed-N) or a part of it between slashes fits, such as "
        "'s3/*', mqar or 'DeltaProduct_2_-1_1/A5'; may be repeated, earlier ones are trained first "
        "(default: all)",
    )
    parser.add_argument(
        "--seeds", type=_seeds, default=[0, 1, 2], metavar="N,N", help="seeds (default: 0,1,2)"
    )
    parser.add_argument(
        "--full", action="store_true", help="the papers' own numbers of steps (default: the fast recipes)"
    )
    parser.add_argument(
        "--folder", type=Path, default=Path(HOME), help=f"where runs and tables are (default: {HOME})"
    )
    parser.add_argument(
        "--seconds",
        type=float,
        default=float("inf"),
        metavar="S",
        help=f"time for all of it; {GRACE} s before its end (a quarter of it, if that is less) the runs save "
        "a checkpoint and end; 0: train nothing (default: until all runs are done)",
    )
    parser.add_argument(
        "--run-seconds",
        type=float,
        default=float("inf"),
        metavar="S",
        help="time for one run in this call; then it saves a checkpoint and makes room",
    )
    parser.add_argument(
        "--jobs",
        type=int,
        default=1,
        metavar="N",
        help="runs at once on each GPU, or on the CPU (default: 1)",
    )
    parser.add_argument(
        "--gpus", metavar="N,N", help="GPUs to use (default: CUDA_VISIBLE_DEVICES, or all; none: the CPU)"
    )
    parser.add_argument(
        "--pack",
        type=Path,
        metavar="FILE.tgz",
        help="at the end, write the folder into this archive: of complete runs the export, of others the "
        "newest checkpoint, of all the metrics; no plots and logs",
    )
    parser.add_argument(
        "--pack-every",
        type=float,
        default=float("inf"),
        metavar="S",
        help="seconds between such archives while runs go on, for a machine that may be taken away (default: "
        "only at the end)",
    )
    parser.add_argument("--dry-run", action="store_true", help="list the runs and their state, train nothing")
    return parser


def _seeds(text: str) -> list[int]:
    if not re.fullmatch(r"\d+(,\d+)*", text):
        raise argparse.ArgumentTypeError(f"seeds are numbers and commas, as in 0,1,2: got '{text}'")
    return [int(seed) for seed in text.split(",")]


@dataclass
class Job:
    """A run in the queue.

    Attributes:
        state: `complete`, `failed`, `begun` or `new`, as its folder says; `foreign`: that holds a run of
            another recipe; `running` or `elsewhere`; `waiting`: until fewer others run on its GPU.
        attempts: in this call.
        asked: it has been asked to stop.
    """

    run: "Run"
    folder: Path
    overrides: list[str]
    state: str
    attempts: int = 0
    asked: bool = False
    started: float = 0.0
    slot: str | None = None
    process: subprocess.Popen | None = field(default=None, repr=False)


def list_jobs(request: argparse.Namespace) -> list[Job]:
    """The chosen runs in the order in which they are trained.

    Raises:
        ValueError: a pattern fits no run.
    """
    from fla_train.eval.expressivity_table import read_tables, runs_of

    runs = [run for name in read_tables() for run in runs_of(name, request.seeds, fast=not request.full)]
    patterns = request.only or ["*"]
    for pattern in patterns:
        if not any(run.matches(pattern) for run in runs):
            raise ValueError(f"--only '{pattern}' fits no run: --dry-run lists their names")
    jobs = []
    for run in runs:
        if any(map(run.matches, patterns)):
            folder, overrides = run.folder(request.folder), [*run.overrides, *request.overrides]
            jobs.append(Job(run, folder, overrides, _state(folder, overrides)))

    def order(job: Job) -> tuple:
        first = next(i for i, pattern in enumerate(patterns) if job.run.matches(pattern))
        states = ["begun", "new"].index(job.state) if job.state in ("begun", "new") else 2
        return first, not job.run.claimed, states, job.run.seed, -job.run.weight

    return sorted(jobs, key=order)


def _state(folder: Path, overrides: Sequence[str]) -> str:
    from fla_train.eval.expressivity_table import COMPLETE, FAILED
    from fla_train.training.run_folder import RunFolder, is_locked

    recipe = folder / RECIPE
    if recipe.is_file() and (folder / "metrics.jsonl").is_file():
        # Nothing continues it: a run of two recipes would not say which number is whose.
        if recipe.read_text().strip() != recipe_of(overrides):
            return "foreign"
    if (folder / COMPLETE).is_file():
        return "complete"
    if folder.is_dir() and is_locked(RunFolder(folder)):
        return "elsewhere"
    if (folder / FAILED).is_file():
        return "failed"
    return "begun" if (folder / "metrics.jsonl").is_file() else "new"


def recipe_of(overrides: Sequence[str]) -> str:
    """The overrides of a run, and a number that changes with the content of its experiment's files."""
    experiment = overrides[0].removeprefix("experiment=")
    return f"{' '.join(overrides)} # {zlib.crc32(experiment_content(experiment).encode()):08x}"


@cache
def experiment_content(experiment: str) -> str:
    """What the file of an experiment says, and those that it builds on, without comments."""
    file = files("fla_train.configs") / "experiment" / f"{experiment}.yaml"
    content = yaml.safe_load(file.read_text())
    bases = [base for base in content.get("defaults", []) if isinstance(base, str)]
    return json.dumps([content, *(experiment_content(base.removeprefix("/experiment/")) for base in bases)])


def describe(job: Job) -> str:
    """A line of the list."""
    from fla_train.utils.records import read_metrics

    step = max((record["step"] for record in read_metrics(job.folder / "metrics.jsonl")), default=0)
    claim = "claim" if job.run.claimed else ""
    return f"{job.state:10} {step:>7,} steps  {claim:5}  {job.run.name}  {' '.join(job.overrides)}"


class Queue:
    """Trains jobs on slots until all are done or the time is over.

    Args:
        slots: the GPU of each place for a run, or None for the CPU; as many as run at once.
        seconds: time for all of it, saving included.
        run_seconds: time for one run.
        start: starts `fla-train` with these overrides: `start_command`.
        pack: called every `pack_every` seconds while runs go on.
    """

    def __init__(
        self,
        jobs: Sequence[Job],
        slots: Sequence[str | None],
        *,
        seconds: float,
        run_seconds: float,
        start: Callable[..., subprocess.Popen],
        pack: Callable[[], None],
        pack_every: float,
    ):
        self._waiting = [job for job in jobs if job.state not in ("complete", "elsewhere", "foreign")]
        self._running: list[Job] = []
        self._slots, self._run_seconds, self._start_command = list(slots), run_seconds, start
        self._end = time.monotonic() + seconds
        self._grace = min(GRACE, seconds / 4)
        self._pack, self._pack_every = pack, pack_every
        self.signal: int | None = None

    def work(self) -> None:
        """Train. A signal, an error or the end of the time stops all runs, each with a checkpoint."""
        try:
            self._train()
        finally:
            self._stop_all()

    def _train(self) -> None:
        packed = time.monotonic()
        while (self._waiting or self._running) and not self._over(self._grace):
            while self._waiting and self._slots:
                self._start(self._waiting.pop(0))
            for job in self._running:
                if time.monotonic() - job.started > self._run_seconds:
                    self._ask(job)
            self._collect()
            if time.monotonic() - packed >= self._pack_every:
                self._pack()
                packed = time.monotonic()
            time.sleep(POLL)

    def _stop_all(self) -> None:
        for job in self._running:
            self._ask(job)
        self._end = min(self._end, time.monotonic() + GRACE)
        while self._running:
            if time.monotonic() > self._end:
                for job in self._running:
                    job.process.kill()
            self._collect()
            time.sleep(POLL)

    def stop(self, number: int, frame: object) -> None:
        """Handler of signals."""
        self.signal = number

    def _over(self, grace: float) -> bool:
        return self.signal is not None or time.monotonic() >= self._end - grace

    def _start(self, job: Job) -> None:
        from fla_train.eval.expressivity_table import FAILED

        job.state = _state(job.folder, job.overrides)  # another queue may have come to it first
        if job.state in ("complete", "elsewhere", "foreign"):
            say(job.state, job, "by another process")
            return
        job.folder.mkdir(parents=True, exist_ok=True)
        failed_before = (job.folder / FAILED).is_file() or job.attempts > 0
        (job.folder / FAILED).unlink(missing_ok=True)
        (job.folder / RECIPE).write_text(recipe_of(job.overrides) + "\n")
        job.slot = min(self._slots, key=lambda slot: sum(other.slot == slot for other in self._running))
        self._slots.remove(job.slot)
        job.started, job.state = time.monotonic(), "running"
        job.attempts, job.asked = job.attempts + 1, False
        # One thread each, so that results do not depend on how many run at once.
        variables = {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": job.slot or ""}
        # Models of flash-linear-attention tune their kernels for minutes. Triton's cache holds the outcome,
        # so that later runs do not repeat it.
        variables["TRITON_CACHE_AUTOTUNING"] = os.environ.get("TRITON_CACHE_AUTOTUNING", "1")
        if failed_before:
            # Without CUDA MPS, under which an illegal access of one process ends all processes on the GPU:
            # runs that another's error has ended can complete now. No daemon listens at this path.
            variables["CUDA_MPS_PIPE_DIRECTORY"] = str(job.folder / "no-mps")
        # The newest checkpoint is enough to continue. Overrides of the run come later and win.
        ours = [assign("run.dir", job.folder), "logger=none", "launch.num_processes=1"]
        ours += ["trainer.keep_checkpoints=1", *job.overrides]
        job.process = self._start_command("train", ours, job.folder / OUTPUT, **variables)
        self._running.append(job)
        say("started", job, f"on GPU {job.slot}" if job.slot else "")

    def _ask(self, job: Job) -> None:
        if not job.asked:
            job.asked = True
            job.process.send_signal(signal.SIGTERM)

    def _collect(self) -> None:
        for job in [job for job in self._running if job.process.poll() is not None]:
            self._running.remove(job)
            self._finish(job, job.process.returncode)
            # Where memory ran out beside other runs, fewer run at once from now on.
            if job.state != "waiting":
                self._slots.append(job.slot)

    def _finish(self, job: Job, code: int) -> None:
        from fla_train.eval.expressivity_table import COMPLETE, FAILED, WALL
        from fla_train.training.preemption import EXIT_CODE

        seconds, wall = time.monotonic() - job.started, job.folder / WALL
        if wall.is_file():
            seconds += float(wall.read_text())
        if code == 0:
            (job.folder / COMPLETE).touch()
            (job.folder / FAILED).unlink(missing_ok=True)
            job.state = "complete"
            say("complete", job, f"after {seconds:.0f} s")
        elif code == EXIT_CODE or (job.asked and code in (INTERRUPTED, -signal.SIGTERM, -signal.SIGKILL)):
            job.state = "begun"
            # Killed in a long test, say: what came after its last checkpoint is lost.
            say("killed" if code == -signal.SIGKILL else "stopped", job, f"after {seconds:.0f} s")
        elif self._lacks_room(job, reason := _reason(job.folder / OUTPUT, code)):
            job.state, job.attempts = "waiting", job.attempts - 1
            say("waiting", job, f"GPU {job.slot} has no memory for it beside the others")
            self._waiting.insert(0, job)
            return  # the time it took to fail is not time of the run
        elif (now := _state(job.folder, job.overrides)) in ("complete", "elsewhere"):
            job.state = now
            say(now, job, "by another process")
            return
        else:
            job.state = "failed"
            (job.folder / FAILED).write_text(reason + "\n")
            say("failed", job, reason)
            if code != USER_ERROR and job.attempts == 1:
                self._waiting.append(job)
        wall.write_text(f"{seconds:.0f}\n")

    def _lacks_room(self, job: Job, reason: str) -> bool:
        from fla_train.training.failures import OUT_OF_GPU_MEMORY

        return OUT_OF_GPU_MEMORY in reason and any(other.slot == job.slot for other in self._running)


def _reason(output: Path, code: int) -> str:
    lines = [line.strip() for line in output.read_text(errors="replace").splitlines() if line.strip()]
    errors = [line for line in lines if line.startswith("error: ")]
    cause = f"signal {-code}" if code < 0 else f"exit status {code}"
    return (errors or [f"{cause}, {lines[-1]}" if lines else cause])[0].removeprefix("error: ")


def say(what: str, job: Job, more: str) -> None:
    print(f"{what:10} {job.run.name} {more}".rstrip(), flush=True)


def pack(folder: Path, archive: Path) -> int:
    """Write `folder` into a .tgz, to be unpacked elsewhere; returns its bytes.

    A run that continues needs its newest checkpoint, a complete one only its export, a quarter of that.
    """
    from fla_train.eval.expressivity_table import COMPLETE
    from fla_train.training.checkpoint import checkpoints

    folder = folder.resolve()
    left_out = set()
    for run in folder.glob("*/*/*/seed-*"):
        kept = checkpoints(run / "checkpoints")
        left_out |= {*kept} if (run / COMPLETE).is_file() else {*kept[:-1], run / "hf"}

    archive.parent.mkdir(parents=True, exist_ok=True)
    unfinished = archive.with_name(f"{archive.name}.part")  # an earlier archive stays whole until then
    left_out |= {archive.resolve(), unfinished.resolve()}

    def keep(entry: tarfile.TarInfo) -> tarfile.TarInfo | None:
        path = folder.parent / entry.name
        return None if path.name in NOT_PACKED or path in left_out else entry

    with tarfile.open(unfinished, "w:gz") as tar:
        tar.add(folder, folder.name, filter=keep)
    return unfinished.replace(archive).stat().st_size


def _pack_begun(folder: Path, archive: Path) -> None:
    try:
        pack(folder, archive)
    except OSError as failure:  # a newer checkpoint has replaced one, or the disk is full: the runs go on
        print(f"no archive this time: {failure}", flush=True)


def _slots(request: argparse.Namespace) -> list[str | None]:
    if request.jobs < 1:
        raise ValueError(f"--jobs={request.jobs}: give 1 or more")
    visible = request.gpus or os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        from torch.cuda import device_count

        visible = ",".join(map(str, range(device_count())))
    gpus = [gpu for gpu in visible.split(",") if gpu and gpu != "none"]
    return list(chain.from_iterable([gpus or [None]] * request.jobs))


@contextmanager
def _handled(queue: Queue) -> Iterator[None]:
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)
    previous = {number: signal.signal(number, queue.stop) for number in numbers}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def run_queue(arguments: Sequence[str], start: Callable[..., subprocess.Popen] | None = None) -> int:
    """Do what the command line asks for; returns the exit status.

    Args:
        start: starts a command, as `fla_train.utils.processes.start_command` does.

    Raises:
        ValueError: the options or overrides do not fit, or only tables are wanted and no run has been tested.
        OSError: the folder, the tables or the archive cannot be written.
    """
    request = build_parser().parse_intermixed_args(arguments)
    from fla_train.eval.expressivity_table import write_tables
    from fla_train.training.preemption import EXIT_CODE
    from fla_train.utils.processes import start_command

    jobs = list_jobs(request)
    if request.overrides:  # else each run would fail by them, one after another
        train.register()
        compose("train", jobs[0].overrides)
    if request.dry_run:
        print(*map(describe, jobs), sep="\n")
        print(summary(jobs))
        return 0
    for job in jobs:
        if job.state == "foreign":
            trained = (job.folder / RECIPE).read_text().strip()
            say("foreign", job, f"was trained by another recipe ({trained}): give another --folder")
    if request.pack:
        request.pack.parent.mkdir(parents=True, exist_ok=True)  # what can't be written is refused at once
    queue = Queue(
        jobs,
        _slots(request),
        seconds=request.seconds,
        run_seconds=request.run_seconds,
        start=start or start_command,
        pack=lambda: _pack_begun(request.folder, request.pack),
        pack_every=request.pack_every if request.pack else float("inf"),
    )
    with _handled(queue):
        queue.work()
    print(summary(jobs), flush=True)
    try:
        print(write_tables(request.folder).read_text())
    except ValueError as untested:
        if request.seconds <= 0:  # it was asked for tables only
            raise
        print(f"no tables: {untested}", flush=True)
    finally:  # also of runs of which none has been tested
        if request.pack and request.folder.is_dir():
            print(f"{request.pack} has {pack(request.folder, request.pack) / 1e6:.1f} MB", flush=True)
    if queue.signal is not None:
        return INTERRUPTED if queue.signal == signal.SIGINT else EXIT_CODE
    return int(any(job.state in ("failed", "foreign") for job in jobs))


def summary(jobs: Sequence[Job]) -> str:
    counts = Counter(job.state for job in jobs)
    return f"{len(jobs)} runs: " + ", ".join(f"{count} {state}" for state, count in sorted(counts.items()))
