"""Lock files between processes that write one folder, on one machine or on several that share a disk."""

import errno
import fcntl
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO


@contextmanager
def locked(path: Path, log: Callable[[str], None]) -> Iterator[None]:
    """Hold an exclusive lock on the file `path`, created if missing. Wait while another process holds it.

    Raises:
        OSError: as `open_lock`, or the folder can't be created.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with open_lock(path) as file:
        if not try_lock(file.fileno()):
            log(f"another process holds {path}; waiting for it")
            fcntl.flock(file, fcntl.LOCK_EX)
        # Closing the file, or the end of the process, releases the lock.
        yield


def open_lock(path: Path) -> IO[bytes]:
    """Open a lock file, created if missing. Reject a symbolic link, whose target must not be touched.

    Raises:
        OSError: the file can't be created, or `path` is a symbolic link.
    """
    return os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o666), "r+b")


def try_lock(descriptor: int) -> bool:
    """Return False if another process holds the lock; True also on file systems without such locks."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno not in (errno.EBADF, errno.EINVAL, errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS):
            raise
    return True
