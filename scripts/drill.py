"""Shared code of the fault drills: a tiny run, its launchers and ranks, the comparison, the report."""

import argparse
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from fla_train.utils.environment import git_commit
from fla_train.utils.records import read_metrics

CHECKPOINT_EVERY = 4
OF_THE_MACHINE = {"tokens_per_second", "data_wait", "memory_gib", "mfu", "checkpoint_stall_s"}
PATIENCE = 240.0  # seconds until an awaited state counts as lost
TRAIN = [sys.executable, "-c", "from fla_train.cli.train import main; main()"]


class Unnoticed(Exception):
    """A fault had not the effect it should have."""


@dataclass
class Drill:
    """The disturbed run, and who trains it: one launcher, or several of as many machines."""

    run: Path
    command: list[str]
    draw: random.Random
    outputs: Path  # folder for what launchers say
    launchers: list[subprocess.Popen] = field(default_factory=list)
    logs: list[Path] = field(default_factory=list)  # of these and of those that they replaced

    @property
    def launcher(self) -> subprocess.Popen:
        return self.launchers[-1]

    def launch(self, *more: str, **options: object) -> subprocess.Popen:
        """A launcher; those before it have ended."""
        self.reset()
        return self.join(*more, **options)

    def reset(self) -> None:
        """Forget launchers that have ended, and what they said."""
        self.stop()
        self.launchers.clear()
        self.logs.clear()

    def join(self, *more: str, **options: object) -> subprocess.Popen:
        """One more launcher. `options` are those of `Popen`."""
        self.logs.append(self.outputs / f"launcher-{len(self.logs)}.log")
        with self.logs[-1].open("w") as out:
            given = {"args": [*self.command, *more], "stdout": out, "stderr": subprocess.STDOUT} | options
            self.launchers.append(subprocess.Popen(**given))
        return self.launcher

    def text(self) -> str:
        """What the launchers have said."""
        return "".join(log.read_text(errors="replace") for log in self.logs)

    def said(self, text: str) -> int:
        return self.text().count(text)

    def started(self) -> list[psutil.Process]:
        """All living processes that the launchers have started, directly or not."""
        found = []
        for launcher in self.launchers:
            with suppress(psutil.Error):
                found += psutil.Process(launcher.pid).children(recursive=True)
        return found

    def workers(self) -> list[psutil.Process]:
        """The living ranks, in their order. A rank's child looks like it until it runs its own program."""
        found, launchers = {}, {launcher.pid for launcher in self.launchers}
        for child in self.started():
            with suppress(psutil.Error):  # whatever ends meanwhile
                if child.ppid() in launchers and "fla_train.training.worker" in child.cmdline():
                    found[int(child.environ()["RANK"])] = child
        return [found[rank] for rank in sorted(found)]

    def step(self) -> int:
        path = self.run / "metrics.jsonl"
        return path.read_text(errors="replace").count('"loss"') if path.is_file() else 0

    def checkpoints(self) -> list[Path]:
        return sorted((self.run / "checkpoints").glob("step-???????"))

    def wait(self, condition: Callable[[], object], what: str) -> None:
        deadline = time.monotonic() + PATIENCE
        while not condition():
            ended = all(launcher.poll() is not None for launcher in self.launchers)
            if (ended and not condition()) or time.monotonic() > deadline:
                raise Unnoticed(f"{what} did not happen; the launcher said:\n{self.text()[-2000:]}")
            time.sleep(0.02)

    def wait_for_progress(self) -> None:
        """Two ranks, a few new steps, and two checkpoints to fall back on."""
        self.wait(lambda: len(self.workers()) == 2, "a start of both ranks")
        before = self.step()
        self.wait(lambda: self.step() != before, "a first step")  # started again, it cuts the records back
        target = self.step() + self.draw.randint(1, 2 * CHECKPOINT_EVERY)
        self.wait(lambda: self.step() >= target and len(self.checkpoints()) > 1, "progress")

    def wait_for_checkpoint(self) -> None:
        """A new one, after a failed one."""
        known = self.checkpoints()[-1:]
        self.wait(lambda: self.checkpoints()[-1:] != known, "a checkpoint after the failed one")

    def wait_for_end(self, code: int) -> None:
        """Of the newest launcher and of its ranks."""
        started = self.started()
        try:
            found = self.launcher.wait(PATIENCE)
        except subprocess.TimeoutExpired:
            found = None
        if found != code:
            raise Unnoticed(f"the launcher ended with {found}, not {code}:\n{self.text()[-2000:]}")
        if self.said("Traceback"):
            raise Unnoticed(f"the launcher shows a traceback:\n{self.text()[-3000:]}")
        self.check_dead(started)

    @staticmethod
    def check_dead(processes: list[psutil.Process]) -> None:
        if psutil.wait_procs(processes, timeout=20)[1]:
            raise Unnoticed("processes outlived their launcher")

    def stop(self) -> None:
        for launcher in self.launchers:
            if launcher.poll() is None:
                launcher.kill()
                launcher.wait()


Inject = Callable[[Drill], object]


def corpus(folder: Path) -> Path:
    words = (
        "the state of a linear recurrence forgets what its gate closes on and keeps what a key wrote".split()
    )
    draw = random.Random(0)
    folder.mkdir(parents=True)
    with (folder / "documents.jsonl").open("w") as file:
        for _ in range(300):
            file.write(json.dumps({"text": " ".join(draw.choices(words, k=draw.randint(20, 60)))}) + "\n")
    return folder


def command(folder: Path, run: Path, steps: int, *more: str) -> list[str]:
    return [
        *TRAIN,
        *("data=local", f"data.path={folder / 'corpus'}", f"data.cache_dir={folder / 'cache'}"),
        *("data.tokenizer.name=bytes", "data.validation_fraction=0.1", "logger=none", f"run.dir={run}"),
        *("model.vocab_size=320", "model.hidden_size=64", "model.num_hidden_layers=2", "model.num_heads=2"),
        *("model.head_dim=32", "trainer.seq_len=32", "trainer.global_batch_tokens=512"),
        *("trainer.micro_batch_size=4", f"trainer.max_steps={steps}", "trainer.eval_every=0"),
        *(f"trainer.checkpoint_every={CHECKPOINT_EVERY}", "trainer.stats_every=10"),
        *("trainer.check_backend=false", "launch.device=cpu", "launch.num_processes=2", "optimizer.lr=1e-2"),
        *more,
    ]


def arguments_of(parser: argparse.ArgumentParser, out: str) -> argparse.Namespace:
    """The command line, with the options of every drill. `out` is made new, with the corpus in it."""
    parser.add_argument("--out", type=Path, default=Path(out))
    parser.add_argument("--report", type=Path, help="Markdown file whose part between the marks is replaced")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    arguments.out = arguments.out.absolute()
    os.environ["OMP_NUM_THREADS"] = "1"
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # under nohup what is started here would ignore it, too
    shutil.rmtree(arguments.out, ignore_errors=True)
    corpus(arguments.out / "corpus")
    return arguments


@dataclass(frozen=True)
class Outcome:
    """What was done to the disturbed run."""

    injected: str
    judged: str
    table: list[str]  # Markdown, headings first
    lost: int = 0  # faults without the effect that they should have


def run_drill(
    script: str,
    arguments: argparse.Namespace,
    run: Path,
    steps: int,
    options: Sequence[str],
    disturb: Callable[[Drill], Outcome],
) -> int:
    """Train undisturbed, then in `run` with faults, compare and report; the exit status.

    Raises:
        Unnoticed: a fault had not its effect, or files are left over.
    """
    calm, begin = arguments.out / "undisturbed", time.monotonic()
    subprocess.run(command(arguments.out, calm, steps, *options), check=True, stdout=subprocess.DEVNULL)
    print(f"undisturbed run: {steps} steps in {time.monotonic() - begin:.0f} s", flush=True)
    begin = time.monotonic()
    given = command(arguments.out, run, steps, *options)
    drill = Drill(run, given, random.Random(arguments.seed), arguments.out)
    try:
        outcome = disturb(drill)
    finally:
        drill.stop()
    if leftovers := [path for path in run.rglob("*") if path.name.startswith(".") and path.name != ".lock"]:
        raise Unnoticed(f"half-written or half-deleted files are left: {leftovers}")
    equal = {
        "weights": _weights(run, steps) == _weights(calm, steps),
        "records of metrics.jsonl": _records(run) == _records(calm),
    }
    verdict = ", ".join(f"{what} {'equal' if same else 'DIFFERENT'}" for what, same in equal.items())
    headings, *rows = outcome.table
    lines = [
        f"{outcome.injected} in {(time.monotonic() - begin) / 60:.0f} minutes and {steps} steps on two CPU "
        f"ranks, each {outcome.judged} Compared with the undisturbed run, bit for bit: {verdict}. "
        f"{time.strftime('%Y-%m-%d')}, commit {(git_commit() or 'unknown')[:7]}.",
        "",
        headings,
        "|" + "---|" * (headings.count("|") - 1),
        *rows,
        "",
    ]
    print("", *lines, sep="\n")
    if arguments.report:
        write_report(arguments.report, script, "\n".join(lines))
    return 0 if all(equal.values()) and not outcome.lost else 1


def _weights(run: Path, steps: int) -> bytes:
    return (run / "hf" / f"step-{steps:07d}" / "model.safetensors").read_bytes()


def _records(run: Path) -> list[dict]:
    """What the run did, but for speeds and for checkpoints, of which a preempted run has more."""
    found = read_metrics(run / "metrics.jsonl")
    kept = [{key: value for key, value in record.items() if key not in OF_THE_MACHINE} for record in found]
    return [record for record in kept if record.keys() - {"step", "tokens"}]


def write_report(path: Path, name: str, text: str) -> None:
    """Replace what is between the marks of this script in a Markdown file; at its end if there are none."""
    begin, end = f"<!-- written by scripts/{name} -->\n", f"<!-- end of {name} -->\n"
    old = path.read_text() if path.exists() else ""
    head, _, rest = old.partition(begin)
    path.write_text(f"{head}{begin}\n{text}{end}{rest.partition(end)[2]}")
