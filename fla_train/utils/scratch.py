"""Create a temporary folder for one process, and sweep the folders of killed processes."""

import fcntl
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

YOUNG = 60.0  # seconds in which a new folder may still be unlocked


@contextmanager
def scratch_folder(prefix: str) -> Iterator[Path]:
    """Yield a new temporary folder, which is deleted at the end.

    It is locked while its process lives, so that the next process with this `prefix` can tell which folders
    are left over.
    """
    _sweep(prefix)
    folder = Path(tempfile.mkdtemp(prefix=prefix))
    try:
        descriptor = os.open(folder, os.O_RDONLY)
        with suppress(OSError):  # a file system without locks: nothing is swept
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield folder
        os.close(descriptor)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _sweep(prefix: str) -> None:
    for folder in Path(tempfile.gettempdir()).glob(f"{prefix}*"):
        with suppress(OSError):
            status = folder.lstat()
            if status.st_uid != os.getuid() or time.time() - status.st_mtime < YOUNG:
                continue
            descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder, ignore_errors=True)
            finally:
                os.close(descriptor)
