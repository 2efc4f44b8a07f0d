"""Files on disk: flush, atomic replacement of files and folders, size and sha256 of a folder's files."""

import errno
import hashlib
import math
import os
import shutil
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fla_train.utils.locks import try_lock

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

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
    aside = path.with_name(f"{path.name}.{threading.get_native_id()}.tmp")  # unique on the machine
    aside.write_bytes(content.encode() if isinstance(content, str) else content)
    sync(aside)
    os.replace(aside, path)
    sync(path.parent)


def save_tokenizer(tokenizer: "PreTrainedTokenizerBase", folder: Path) -> None:
    """Write the tokenizer's files to `folder`.

    Raises:
        OSError: the disk is full, for which tokenizers (Rust) raises a bare `Exception`.
    """
    try:
        tokenizer.save_pretrained(folder)
    except Exception as failure:
        if type(failure) is not Exception:
            raise
        raise OSError(f"{folder} could not be written: {failure}") from failure


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
    `DELETING`. Overlays do not rename the folders of a lower layer (EXDEV): those are deleted in place, what
    describes them first.
    """
    if os.path.lexists(folder):  # a link to nothing is in the way, too
        doomed = folder.with_name(DELETING + folder.name)
        delete(doomed)
        try:
            os.rename(folder, doomed)
        except OSError as failure:
            if failure.errno != errno.EXDEV:
                raise
            doomed = folder
            for file in folder.glob("*.json"):
                file.unlink()
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

    One writer at a time, by a lock on the hidden folder, whose name is fixed, so that the next call finds
    what a killed process left. The former `folder` is kept until the new one is in its place.

    Raises:
        ValueError: another process writes `folder`.
    """
    folder = folder.resolve()
    aside = folder.with_name(f".writing-{folder.name}")
    former = folder.with_name(f".replaced-{folder.name}")
    aside.mkdir(parents=True, exist_ok=True)
    lock = os.open(aside, os.O_RDONLY)
    try:
        mine = try_lock(lock) and aside.exists() and os.path.samestat(os.stat(aside), os.fstat(lock))
        if not mine:  # another process holds it, or has just put it in place
            raise ValueError(f"another process writes {folder}: wait for it, or give another folder")
        _restore(folder, former)
        for rest in aside.iterdir():
            delete(rest)
        try:
            yield aside
            if folder.exists():
                os.replace(folder, former)
            os.replace(aside, folder)
        except BaseException:
            shutil.rmtree(aside, ignore_errors=True)
            raise
        finally:
            _restore(folder, former)
    finally:
        os.close(lock)


def _restore(folder: Path, former: Path) -> None:
    """Put the former folder back if nothing took its place; else delete it."""
    if former.exists() and not folder.exists():
        os.replace(former, folder)
    shutil.rmtree(former, ignore_errors=True)


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
