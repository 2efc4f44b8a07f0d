"""`fla-runs train LIST.yaml`: train a list of runs on this machine, several at once.

    shared: [experiment=compare_50m, data=fineweb]   # overrides of every run
    runs:
      delta_net: [model=delta_net/340m]              # name: further overrides
      llama: [model=hf/llama/340m, seed=1]

Each run has the folder FOLDER/NAME. Finished runs are skipped and all others resume, so the same command
continues an interrupted list, also after the folder was copied to another machine.
"""

import argparse
import os
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from functools import partial
from pathlib import Path

from fla_train.cli.app import INTERRUPTED
from fla_train.training.log import log
from fla_train.training.preemption import EXIT_CODE, SIGNALS
from fla_train.utils.keys import fits
from fla_train.utils.overrides import assign
from fla_train.utils.processes import start_command
from fla_train.utils.safe_files import read_yaml

GRACE = 45.0  # seconds before the end of --seconds in which runs save a checkpoint
POLL = 0.2  # seconds
OUTPUT = "output.txt"  # in a job's folder: what its command printed
SKIPPED = ("finished", "running", "diverged")  # states of jobs that are not started


@dataclass(frozen=True)
class Job:
    """A command that runs in a separate process, and that can be called again to continue.

    Attributes:
        command: `train`, `eval` or `bench`.
        overrides: overrides of the command.
        folder: the command writes here; its output goes to `OUTPUT`.
        status: returns the state of `folder`: `new`, `stopped`, or one of `SKIPPED`.
    """

    command: str
    overrides: Sequence[str]
    folder: Path
    status: Callable[[], str]


def build_parser() -> argparse.ArgumentParser:
    """Return the command's options."""
    parser = argparse.ArgumentParser(
        prog="fla-runs train",
        description="Train a list of runs, several at once. The same command continues an interrupted list.",
    )
    parser.add_argument("list", type=Path, metavar="LIST.yaml", help="shared overrides, and runs by name")
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="more overrides for every run")
    parser.add_argument(
        "--only", action="append", metavar="GLOB", help="train the runs whose name matches; may be repeated"
    )
    parser.add_argument("--jobs", type=int, default=1, help="runs at once on each GPU, or on the CPU")
    add_options(parser)
    return parser


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of every command that trains several runs."""
    parser.add_argument("--folder", type=Path, help="folder of the runs (default: runs/ and the file's name)")
    parser.add_argument("--gpus", metavar="N,N", help="GPUs to use (default: all; none: the CPU)")
    parser.add_argument(
        "--seconds", type=float, default=float("inf"), help=f"time limit; the last {GRACE:.0f} are for saving"
    )
    parser.add_argument("--dry-run", action="store_true", help="list the runs and their state, train nothing")


def read_list(file: Path) -> dict[str, list[str]]:
    """Return the overrides of each run by name, those of `shared` first.

    Raises:
        ValueError: the file is not such a list.
    """
    content = read_yaml(file)
    shared, runs = content.get("shared", []), content.get("runs")
    if not (fits(shared, list[str]) and fits(runs, dict[str, list[str]])):
        raise ValueError(f"{file}: expected `shared: [KEY=VALUE]` and `runs: {{NAME: [KEY=VALUE]}}`")
    return {str(name): [*shared, *overrides] for name, overrides in runs.items()}


def status(folder: Path) -> str:
    """Return `new`, or the status of the run in a folder: `running`, `finished` or `stopped`."""
    from fla_train.run.results import Run

    return Run(folder).status if (folder / "config.yaml").is_file() else "new"


def training_job(folder: Path, overrides: Sequence[str], state_of: Callable[[Path], str] = status) -> Job:
    """Return the job that trains a run as a single process, without W&B.

    Args:
        state_of: returns the state of the run in a folder.
    """
    ours = [assign("run.dir", folder), "logger=none", "launch.num_processes=1", "trainer.keep_checkpoints=1"]
    return Job("train", [*ours, *overrides], folder, partial(state_of, folder))


def run_jobs(
    jobs: Mapping[str, Job], slots: Sequence[str], seconds: float = float("inf")
) -> tuple[dict[str, str], int | None]:
    """Run all jobs that are not in a state of `SKIPPED`, `len(slots)` at once.

    Args:
        jobs: jobs by name.
        slots: the GPU of each concurrent job, "" for the CPU.
        seconds: time for all of it. Jobs are asked to save and stop `GRACE` seconds before its end.

    Returns:
        The error of each failed job by name, and the signal that stopped the list (SIGTERM at the end of
        `seconds`) or None.
    """
    signals: list[int] = []  # received
    handled = (signal.SIGINT, *SIGNALS)
    previous = {number: signal.signal(number, lambda n, _: signals.append(n)) for number in handled}
    waiting, free, failed = list(jobs), list(slots), {}
    running: dict[str, tuple[subprocess.Popen, str]] = {}  # process and slot
    deadline, stopping = time.monotonic() + seconds, False
    try:
        while running or (waiting and not stopping):
            if not signals and time.monotonic() > deadline - GRACE:
                signals.append(signal.SIGTERM)
            if signals and not stopping:
                stopping, deadline = True, min(deadline, time.monotonic() + GRACE)
                for process, _ in running.values():
                    process.send_signal(signal.SIGTERM)
            while waiting and free and not stopping:
                name = waiting.pop(0)
                try:
                    if (state := jobs[name].status()) not in SKIPPED:
                        running[name] = _start(jobs[name], free[0]), free.pop(0)
                        state = "started"
                except (OSError, ValueError) as error:  # the running jobs continue
                    state, failed[name] = "failed", f"error: {error}"
                log(f"{state:10} {name}  {failed.get(name, '')}".rstrip())
            for name, (process, slot) in list(running.items()):
                if process.poll() is None:
                    continue
                del running[name]
                free.append(slot)
                if process.returncode and not stopping:
                    failed[name] = _error(jobs[name], process.returncode)
                log(f"{jobs[name].status():10} {name}  {failed.get(name, '')}".rstrip())
            if stopping and time.monotonic() > deadline:
                for process, _ in running.values():
                    process.kill()
            time.sleep(POLL)
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
    return failed, signals[0] if signals else None


def _start(job: Job, gpu: str) -> subprocess.Popen:
    """Start a job's command on a GPU, or on the CPU for ""."""
    job.folder.mkdir(parents=True, exist_ok=True)
    # One thread each, so that results do not depend on how many run at once. Kernels of other libraries that
    # tune themselves keep the outcome in Triton's cache.
    variables = {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": gpu}
    variables["TRITON_CACHE_AUTOTUNING"] = os.environ.get("TRITON_CACHE_AUTOTUNING", "1")
    return start_command(job.command, job.overrides, job.folder / OUTPUT, **variables)


def _error(job: Job, code: int) -> str:
    """Return the first error that a failed job printed, or else its exit status."""
    lines = (job.folder / OUTPUT).read_text(errors="replace").split("\n")
    return next((line for line in lines if line.startswith("error: ")), f"error: exit status {code}")


def gpu_slots(gpus: str | None, jobs: int) -> list[str]:
    """Return the GPU of each job that runs at once, "" for the CPU.

    Args:
        gpus: numbers of GPUs with commas between them; `none`: the CPU; None: all that are visible.
        jobs: jobs at once on each GPU, or on the CPU.
    """
    visible = gpus or os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        from torch.cuda import device_count

        visible = ",".join(map(str, range(device_count())))
    return ([gpu for gpu in visible.split(",") if gpu and gpu != "none"] or [""]) * jobs


def exit_status(number: int) -> int:
    """Return the exit status of a command that a signal stopped."""
    return INTERRUPTED if number == signal.SIGINT else EXIT_CODE


def train_list(arguments: Sequence[str]) -> int:
    """Run the command; return its exit status.

    Raises:
        ValueError: the list cannot be read, or nothing in it matches.
    """
    request = build_parser().parse_intermixed_args(arguments)
    patterns = request.only or ["*"]
    runs = {
        name: [*overrides, *request.overrides]
        for name, overrides in read_list(request.list).items()
        if any(fnmatch(name, pattern) for pattern in patterns)
    }
    if not runs or request.jobs < 1:
        raise ValueError(f"--only {' '.join(patterns)} --jobs {request.jobs}: no run of {request.list}")
    folder = request.folder or Path("runs", request.list.stem)
    if request.dry_run:
        print(*(f"{status(folder / name):10} {name}  {' '.join(runs[name])}" for name in runs), sep="\n")
        return 0
    jobs = {name: training_job(folder / name, runs[name]) for name in runs}
    failed, number = run_jobs(jobs, gpu_slots(request.gpus, request.jobs), request.seconds)
    # Without a signal, only a callback has ended a run that is left, and would end it again.
    if number is not None and any(jobs[name].status() not in SKIPPED for name in {*jobs} - {*failed}):
        return exit_status(number)
    return 1 if failed else 0
