"""Faults injected into a run on two CPU ranks, which must not change its result.

Each test starts a run, injects one fault while it trains, and lets the same command finish the run. Exported
weights and metrics must then equal those of an undisturbed run bit for bit.

    python -m pytest tests/drills -m long     # about 9 minutes on two cores
"""

import json
import os
import random
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from fla_train.utils.records import read_metrics

pytestmark = [pytest.mark.long, pytest.mark.timeout(600)]

STEPS = 60
PATIENCE = 180.0  # seconds
# Speeds and memory differ between equal runs.
MACHINE = {"tokens_per_second", "data_wait", "memory_gib", "mfu", "checkpoint_stall_s"}


class Run:
    """A run folder and the processes that train it."""

    def __init__(self, folder: Path, shared: Path) -> None:
        self.folder, self.log = folder, folder.with_suffix(".log")
        self.command = [
            *(sys.executable, "-c", "from fla_train.cli.train import main; main()", f"run.dir={folder}"),
            *("data=local", f"data.path={shared}/corpus", f"data.cache_dir={shared}/cache", "logger=none"),
            *("data.tokenizer.name=bytes", "data.validation_fraction=0.1", "model.vocab_size=320"),
            *("model.hidden_size=64", "model.num_hidden_layers=2", "model.num_heads=2", "model.head_dim=32"),
            *("trainer.seq_len=32", "trainer.global_batch_tokens=512", "trainer.micro_batch_size=4"),
            *("trainer.check_backend=false", f"trainer.max_steps={STEPS}", "trainer.checkpoint_every=2"),
            *("trainer.keep_checkpoints=0", "trainer.hang_timeout=8", "trainer.eval_every=8"),
            *(
                "trainer.log_every=1",
                "trainer.eval_tokens=512",
                "trainer.export_every=24",
                "launch.max_restarts=5",
            ),
            *("launch.device=cpu", "launch.num_processes=2", "optimizer.lr=1e-2"),
        ]
        self.launcher: subprocess.Popen | None = None

    def start(self) -> None:
        """Start the launcher and wait until there are two checkpoints and new steps."""
        self.launcher = self.launch()
        before = self.step()
        self.wait(lambda: self.step() != before, "a first step")
        target = self.step() + random.randint(1, 6)
        self.wait(lambda: self.step() >= target and len(self.checkpoints()) > 1, "progress")

    def launch(self) -> subprocess.Popen:
        with self.log.open("a") as out:
            return subprocess.Popen(self.command, stdout=out, stderr=subprocess.STDOUT)

    def ranks(self) -> list[psutil.Process]:
        """Return the processes of the ranks, which are known by their log files."""
        logs = [self.folder / "train.log", self.folder / "logs" / "rank-1.log"]
        children = {}
        for child in psutil.Process(self.launcher.pid).children():
            with suppress(OSError):  # a process that ends meanwhile
                children[Path(f"/proc/{child.pid}/fd/1").readlink()] = child
        return [children[log] for log in logs if log in children]

    def writer(self, rank: int) -> psutil.Process:
        self.wait(lambda: self.ranks()[rank].children(), f"the writer of rank {rank}")
        return self.ranks()[rank].children()[0]

    def step(self) -> int:
        path = self.folder / "metrics.jsonl"
        return path.read_text(errors="replace").count('"loss"') if path.is_file() else 0

    def checkpoints(self) -> list[Path]:
        return sorted((self.folder / "checkpoints").glob("step-???????"))

    def said(self, text: str) -> int:
        return self.log.read_text(errors="replace").count(text)

    def wait(self, condition: Callable[[], object], what: str) -> None:
        deadline = time.monotonic() + PATIENCE
        while not condition():
            ended = self.launcher.poll() is not None
            if (ended and not condition()) or time.monotonic() > deadline:
                pytest.fail(f"{what} did not happen:\n{self.log.read_text()[-3000:]}")
            time.sleep(0.002)  # a checkpoint is written in about 10 ms

    def wait_for_end(self, status: int) -> None:
        """Wait for the launcher's exit status; its processes must end with it."""
        started = psutil.Process(self.launcher.pid).children(recursive=True)
        assert self.launcher.wait(PATIENCE) == status, self.log.read_text()[-3000:]
        assert not psutil.wait_procs(started, timeout=20)[1], "processes outlived their launcher"

    def finish(self) -> None:
        """Train to the end with the same command, as a batch system would."""
        if self.launcher is None or self.launcher.poll() is not None:
            self.launcher = self.launch()
        self.wait_for_end(0)
        assert not self.said("Traceback")

    def result(self) -> tuple[bytes, list[dict]]:
        """Return the last export's weights, and the metrics without speeds."""
        weights = (self.folder / "hf" / f"step-{STEPS:07d}" / "model.safetensors").read_bytes()
        records = [
            {key: value for key, value in record.items() if key not in MACHINE}
            for record in read_metrics(self.folder / "metrics.jsonl")
        ]
        # A stopped run has checkpoints that the undisturbed one lacks.
        return weights, [record for record in records if record.keys() - {"step", "tokens"}]


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("drills")
    words, draw = "a gate closes on what the state of a linear recurrence forgets".split(), random.Random(0)
    texts = [" ".join(draw.choices(words, k=draw.randint(20, 60))) for _ in range(300)]
    (folder / "corpus").mkdir()
    (folder / "corpus" / "documents.jsonl").write_text("".join(json.dumps({"text": t}) + "\n" for t in texts))
    return folder


@pytest.fixture(scope="module")
def undisturbed(shared: Path) -> tuple[bytes, list[dict]]:
    run = Run(shared / "undisturbed", shared)
    run.finish()
    return run.result()


@pytest.fixture
def run(shared: Path, tmp_path: Path, undisturbed: tuple[bytes, list[dict]]) -> Iterator[Run]:
    run = Run(tmp_path / "run", shared)
    run.start()
    yield run
    run.finish()
    assert run.result() == undisturbed
    leftovers = [path for path in run.folder.rglob(".*") if path.name != ".lock"]
    assert not leftovers


def restarted(run: Run, fault: Callable[[], object], said: str) -> None:
    """Inject a fault after which the launcher starts the ranks again, and says why."""
    restarts = run.said("restart  ")
    fault()
    run.wait(lambda: run.said("restart  ") > restarts and run.said(said), f"a restart after {said!r}")


def lost_checkpoint(run: Run, fault: Callable[[], object], undo: Callable[[], object]) -> None:
    """Inject a fault that prevents a checkpoint; training continues, and a later checkpoint succeeds."""
    ranks = run.ranks()
    fault()
    run.wait(lambda: run.said("NO CHECKPOINT"), "a line about the missing checkpoint")
    known = run.checkpoints()[-1:]
    undo()
    run.wait(lambda: run.checkpoints()[-1:] != known, "a later checkpoint")
    assert run.launcher.poll() == 0 or run.ranks() == ranks


def test_kill_of_all_ranks_while_a_checkpoint_is_written(run: Run) -> None:
    run.wait(lambda: any((run.folder / "checkpoints").glob(".writing-*")), "a write")
    restarted(run, lambda: [rank.kill() for rank in run.ranks()], "was killed by SIGKILL")


def test_rank_that_hangs(run: Run) -> None:
    restarted(run, lambda: run.ranks()[1].send_signal(signal.SIGSTOP), "no progress for")


@pytest.mark.parametrize("number, status", [(signal.SIGTERM, 75), (signal.SIGINT, 75), (signal.SIGKILL, -9)])
def test_launcher_is_stopped(run: Run, number: signal.Signals, status: int) -> None:
    run.launcher.send_signal(number)
    run.wait_for_end(status)


def test_writer_is_killed(run: Run) -> None:
    known = run.checkpoints()[-1:]
    run.writer(1).kill()
    run.wait(lambda: run.checkpoints()[-1:] != known, "a checkpoint of the next writer")


def test_disk_takes_no_file_as_large_as_a_shard(run: Run) -> None:
    writer, size = run.writer(1), psutil.RLIMIT_FSIZE
    unlimited = (resource.RLIM_INFINITY, resource.RLIM_INFINITY)
    lost_checkpoint(
        run,
        lambda: writer.rlimit(size, (4096, resource.RLIM_INFINITY)),
        lambda: writer.rlimit(size, unlimited),
    )


def test_folder_of_checkpoints_disappears_for_a_while(run: Run) -> None:
    folder, moved = run.folder / "checkpoints", run.folder / "moved"
    lost_checkpoint(run, lambda: folder.rename(moved), lambda: moved.rename(folder))


def test_exports_cannot_be_written(run: Run) -> None:
    exports, kept = run.folder / "hf", run.folder / "kept"
    exports.mkdir(exist_ok=True)
    exports.rename(kept)
    exports.touch()
    run.wait(lambda: run.said("NO EXPORT"), "a line about the missing export")
    exports.unlink()
    kept.rename(exports)


def flip_a_bit(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize(
    "name, damage",
    [
        ("weights.pt", flip_a_bit),
        ("rank-1.pt", lambda path: os.truncate(path, 1000)),
        ("manifest.json", Path.unlink),
    ],
)
def test_newest_checkpoint_is_damaged(run: Run, name: str, damage: Callable[[Path], object]) -> None:
    run.launcher.kill()
    run.wait_for_end(-signal.SIGKILL)
    newest = run.checkpoints()[-1]
    damage(newest / name)
    with (run.folder / "metrics.jsonl").open("ab") as file:
        file.write(b'{"step": 999, "lo' + bytes(4096))  # A kill may truncate the last record as well.
    run.launcher = run.launch()
    run.wait(lambda: run.said(f"{newest} is not used"), f"a line about {newest.name}")
