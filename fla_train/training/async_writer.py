"""Write a rank's checkpoint files in a separate process.

The trainer's process only copies its state to a staging buffer (`utils/staging_buffer.py`), which both
processes share. The writer's process reads the buffer, hashes and writes the files, and flushes them to disk.
Training therefore does not wait for Python's lock, checksums or slow disks. The writer imports only the
standard library, starts within 0.1 s, needs little memory, and ends with its trainer.

The ranks' writers share only the folder that they write. Each writer saves `files-R.json`, the manifest
entries of its files, once the files are on disk. Rank 0's writer waits for these files of the other ranks,
writes the manifest and renames the folder. It gives up when its trainer sends the error of another rank.
"""

import hashlib
import json
import math
import mmap
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
from fla_train.training.failures import describe_exit
from fla_train.utils.filesystem import move_folder, reason, sync, write_whole
from fla_train.utils.processes import die_with_parent, module_command

if TYPE_CHECKING:
    from fla_train.utils.staging_buffer import Segment  # imports torch

# Bytes that are hashed and written at once. They stay in the cache of a core.
CHUNK = 1 << 20
# Seconds within which a shared file system must show rank 0 the files of another rank.
VISIBLE = 120.0
POLL = 0.1  # seconds between checks for the other ranks' `files-R.json`


@dataclass(frozen=True)
class Save:
    """Describe the files that one rank's writer writes."""

    folder: Path  # folder that holds the checkpoints
    # Name of the folder to write. It is the same on all ranks, and unique to this attempt.
    attempt: str
    rank: int
    files: "Mapping[str, Sequence[Segment]]"  # files of this rank
    content: Mapping[str, Any]  # content of the manifest without `files`
    keep: int  # number of newest checkpoints to keep, 0: all
    keep_every: int  # keep multiples of this step forever, 0: none


class Result(NamedTuple):
    """Describe how a save ended."""

    error: str | None  # one line that names the rank; None: success
    seconds: float
    warning: str | None = None  # older checkpoints could not be deleted


class WriteFailed(RuntimeError):
    """Report that no checkpoint was written; the message names the rank."""


class AsyncWriter:
    """Start the writer's process and pass it one save at a time.

    Args:
        staging: file descriptor of the staging buffer.
        rank: rank for messages.
    """

    def __init__(self, staging: int, rank: int):
        self._rank, self._busy = rank, False
        self._result = Result(None, 0.0)  # result of the last save
        self._connection, theirs = Pipe()
        arguments = map(str, (theirs.fileno(), staging, os.getpid()))
        self.process = subprocess.Popen(
            module_command("fla_train.training.async_writer", *arguments),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            pass_fds=(theirs.fileno(), staging),
            # Ctrl-C in the terminal reaches only the trainer, which still saves a checkpoint.
            start_new_session=True,
        )
        theirs.close()

    def start(self, save: Save, unstaged: bytes) -> None:
        """Start to write `save`. `unstaged` holds the bytes that are not in the staging buffer."""
        self._busy = True
        self._send((save, unstaged))

    def others_are_done(self, error: str | None) -> None:
        """Tell rank 0's writer that the other ranks have written their files, or why one failed."""
        self._send(error)

    def done(self) -> bool:
        """Return whether the save has ended, so that `result` returns at once."""
        return not self._busy or self._connection.poll()

    def result(self) -> Result:
        """Wait for the end of the save and return its result."""
        if self._busy:
            try:
                self._result = Result(*self._connection.recv())
            except (EOFError, OSError):
                how = describe_exit(self.process.wait())
                self._result = Result(f"rank {self._rank}: the writer process {how}", 0.0)
            self._busy = False
        return self._result

    def close(self) -> None:
        """End the process after its current save."""
        self._connection.close()
        self.process.wait()

    def _send(self, message: object) -> None:
        with suppress(OSError):  # the process has ended, which `result` reports
            self._connection.send(message)


def write(save: Save, staging: int, unstaged: bytes, trainer: Connection) -> str | None:
    """Write this rank's files. Rank 0 also completes the checkpoint and deletes old ones.

    Returns:
        The result of `CheckpointStore.prune`.

    Raises:
        WriteFailed: no checkpoint was written; rank 0 has deleted the files of it.
        EOFError: the trainer has ended.
    """
    folder, name = save.folder, checkpoint.folder_name(save.content["step"])
    writing = folder / save.attempt
    try:
        if save.rank == 0:
            checkpoint.CheckpointStore(folder).clean(keep=save.attempt)
        writing.mkdir(exist_ok=True)
        sources = memoryview(unstaged), memoryview(mmap.mmap(staging, 0, prot=mmap.PROT_READ))
        with ThreadPoolExecutor(len(save.files)) as pool:
            entries = pool.map(lambda f: _write_file(writing / f, save.files[f], sources), save.files)
            files = dict(zip(save.files, entries, strict=True))
        if save.rank:
            sync(writing)
            write_whole(_list_of(writing, save.rank), json.dumps(files))
            return None
        files |= _collect_lists(writing, save.content["world_size"], trainer)
        checkpoint.write_manifest(writing, {**save.content, "files": dict(sorted(files.items()))})
        sync(writing)
        # Replace the remains of a corrupt checkpoint of the same step.
        move_folder(writing, folder / name)
    except EOFError:
        raise
    except Exception as failure:
        if not isinstance(failure, (OSError, WriteFailed)):
            traceback.print_exc()
        error = str(failure) if isinstance(failure, WriteFailed) else f"rank {save.rank}: {reason(failure)}"
        if save.rank == 0:
            shutil.rmtree(writing, ignore_errors=True)
        raise WriteFailed(error) from failure
    return checkpoint.CheckpointStore(folder).prune(folder / name, save.keep, save.keep_every)


def _write_file(
    path: Path, segments: "Sequence[Segment]", sources: tuple[memoryview, memoryview]
) -> dict[str, Any]:
    """Write a file and flush it to disk. Return its manifest entry, hashed from the written bytes.

    Args:
        sources: the separate bytes, and the staging buffer.
    """
    digest = hashlib.sha256()
    with path.open("wb", buffering=0) as file:
        for staged, begin, length in segments:
            segment = sources[staged][begin : begin + length]
            assert len(segment) == length, "the staging buffer is shorter than its content"
            for offset in range(0, length, CHUNK):
                chunk = segment[offset : offset + CHUNK]
                digest.update(chunk)
                while chunk:
                    chunk = chunk[file.write(chunk) :]
        os.fsync(file.fileno())
    return {"bytes": sum(length for *_, length in segments), "sha256": digest.hexdigest()}


def _list_of(writing: Path, rank: int) -> Path:
    return writing / f"files-{rank}.json"


def _collect_lists(writing: Path, world_size: int, trainer: Connection) -> dict[str, dict]:
    """Return the manifest entries of the other ranks' files, once all of them exist.

    Raises:
        WriteFailed: a rank could not write, or its files don't become visible.
        EOFError: the trainer has ended.
    """
    files: dict[str, dict] = {}
    missing, deadline = list(range(1, world_size)), math.inf
    while missing:
        if time.monotonic() > deadline:
            names = ", ".join(map(str, missing))
            raise WriteFailed(f"rank {names}: rank 0 sees no files: do all machines share run.dir?")
        for rank in list(missing):
            with suppress(FileNotFoundError):
                files |= json.loads(_list_of(writing, rank).read_text())
                missing.remove(rank)
        if missing and trainer.poll(POLL):
            if error := trainer.recv():
                raise WriteFailed(error)
            deadline = time.monotonic() + VISIBLE
    for rank in range(1, world_size):
        _list_of(writing, rank).unlink()
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
            message = trainer.recv()
            if not isinstance(message, tuple):  # `others_are_done` after the end of the save
                continue
            begin = time.perf_counter()
            error, warning = None, None
            try:
                warning = write(message[0], staging, message[1], trainer)
            except WriteFailed as failure:
                error = str(failure)
            trainer.send((error, time.perf_counter() - begin, warning))


if __name__ == "__main__":
    main()
