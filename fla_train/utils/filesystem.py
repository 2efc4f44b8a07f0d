"""Files on disk: flush, atomic replacement of files and folders, size and sha256 of a folder's files."""

import hashlib
import math
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

DELETING = ".deleting-"  # prefix of the name of a folder that is being deleted


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
    return " ".join(str(failure).split()) or type(failure).__name__


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


def halves_of(path: Path) -> list[Path]:
    """The files that a `write_whole` of `path` leaves if it is killed."""
    number = slice(len(path.name) + 1, -len(".tmp"))
    return [aside for aside in path.parent.glob(f"{path.name}.*.tmp") if aside.name[number].isdecimal()]


def move_folder(source: Path, target: Path) -> None:
    """Put a finished folder in its place in one move, and flush the move. A former `target` is deleted first.

    Raises:
        OSError: the parent folder can't be written.
    """
    remove_folder(target)
    os.rename(source, target)
    sync(target.parent)


def remove_folder(folder: Path) -> None:
    """Delete what is at `folder`, if anything; renamed first, so that a kill leaves none that looks complete.

    What can't be deleted (NFS keeps a file that a reader has open) stays in the folder with the prefix
    `DELETING`.
    """
    if os.path.lexists(folder):  # a link to nothing is in the way, too
        doomed = folder.with_name(DELETING + folder.name)
        delete(doomed)
        os.rename(folder, doomed)
        delete(doomed)


def delete(path: Path) -> None:
    """Delete a folder with its content, or a file or link by itself, as far as the system allows."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        with suppress(OSError):
            path.unlink()


@contextmanager
def replaced_folder(folder: Path) -> Iterator[Path]:
    """Yield a hidden folder that replaces `folder` if the block succeeds and is deleted if it fails.

    Where `folder` is a link, what it leads to is replaced.

    One writer at a time: the hidden folder's name is fixed, so that the next call finds what a killed process
    left. The former `folder` is kept until the new one is in its place.
    """
    folder = folder.resolve()
    aside = folder.with_name(f".writing-{folder.name}")
    former = folder.with_name(f".replaced-{folder.name}")
    _settle(folder, aside, former)
    aside.mkdir(parents=True)
    try:
        yield aside
        if folder.exists():
            os.replace(folder, former)
        os.replace(aside, folder)
    finally:
        _settle(folder, aside, former)


def _settle(folder: Path, aside: Path, former: Path) -> None:
    """Keep only `folder` of the three; the former one comes back if nothing took its place."""
    if former.exists() and not folder.exists():
        os.replace(former, folder)
    for rest in (aside, former):
        shutil.rmtree(rest, ignore_errors=True)


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
