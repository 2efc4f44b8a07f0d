"""Keeping processes that write the same folder apart, on one machine or on several that share a disk."""

import errno
import fcntl
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from fla_train.data.faults import Interrupted

Log = Callable[[str], None]


@contextmanager
def locked(path: Path, log: Log) -> Iterator[None]:
    """Inside, no other process is inside with the same `path`, a file that is made if need be.

    Raises:
        Interrupted: it can't be made.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        file = open_lock(path)
    except OSError as failure:
        raise unwritable(path.parent, failure) from failure
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            log(f"data: another process is preparing the same data; waiting for it ({path})")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield  # closing the file, or dying, releases the lock


def open_lock(path: Path) -> IO[bytes]:
    """Open the file to lock, which is made if need be. What a symbolic link points to is never touched.

    Raises:
        OSError: it can't be made, or `path` is a symbolic link.
    """
    try:
        return os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o666), "r+b")
    except OSError as failure:
        if failure.errno == errno.ELOOP:
            failure.strerror = f"{path.name} is a symbolic link: delete it"
        raise


def unwritable(path: Path, failure: OSError) -> Interrupted:
    """What to raise where the system refuses to write `path`."""
    return Interrupted(
        f"cannot write {path}: {failure.strerror}; make room and run the same command again, it goes on from "
        "here, or set data.cache_dir"
    )
