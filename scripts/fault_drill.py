"""unshare -rm python scripts/fault_drill.py --report docs/dev/fault_drill.md    (5 to 20 minutes, two cores)

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
import random
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

import psutil
from drill import PATIENCE, Drill, Unnoticed, command, compare, corpus, prepare_process, report, write_report

STEPS = 240
HANG_TIMEOUT = 15  # seconds
DISK = "32M"
FILE_LIMIT = 150_000  # bytes: more than logs and metrics, less than a checkpoint's shards
OPTIONS = ["trainer.keep_checkpoints=3", f"trainer.hang_timeout={HANG_TIMEOUT}", "launch.max_restarts=5"]
PREPARE = [sys.executable, "-c", "from fla_train.cli.prepare import main; main()"]

WHAT = {
    "rank killed": "kill -9 of a random rank between two steps; the launcher starts again",
    "rank killed in a write": "kill -9 of a random rank while a checkpoint is being written",
    "rank frozen": f"SIGSTOP of a random rank; the watchdog speaks after {HANG_TIMEOUT} s",
    "disk filled": f"a disk of {DISK} is filled to its last byte and freed once a checkpoint has failed",
    "write refused": "files as large as a shard can't be written while a checkpoint is due",
    "launcher killed": "kill -9 of the launcher; its ranks die with it",
    "preempted": "SIGTERM, SIGUSR1 or SIGHUP to the launcher: checkpoint, status 75",
    "bit flipped": "one bit of a file of the newest checkpoint",
    "cut short": "a file of the newest checkpoint loses its second half",
    "file lost": "a file of the newest checkpoint is deleted",
    "manifest lost": "the manifest of the newest checkpoint is deleted",
    "write left over": "the remains of a half-written checkpoint, and of a half-deleted one",
    "metrics torn": "the last line of metrics.jsonl ends in the middle",
    "token shard cut": "the data lose their last bytes; the start is refused until they are back",
    "token flipped": "one bit of the data; `fla-prepare verify=true` names the shard",
}
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


def kill_rank(drill: Drill) -> None:
    restarts = drill.said("restart ")
    drill.draw.choice(drill.workers()).kill()
    drill.wait(lambda: drill.said("restart ") > restarts, "a restart")


def kill_rank_in_a_write(drill: Drill) -> None:
    drill.wait(lambda: any((drill.run / "checkpoints").glob(".writing-*")), "a write")
    kill_rank(drill)


def freeze_rank(drill: Drill) -> None:
    hung = drill.said("no progress for")
    drill.draw.choice(drill.workers()).suspend()
    drill.wait(lambda: drill.said("no progress for") > hung, "the watchdog")


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
    drill.wait_for_end(75)


def damage(change: Callable[[Path], None], files: str = "*.pt") -> Callable[[Drill], str]:
    """Damage one of these files of the newest checkpoint; what the next launch must say."""

    def fault(drill: Drill) -> str:
        newest = drill.checkpoints()[-1]
        change(drill.draw.choice(sorted(path for path in newest.rglob(files))))
        return f"{newest.name} is damaged"

    return fault


def flip_bit(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def leave_over(drill: Drill) -> str:
    newest = drill.checkpoints()[-1]
    for name in (".writing-step-0009999", ".deleting-step-0000001"):
        shutil.copytree(newest, newest.parent / name)
    return "run  "  # nothing is said: they are cleaned away, which the end checks


def tear_metrics(drill: Drill) -> str:
    with (drill.run / "metrics.jsonl").open("a") as file:
        file.write('{"step": 999, "lo')
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


IN_RUN = {
    "rank killed": kill_rank,
    "rank killed in a write": kill_rank_in_a_write,
    "rank frozen": freeze_rank,
    "disk filled": fill_disk,
    "write refused": refuse_writes,
    "launcher killed": kill_launcher,
    "preempted": preempt,
}
BETWEEN = {
    "bit flipped": damage(flip_bit),
    "cut short": damage(lambda path: os.truncate(path, path.stat().st_size // 2)),
    "file lost": damage(Path.unlink),
    "manifest lost": damage(Path.unlink, "manifest.json"),
    "write left over": leave_over,
    "metrics torn": tear_metrics,
    "token shard cut": damage_shard(lambda path: os.truncate(path, path.stat().st_size - 2), start),
    "token flipped": damage_shard(flip_bit, verify),
}


def disturb(drill: Drill, rounds: list[tuple[list[str], list[str]]], log: Callable[[str, int], None]) -> None:
    """Round by round, and then to the end."""
    expected: list[str] = []
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
            IN_RUN[name](drill)
            log(name, drill.step())
        drill_at = drill.step()
        # Tokens come first: a launch that they stop must not see the other damage.
        expected = []
        for name in sorted(between, key=lambda name: not name.startswith("token")):
            expected.append(BETWEEN[name](drill))
            log(name, drill_at)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[2])
    parser.add_argument("--out", type=Path, default=Path("runs/fault_drill"))
    parser.add_argument("--report", type=Path, help="Markdown file whose part after the mark is replaced")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--rounds", type=int, default=len(ROUNDS), help="leave the rest out, to try it")
    arguments = parser.parse_args()
    prepare_process()
    shutil.rmtree(arguments.out, ignore_errors=True)
    corpus(arguments.out / "corpus")
    disk = arguments.out / "disk"
    disk.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={DISK}", "none", disk], check=True)
    calm, run = arguments.out / "undisturbed", disk / "disturbed"
    begin = time.monotonic()
    subprocess.run(command(arguments.out, calm, STEPS, *OPTIONS), check=True, stdout=subprocess.DEVNULL)
    print(f"undisturbed run: {STEPS} steps in {time.monotonic() - begin:.0f} s", flush=True)

    injected: list[str] = []
    begin = time.monotonic()

    def log(name: str, step: int) -> None:
        injected.append(name)
        print(f"{time.monotonic() - begin:5.0f} s  {len(injected):2}  step {step:3}  {name}", flush=True)

    drill = Drill(
        run,
        command(arguments.out, run, STEPS, *OPTIONS),
        random.Random(arguments.seed),
        arguments.out,  # not the small disk
    )
    try:
        disturb(drill, ROUNDS[: arguments.rounds], log)
    finally:
        drill.stop()
    if leftovers := list((run / "checkpoints").glob(".*")):
        raise Unnoticed(f"half-written or half-deleted files are left: {leftovers}")
    equal = compare(run, calm, STEPS)
    minutes = (time.monotonic() - begin) / 60
    rows = [f"| {key} | {injected.count(key)} | {what} |" for key, what in WHAT.items() if key in injected]
    text = report(
        f"{len(injected)} faults in {minutes:.0f} minutes and {STEPS} steps on two CPU ranks, each noticed, "
        "or cleaned away, as it should be.",
        equal,
        ["| fault | times | what is done |", *rows],
    )
    print(f"\n{text}")
    if arguments.report:
        write_report(arguments.report, Path(__file__).name, text)
    return 0 if all(equal.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
