"""Fault drill, part one: a few kinds of faults many times, injected into a run on two ranks.

    unshare -rm python scripts/fault_drill.py --report docs/dev/fault_drill.md    # 5 to 20 minutes, two cores

Trains a tiny model on two ranks twice: once left alone, once while faults are injected from outside. Ranks
and launchers are killed or frozen, a small disk is filled, writes are refused; checkpoints, metrics and token
shards are damaged. Each fault must be noticed in the way the framework promises, and at the end weights and
losses must equal the undisturbed run's bit for bit. Ends with status 1 if they do not.

`unshare -rm` gives the right to mount the small disk, which vanishes with the drill.
"""

import argparse
import contextlib
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import BinaryIO

import psutil
from drill import PATIENCE, Drill, Inject, Outcome, Unnoticed, arguments_of, run_drill
from drill_files import append, flip
from drill_processes import ended, restarted, send

STEPS = 240
HANG_TIMEOUT = 15  # seconds
DISK = "32M"
FILE_LIMIT = 150_000  # bytes: more than logs and metrics, less than a checkpoint's shards
OPTIONS = ["trainer.keep_checkpoints=3", f"trainer.hang_timeout={HANG_TIMEOUT}", "launch.max_restarts=5"]
PREPARE = [sys.executable, "-c", "from fla_train.cli.prepare import main; main()"]

# Per round: what happens to a launched run, at last something that ends it, and what before the next launch.
ROUNDS = [
    (["rank killed", "write refused", "launcher killed"], ["bit flipped", "metrics torn"]),
    (["rank killed in a write", "disk filled", "preempted"], ["cut short", "write left over"]),
    (["rank frozen", "write refused", "launcher killed"], ["file lost", "token shard cut"]),
    (["rank killed", "rank killed in a write", "preempted"], ["manifest lost", "token flipped"]),
    (["write refused", "rank killed", "launcher killed"], ["bit flipped", "write left over"]),
    (["disk filled", "rank frozen", "launcher killed"], ["cut short", "metrics torn", "token flipped"]),
    (["rank killed", "write refused", "preempted"], ["token shard cut", "file lost"]),
    (["rank killed in a write", "disk filled", "launcher killed"], ["bit flipped", "write left over"]),
]


def any_rank(drill: Drill) -> psutil.Process:
    return drill.draw.choice(drill.workers())


def kill_in_a_write(drill: Drill) -> None:
    drill.wait(lambda: any((drill.run / "checkpoints").glob(".writing-*")), "a write")
    any_rank(drill).kill()


def fill_disk(drill: Drill) -> None:
    refused = "metrics.jsonl can't be written (No space left on device)"
    failed = "NO CHECKPOINT, rank 0: No space left on device"
    before = drill.said(refused), drill.said(failed)
    filler = drill.run.parent / "filler"

    def told(file: BinaryIO) -> bool:
        with contextlib.suppress(OSError):
            while True:  # again and again: a checkpoint that fails leaves room
                file.write(bytes(1 << 16))
        return drill.said(refused) > before[0] and drill.said(failed) > before[1]

    with filler.open("wb", buffering=0) as file:
        drill.wait(lambda: told(file), "word of a full disk")
    filler.unlink()
    drill.wait_for_checkpoint()


def refuse_writes(drill: Drill) -> None:
    failed, log = "NO CHECKPOINT, rank", drill.run / "train.log"
    before = log.read_text().count(failed)
    drill.wait(lambda: all(rank.children() for rank in drill.workers()), "a first save")
    writers = [child for rank in drill.workers() for child in rank.children()]
    for limit in (FILE_LIMIT, resource.RLIM_INFINITY):
        for writer in writers:
            writer.rlimit(psutil.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
        drill.wait(lambda: log.read_text().count(failed) > before, "a failed write")
    drill.wait_for_checkpoint()


def kill_launcher(drill: Drill) -> None:
    started = drill.started()
    drill.launcher.kill()
    drill.launcher.wait()
    drill.check_dead(started)


def preempt(drill: Drill) -> None:
    drill.launcher.send_signal(drill.draw.choice((signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)))


def damage(change: Callable[[Path], None], files: str = "*.pt") -> Callable[[Drill], str]:
    """Damage one of these files of the newest checkpoint; what the next launch must say."""

    def fault(drill: Drill) -> str:
        newest = drill.checkpoints()[-1]
        change(drill.draw.choice(sorted(path for path in newest.rglob(files))))
        return f"{newest.name} is damaged"

    return fault


def flip_bit(path: Path) -> None:
    flip(path, path.stat().st_size // 2)


def cut_half(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def cut_token(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 2)


def leave_over(drill: Drill) -> str:
    newest = drill.checkpoints()[-1]
    for name in (".writing-step-0009999", ".deleting-step-0000001"):
        shutil.copytree(newest, newest.parent / name)
    return "run  "  # nothing is said: they are cleaned away, which the end checks


def tear_metrics(drill: Drill) -> str:
    append("metrics.jsonl", b'{"step": 999, "lo')(drill.run)
    return "run  "  # the line is skipped, as train.log says, and the end compares the records


def damage_shard(change: Callable[[Path], None], read: Callable[[Drill], int]) -> Callable[[Drill], str]:
    """Damage a shard of tokens, which `read` must refuse by its name, and put it back."""

    def fault(drill: Drill) -> str:
        folder = Path(json.loads((drill.run / "plan.json").read_text())["data_folder"])
        shard = next((folder / "train").glob("tokens-*.bin"))
        content = shard.read_bytes()
        change(shard)
        code = read(drill)
        if code != 2 or str(shard) not in drill.text():
            raise Unnoticed(f"a damaged shard: status {code}\n{drill.text()[-2000:]}")
        shard.write_bytes(content)
        return "run  "

    return fault


def start(drill: Drill) -> int:
    return drill.launch().wait(PATIENCE)


def verify(drill: Drill) -> int:
    data = [override for override in drill.command if override.startswith("data")]
    return drill.launch(args=[*PREPARE, *data, "verify=true"]).wait(PATIENCE)


# By name: what injects the fault, and what the report says of it.
IN_RUN: dict[str, tuple[Inject, str]] = {
    "rank killed": (restarted(send(signal.SIGKILL, any_rank)), "kill -9 of a random rank between two steps"),
    "rank killed in a write": (restarted(kill_in_a_write), "the same while a checkpoint is being written"),
    "rank frozen": (restarted(send(signal.SIGSTOP, any_rank), "no progress for"), "SIGSTOP of a random rank"),
    "disk filled": (fill_disk, f"a disk of {DISK} is full until a checkpoint has failed"),
    "write refused": (refuse_writes, "files as large as a shard can't be written while a checkpoint is due"),
    "launcher killed": (kill_launcher, "kill -9 of the launcher; its ranks die with it"),
    "preempted": (ended(preempt, 75), "SIGTERM, SIGUSR1 or SIGHUP to the launcher: checkpoint, status 75"),
}
BETWEEN: dict[str, tuple[Callable[[Drill], str], str]] = {
    "bit flipped": (damage(flip_bit), "one bit of a file of the newest checkpoint"),
    "cut short": (damage(cut_half), "a file of the newest checkpoint loses its second half"),
    "file lost": (damage(Path.unlink), "a file of the newest checkpoint is deleted"),
    "manifest lost": (damage(Path.unlink, "manifest.json"), "the newest checkpoint's manifest is deleted"),
    "write left over": (leave_over, "remains of a half-written and of a half-deleted checkpoint"),
    "metrics torn": (tear_metrics, "the last line of metrics.jsonl ends in the middle"),
    "token shard cut": (damage_shard(cut_token, start), "a start is refused until the last token is back"),
    "token flipped": (damage_shard(flip_bit, verify), "`fla-prepare verify=true` names the shard"),
}


def disturb(drill: Drill, rounds: list[tuple[list[str], list[str]]]) -> Outcome:
    """Round by round, and then to the end."""
    expected: list[str] = []
    injected: list[str] = []
    begin = time.monotonic()

    def log(name: str) -> None:
        injected.append(name)
        passed = time.monotonic() - begin
        print(f"{passed:5.0f} s  {len(injected):2}  step {drill.step():3}  {name}", flush=True)

    for in_run, between in [*rounds, ([], [])]:
        drill.launch()
        if in_run:
            drill.wait(lambda: drill.said("run  "), "a start")
        else:
            drill.wait_for_end(0)
        for line in expected:
            if not drill.said(line):
                raise Unnoticed(f"the launcher did not say {line!r}:\n{drill.text()[-2000:]}")
        for name in in_run:
            drill.wait_for_progress()
            IN_RUN[name][0](drill)
            log(name)
        # Tokens come first: a launch that they stop must not see the other damage.
        expected = []
        for name in sorted(between, key=lambda name: not name.startswith("token")):
            expected.append(BETWEEN[name][0](drill))
            log(name)
    rows = [
        f"| {name} | {injected.count(name)} | {what} |"
        for name, (_, what) in (IN_RUN | BETWEEN).items()
        if name in injected
    ]
    return Outcome(
        f"{len(injected)} faults",
        "noticed, or cleaned away, as it should be.",
        ["| fault | times | what is done |", *rows],
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=len(ROUNDS), help="leave the rest out, to try it")
    arguments = arguments_of(parser, "runs/fault_drill")
    disk = arguments.out / "disk"
    disk.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={DISK}", "none", disk], check=True)
    inject = partial(disturb, rounds=ROUNDS[: arguments.rounds])
    return run_drill(Path(__file__).name, arguments, disk / "disturbed", STEPS, OPTIONS, inject)


if __name__ == "__main__":
    sys.exit(main())
