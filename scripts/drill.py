"""The run that `fault_drill.py` disturbs: its command, its launchers and ranks, and what is waited for."""

import json
import random
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import psutil

PATIENCE = 240.0  # seconds until an awaited state counts as lost
TRAIN = [sys.executable, "-c", "from fla_train.cli.train import main; main()"]


class Unnoticed(Exception):
    """A fault had not the effect it should have."""


@dataclass
class Drill:
    """The disturbed run, and the launchers that train it."""

    run: Path
    command: list[str]
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
        target = self.step() + random.randint(1, 8)
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


def command(folder: Path, run: Path, *more: str) -> list[str]:
    return [
        *TRAIN,
        *("data=local", f"data.path={folder / 'corpus'}", f"data.cache_dir={folder / 'cache'}"),
        *("data.tokenizer.name=bytes", "data.validation_fraction=0.1", "logger=none", f"run.dir={run}"),
        *("model.vocab_size=320", "model.hidden_size=64", "model.num_hidden_layers=2", "model.num_heads=2"),
        *("model.head_dim=32", "trainer.seq_len=32", "trainer.global_batch_tokens=512"),
        *("trainer.micro_batch_size=4", "trainer.stats_every=10", "trainer.check_backend=false"),
        *("launch.device=cpu", "launch.num_processes=2", "optimizer.lr=1e-2"),
        *more,
    ]
