"""Write files safely: flush, replace files and folders atomically, compare sizes and sha256."""

import hashlib
import math
import os
import secrets
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from fla_train.utils.locks import try_lock

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

DELETING = ".deleting-"  # prefix of a folder that is being deleted


def sync(path: Path) -> None:
    """Flush a file's content or a folder's entries to disk, before anything is written after it."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def reason(failure: BaseException) -> str:
    """Return why a write or a read failed: the system's message, if the cause is an `OSError`."""
    cause: BaseException | None = failure
    while cause is not None:
        if isinstance(cause, OSError) and cause.strerror:
            return cause.strerror
        cause = cause.__context__
    return " ".join(str(failure).split()) or type(failure).__name__


def write_whole(path: Path, content: str | bytes) -> None:
    """Write a file as `replaced_file` does."""
    with replaced_file(path) as file:
        file.write(content.encode() if isinstance(content, str) else content)


@contextmanager
def replaced_file(path: Path) -> Iterator[IO[bytes]]:
    """Yield a new file that replaces `path` atomically if the block succeeds and is deleted if it fails.

    A reader sees the old or the new content, even after a power failure.

    Raises:
        OSError: the disk is full, or the folder can't be written.
    """
    # Several machines may write one file of a shared disk.
    aside = path.with_name(f"{path.name}.{secrets.randbits(64)}.tmp")
    try:
        with aside.open("wb") as file:
            yield file
        sync(aside)
        os.replace(aside, path)
    except BaseException as failure:
        aside.unlink(missing_ok=True)
        if isinstance(failure, OSError):
            failure.filename = failure.filename or str(path)  # a full disk does not say which
        raise
    sync(path.parent)


def save_tokenizer(tokenizer: "PreTrainedTokenizerBase", folder: Path) -> None:
    """Write the tokenizer's files to `folder`, and flush them.

    Raises:
        OSError: the disk is full, for which tokenizers (Rust) raises a bare `Exception`.
    """
    try:
        tokenizer.save_pretrained(folder)
    except Exception as failure:
        if type(failure) is not Exception:
            raise
        raise OSError(f"{folder} could not be written: {failure}") from failure
    for path in (*folder.rglob("*"), folder):
        sync(path)


def move_folder(source: Path, target: Path) -> None:
    """Move a finished folder to `target`, flush the move, and delete a former `target` last.

    Raises:
        OSError: the parent folder can't be written.
    """
    former = _move_aside(target)
    try:
        os.rename(source, target)
    except BaseException:
        # Move the former folder back, if one existed.
        with suppress(OSError):
            os.rename(former, target)
        raise
    sync(target.parent)
    delete(former)


def remove_folder(folder: Path) -> None:
    """Delete a folder, if it exists. Rename it first, so that a kill leaves no folder that looks complete.

    Files that can't be deleted (NFS keeps a file that a reader has open) stay in the folder with the prefix
    `DELETING`.
    """
    delete(_move_aside(folder))


def _move_aside(path: Path) -> Path:
    """Rename a folder or link, if it exists, to a name with the prefix `DELETING`. Return that name."""
    aside = path.with_name(DELETING + path.name)
    delete(aside)
    with suppress(FileNotFoundError):
        os.rename(path, aside)
    return aside


def delete(path: Path) -> None:
    """Delete a folder with its content, a file, or a link but not its target, as far as the system allows."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        with suppress(OSError):
            path.unlink()


@contextmanager
def replaced_folder(folder: Path) -> Iterator[Path]:
    """Yield a hidden folder that replaces `folder` if the block succeeds and is deleted if it fails.

    If `folder` is a link, its target is replaced. A lock on the hidden folder allows only one writer. The
    name of the hidden folder is fixed, so that the next call finds the remains of a killed process.

    Raises:
        ValueError: another process writes `folder`.
    """
    folder = folder.resolve()
    aside = folder.with_name(f".writing-{folder.name}")
    aside.mkdir(parents=True, exist_ok=True)
    lock = os.open(aside, os.O_RDONLY)
    try:
        mine = try_lock(lock) and aside.exists() and os.path.samestat(os.stat(aside), os.fstat(lock))
        # A concurrent process holds it, or has just moved it to `folder`.
        if not mine:
            raise ValueError(f"another process writes {folder}: wait for it, or give another folder")
        if not folder.exists():
            # Restore the former folder after a kill between the two moves of `move_folder`.
            with suppress(FileNotFoundError):
                os.rename(folder.with_name(DELETING + folder.name), folder)
        for rest in aside.iterdir():
            delete(rest)
        try:
            yield aside
            move_folder(aside, folder)
        except BaseException:
            delete(aside)
            raise
    finally:
        os.close(lock)


def sha256(path: Path) -> str:
    """Return the hex digest of a file's content."""
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def describe(path: Path) -> dict[str, int | str]:
    """Return `{"bytes": size, "sha256": hex}` of a file, for `find_damage`."""
    return {"bytes": path.stat().st_size, "sha256": sha256(path)}


def find_damage(
    folder: Path, files: Mapping[str, Mapping[str, Any]], *, hashed_bytes: float = math.inf
) -> str | None:
    """Return the first file that differs from its description, and how; None if all files match.

    Args:
        files: name in `folder` -> result of `describe`.
        hashed_bytes: compare checksums only of files up to this size, and of larger files only sizes.
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
        except OSError as error:  # another process may have deleted it
            return f"{name} can't be read ({error.strerror})"
    return None
