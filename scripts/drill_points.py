"""Faults at a certain place in a process, for `fault_kinds.py`, made by `failpoints/sitecustomize.py`."""

import json
import os
import signal
from pathlib import Path
from typing import NamedTuple

from drill import Drill, Inject


class Point(NamedTuple):
    """What fails, as `failpoints/sitecustomize.py` does it, and what must be said of it."""

    role: str
    at: str
    do: str
    said: str = ""


def killed(role: str, at: str, by: str = "SIGKILL") -> Point:
    return Point(role, at, by, f"rank {role[-1]}: was killed by {by}")


# Ranks fail on their way into the run, one start after another.
AT_START = {
    "kill -9 of rank 1 while it imports": killed("worker-1", "training/trainer.py:<module>"),
    "kill -9 of rank 0 before it joins": killed("worker-0", "process_group.py:join"),
    "rank 0 aborts while it verifies a checkpoint": killed("worker-0", "checkpoint.py:find_error", "SIGABRT"),
    "kill -9 of rank 0 while it writes config.yaml": killed("worker-0", "filesystem.py:write_whole!replace"),
    "bus error of rank 1 while it loads": killed("worker-1", "load_checkpoint.py:load_checkpoint", "SIGBUS"),
    "segmentation fault of rank 1 in its first step": killed("worker-1", "engine.py:train_step", "SIGSEGV"),
    "kill -9 of rank 1 while it evaluates": killed("worker-1", "trainer.py:Trainer._evaluate"),
    "kill -9 of rank 0 in the middle of an export": killed("worker-0", "export.py:_load_back"),
    "kill -9 of rank 1 while it stages a checkpoint": killed(
        "worker-1", "staging_buffer.py:StagingBuffer.stage"
    ),
    "rank 1 ends with 0 in the middle": Point("worker-1", "engine.py:train_step", "exit 0"),
    "rank 0 ends with 75 unasked": Point("worker-0", "engine.py:train_step", "exit 75"),
    "a read error (EIO) of the data": Point(
        "worker-0", "run_data.py:to_batch", "raise EIO", "rank 0: OSError: [Errno 5] Input/output error"
    ),
    "all files and connections of rank 0 break": Point("worker-0", "engine.py:train_step", "close"),
}
# Ranks fail at the end of the run.
AT_END = {
    "kill -9 of rank 1 in the last step": killed("worker-1", "trainer.py:Trainer._finish"),
    "kill -9 of rank 0 before it plots": killed("worker-0", "metrics.py:plot_losses"),
    "kill -9 of rank 1 while it leaves the group": killed(
        "worker-1", "distributed_c10d.py:destroy_process_group"
    ),
}


def put(points: Path, name: str, point: Point) -> Path:
    """Have it happen; returns what shows that it did."""
    file = points / f"{name}.json"
    file.write_text(json.dumps(point._asdict()))
    return file.with_suffix(".fired")


def put_now(point: Point) -> Path:
    """The only one; its process hears of it by SIGUSR2."""
    points = Path(os.environ["DRILL_POINTS"])
    for file in points.iterdir():
        file.unlink()
    return put(points, "live", point)


def in_a_write(*point: str) -> Inject:
    """A failpoint of a writer: no checkpoint, which is said, and a later one."""
    role, at, do, said = point

    def inject(drill: Drill) -> None:
        before = drill.said(said)
        fired = put_now(Point(role, at, do))
        owner = drill.workers()[int(role[-1])]
        drill.wait(owner.children, "a writer")
        owner.children()[0].send_signal(signal.SIGUSR2)
        drill.wait(fired.exists, "the failpoint")
        drill.wait(lambda: drill.said(said) > before, said)
        drill.wait_for_checkpoint()

    return inject


# Writer processes fail beside training.
IN_A_WRITE: dict[str, Inject] = {
    "kill -9 of rank 0's writer before the manifest": in_a_write(
        "writer-0", "checkpoint.py:write_manifest", "SIGKILL", "writer process was killed by SIGKILL"
    ),
    "kill -9 of rank 0's writer before the rename": in_a_write(
        "writer-0", "filesystem.py:move_folder!rename", "SIGKILL", "writer process was killed by SIGKILL"
    ),
    "kill -9 of rank 0's writer after the rename": in_a_write(
        "writer-0", "checkpoint.py:prune", "SIGKILL", "writer process was killed by SIGKILL"
    ),
    "segmentation fault of rank 0's writer": in_a_write(
        "writer-0", "async_writer.py:_collect_parts", "SIGSEGV", "writer process was killed by SIGSEGV"
    ),
    "kill -9 of rank 1's writer before its part": in_a_write(
        "writer-1", "async_writer.py:_leave_part", "SIGKILL", "rank 1: the writer process was killed"
    ),
    "the disk refuses a flush (EIO)": in_a_write(
        "writer-0", "async_writer.py:_write_file!fsync", "raise EIO", "rank 0: Input/output error"
    ),
    "the quota is used up (EDQUOT)": in_a_write(
        "writer-1", "async_writer.py:_write_file", "raise EDQUOT", "rank 1: Disk quota exceeded"
    ),
    "the disk turns read-only (EROFS)": in_a_write(
        "writer-0", "pathlib.py:Path.mkdir", "raise EROFS", "rank 0: Read-only file system"
    ),
    "a stale handle of a network disk (ESTALE)": in_a_write(
        "writer-1", "filesystem.py:sync", "raise ESTALE", "rank 1: Stale file handle"
    ),
    "a bug in rank 0's writer": in_a_write(
        "writer-0", "checkpoint.py:write_manifest", "raise KeyError", "NO CHECKPOINT, rank 0: 'drill'"
    ),
}
