"""Async writer: a process beside each rank that writes the files of its checkpoints.

The trainer's process only copies its state to a staging buffer (`utils/staging_buffer.py`), which both
processes share. This process reads the buffer, hashes and writes the files, and flushes them to the disk, so
that Python's lock, checksums and slow disks don't hold up training. It imports only the standard library,
starts within 0.1 s, needs no memory of note, and dies with its trainer.

The ranks' writers share nothing but the folder that they write in. Each leaves `part-R.json`, the manifest
entries of its files, once they are on the disk. Rank 0's writer waits for the parts of the others, writes the
manifest and renames the folder. It gives up when its trainer sends it the error of another rank.
"""

import hashlib
import json
import math
import os
import shutil
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from fla_train.training import checkpoint
from fla_train.utils.filesystem import move_folder, reason, sync, write_whole
from fla_train.utils.processes import die_with_parent, module_command

if TYPE_CHECKING:
    from fla_train.utils.staging_buffer import Segment  # imports torch

CHUNK = 1 << 20  # bytes read, hashed and written at once: they stay in the cache of a core
VISIBLE = 120.0  # seconds in which a shared file system must show rank 0 what another rank has written
POLL = 0.1  # seconds between looks at the other ranks' parts


@dataclass(frozen=True)
class Job:
    """What one rank's writer has to write."""

    folder: str  # holds the checkpoints
    attempt: str  # name of the folder to write in, one for all ranks and for this attempt only
    rank: int
    files: "Mapping[str, Sequence[Segment]]"  # this rank's
    content: Mapping[str, Any]  # of the manifest, without the files
    keep: int  # newest checkpoints kept, 0: all
    keep_every: int  # steps whose multiples are kept for good, 0: none


class Result(NamedTuple):
    """How a job ended."""

    error: str | None  # one line that names the rank; None: it succeeded
    seconds: float
    warning: str | None = None  # older checkpoints could not be deleted


class WriteFailed(RuntimeError):
    """There is no checkpoint; the message is one line that names the rank."""


class AsyncWriter:
    """The trainer's end: starts the process and gives it one job at a time.

    Args:
        staging: file descriptor of the staging buffer.
        rank: for messages.
    """

    def __init__(self, staging: int, rank: int):
        self._rank, self._busy = rank, False
        self._result = Result(None, 0.0)  # of the last job
        self._connection, theirs = Pipe()
        arguments = map(str, (theirs.fileno(), staging, os.getpid()))
        self._process = subprocess.Popen(
            module_command("fla_train.training.async_writer", *arguments),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            pass_fds=(theirs.fileno(), staging),
            start_new_session=True,  # Ctrl-C at the terminal is for the trainer, which still saves
        )
        theirs.close()

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    def start(self, job: Job, beside: bytes) -> None:
        """Have `job` written; `beside` are the bytes that aren't in the staging buffer."""
        self._busy = True
        self._send(json.dumps(vars(job)).encode(), beside)

    def others_are_done(self, error: str | None) -> None:
        """Tell rank 0's writer that the other ranks have written their files, or why one could not."""
        self._send(json.dumps({"error": error}).encode())

    def done(self) -> bool:
        """Whether the job has ended, so that `result` returns at once."""
        return not self._busy or self._connection.poll()

    def result(self) -> Result:
        """Wait for the end of the job."""
        if self._busy:
            try:
                self._result = Result(*json.loads(self._connection.recv_bytes()))
            except (EOFError, OSError):
                code = self._process.wait()
                how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with {code}"
                self._result = Result(f"rank {self._rank}: the writer process {how}", 0.0)
            self._busy = False
        return self._result

    def close(self) -> None:
        """End the process once it has written what it is at."""
        self._connection.close()
        self._process.wait()

    def _send(self, *messages: bytes) -> None:
        with suppress(OSError):  # the process is gone: `result` says so
            for message in messages:
                self._connection.send_bytes(message)


def write(job: Job, staging: int, beside: bytes, trainer: Connection) -> str | None:
    """Write this rank's files and, on rank 0, complete the checkpoint and delete old ones.

    Returns:
        What `CheckpointStore.prune` returns.

    Raises:
        WriteFailed: no checkpoint; what this rank has written of it is deleted.
        EOFError: the trainer is gone.
    """
    folder, name = Path(job.folder), checkpoint.folder_name(job.content["step"])
    writing = folder / job.attempt
    try:
        if job.rank == 0:
            checkpoint.CheckpointStore(folder).clean(keep=job.attempt)
        for path in (writing, writing / checkpoint.DEEPSPEED_TAG):
            path.mkdir(exist_ok=True)
        with ThreadPoolExecutor(len(job.files)) as pool:
            entries = pool.map(
                lambda file: _write_file(writing / file, job.files[file], staging, beside), job.files
            )
            files = dict(zip(job.files, entries, strict=True))
        if job.rank:
            _leave_part(writing, job.rank, {"files": files})
            return None
        files |= _collect_parts(writing, job.content["world_size"], trainer)
        checkpoint.write_manifest(writing, {**job.content, "files": dict(sorted(files.items()))})
        sync(writing / checkpoint.DEEPSPEED_TAG)
        sync(writing)
        move_folder(writing, folder / name)  # in place of the remains of a corrupt one of the same step
    except EOFError:
        raise
    except Exception as failure:
        if not isinstance(failure, (OSError, WriteFailed)):
            traceback.print_exc()
        error = str(failure) if isinstance(failure, WriteFailed) else f"rank {job.rank}: {reason(failure)}"
        if job.rank == 0:
            shutil.rmtree(writing, ignore_errors=True)
        else:
            with suppress(OSError):
                for file in job.files:
                    (writing / file).unlink(missing_ok=True)
                _leave_part(writing, job.rank, {"error": error})
        raise WriteFailed(error) from failure
    return checkpoint.CheckpointStore(folder).prune(folder / name, job.keep, job.keep_every)


def _write_file(path: Path, segments: "Sequence[Segment]", staging: int, beside: bytes) -> dict[str, Any]:
    """Write a file and flush it to the disk; its entry in the manifest, hashed from what was written."""
    digest, size, chunk = hashlib.sha256(), 0, memoryview(bytearray(CHUNK))
    with path.open("wb", buffering=0) as file:

        def put(data: memoryview) -> None:
            nonlocal size
            digest.update(data)
            size += len(data)
            while data:
                data = data[file.write(data) :]

        for staged, begin, length in segments:
            if not staged:
                put(memoryview(beside)[begin : begin + length])
                continue
            for offset in range(begin, begin + length, CHUNK):
                part = chunk[: min(CHUNK, begin + length - offset)]
                read = os.preadv(staging, [part], offset)
                assert read == len(part), "the staging buffer is shorter than its content"
                put(part)
        os.fsync(file.fileno())
    return {"bytes": size, "sha256": digest.hexdigest()}


def _part(writing: Path, rank: int) -> Path:
    return writing / f"part-{rank}.json"


def _leave_part(writing: Path, rank: int, part: Mapping[str, Any]) -> None:
    sync(writing / checkpoint.DEEPSPEED_TAG)
    write_whole(_part(writing, rank), json.dumps(part))


def _collect_parts(writing: Path, world_size: int, trainer: Connection) -> dict[str, dict]:
    """The manifest entries of the other ranks' files, once all are there.

    Raises:
        WriteFailed: a rank could not write, or its files don't become visible.
        EOFError: the trainer is gone.
    """
    files: dict[str, dict] = {}
    missing, deadline = list(range(1, world_size)), math.inf
    while missing:
        if time.monotonic() > deadline:
            raise WriteFailed(
                f"rank {', '.join(map(str, missing))}: rank 0 does not see the files written {VISIBLE:.0f} s "
                "ago: is run.dir one folder that all machines share?"
            )
        for rank in list(missing):
            with suppress(FileNotFoundError):
                part = json.loads(_part(writing, rank).read_text())
                if "error" in part:
                    raise WriteFailed(part["error"])
                files |= part["files"]
                missing.remove(rank)
        if missing and trainer.poll(POLL):
            if error := json.loads(trainer.recv_bytes())["error"]:
                raise WriteFailed(error)
            deadline = time.monotonic() + VISIBLE
    for rank in range(1, world_size):
        _part(writing, rank).unlink()
    return files


def main() -> None:
    descriptor, staging, parent = map(int, sys.argv[1:])
    # Signals that ask a run to stop are for the trainer, which still saves a checkpoint.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)
    die_with_parent(parent)
    os.nice(10)
    trainer = Connection(descriptor)
    with suppress(EOFError, BrokenPipeError):
        while True:
            message = json.loads(trainer.recv_bytes())
            if "files" not in message:  # `others_are_done` after the end of the job
                continue
            beside, begin = trainer.recv_bytes(), time.perf_counter()
            error, warning = None, None
            try:
                warning = write(Job(**message), staging, beside, trainer)
            except WriteFailed as failure:
                error = str(failure)
            trainer.send_bytes(json.dumps(Result(error, time.perf_counter() - begin, warning)).encode())


if __name__ == "__main__":
    main()
