"""Files on disk: flushing, atomic replacement, size and sha256 of a folder's files."""

import hashlib
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def sync(path: Path) -> None:
    """Have the disk hold a file's content, or a folder's entries, before what is written next."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def reason(failure: BaseException) -> str:
    """Why a write or a read failed, in one line: the system's words, if it is an `OSError` at heart."""
    cause: BaseException | None = failure
    while cause is not None:
        if isinstance(cause, OSError) and cause.strerror:
            return cause.strerror
        cause = cause.__context__
    return " ".join(str(failure).split())


def write_whole(path: Path, content: str | bytes) -> None:
    """Replace a file in one move: a reader, even after a power cut, finds the old content or the new.

    Raises:
        OSError: the disk is full, or the folder can't be written.
    """
    aside = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    aside.write_bytes(content.encode() if isinstance(content, str) else content)
    sync(aside)
    os.replace(aside, path)
    sync(path.parent)


def sha256(path: Path) -> str:
    """Hex digest of a file's content."""
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def describe(path: Path) -> dict[str, int | str]:
    """`{"bytes": size, "sha256": hex}` of a file, which `find_damage` compares."""
    return {"bytes": path.stat().st_size, "sha256": sha256(path)}


def find_damage(
    folder: Path, files: Mapping[str, Mapping[str, Any]], *, hashed_bytes: float = math.inf
) -> str | None:
    """The first file that differs from its description, and how; None if all are as described.

    Args:
        files: name in `folder` -> what `describe` returned.
        hashed_bytes: of files up to this size compare the checksums, too; of larger ones the sizes only.
    """
    for name, described in files.items():
        path = folder / name
        try:
            if not path.is_file():
                return f"{name} is missing"
            if (size := path.stat().st_size) != described["bytes"]:
                return f"{name} has {size} bytes instead of {described['bytes']}"
            if size <= hashed_bytes and sha256(path) != described["sha256"]:
                return f"{name} has a wrong checksum"
        except OSError as error:  # it may have been deleted meanwhile
            return f"{name} can't be read ({error.strerror})"
    return None
