"""Corpus files: find and identify them, and cut parquet and JSON-lines files into slices.

A `Slice` is a piece of a corpus that becomes one shard. It is cheap to send to another process, which reads
the documents. Tokenizing processes import this module, so it imports neither torch nor transformers.
"""

import glob
import gzip
import hashlib
import json
import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pyarrow import parquet

from fla_train.data.config import DataConfig

_ENDINGS = (".parquet", ".jsonl", ".jsonl.gz")
_END_BYTES = 1 << 16  # bytes at each end of a file that its identity covers
_READ_ROWS = 16  # rows of a row group to decode at once, which bounds the memory
_REMEDY = "fetch the file again or remove it"


@dataclass(frozen=True)
class Slice:
    """Consecutive documents of a corpus.

    Attributes:
        key: JSON-able identity. Slices with equal keys hold the same documents.
        size: progress through the corpus, in bytes of its files.
        after: JSON-able state from which a stream continues behind the slice; None for files.
    """

    config: DataConfig
    key: Any
    size: int
    after: Any = field(default=None, kw_only=True)

    def documents(self) -> Iterator[tuple[int, object]]:
        """Read (number within the slice, value of the text column) of each document."""
        raise NotImplementedError

    def where(self, number: int) -> str:
        """Return the file and line, or row, of a document."""
        raise NotImplementedError

    def texts(self) -> Iterator[tuple[str, bytes]]:
        """Read the documents, as text and as UTF-8. Null is an empty text.

        Raises:
            ValueError: a document is invalid, or its file is; the message names the place.
        """
        for number, value in self.documents():
            text = "" if value is None else value
            if not isinstance(text, str):
                kind, column = type(text).__name__, self.config.text_column
                raise ValueError(f"{self.where(number)}: '{column}' is {kind}, not text (data.text_column)")
            try:
                raw = text.encode()
            except UnicodeEncodeError as failure:  # JSON allows lone surrogates
                raise ValueError(f"{self.where(number)}: not valid Unicode ({failure})") from failure
            self.check_length(number, len(raw))
            yield text, raw

    def check_unchanged(self) -> None:
        """Raise `ValueError` if the slice's file is not the one that was cut, so the slice's key is wrong."""

    def check_length(self, number: int, size: int) -> None:
        """Raise `ValueError` if a document of `size` bytes is too long."""
        if size > (limit := self.config.max_line_bytes):
            raise ValueError(f"{self.where(number)}: longer than data.max_line_bytes={limit}: split it")


@dataclass(frozen=True)
class TextSlice(Slice):
    """Documents in memory, and a name for each."""

    values: Sequence[object]
    names: Sequence[str]

    def documents(self) -> Iterator[tuple[int, object]]:
        return enumerate(self.values)

    def where(self, number: int) -> str:
        return self.names[number]


@dataclass(frozen=True)
class FileSlice(Slice):
    """Documents of a file. The key begins with the file's identity."""

    path: str

    def check_unchanged(self) -> None:
        if describe_files([(self.key[0]["name"], Path(self.path))]) != self.key[:1]:
            raise ValueError(f"{self.path} changed while it was read: run the same command again")


@dataclass(frozen=True)
class ParquetSlice(FileSlice):
    """Row groups [first, stop) of a parquet file; `row` counts the rows before them."""

    first: int
    stop: int
    row: int

    def documents(self) -> Iterator[tuple[int, object]]:
        number = 0
        with reading(self.path, _REMEDY):
            file, groups = parquet.ParquetFile(self.path), range(self.first, self.stop)
            batches = file.iter_batches(_READ_ROWS, groups, [self.config.text_column])
        while True:
            with reading(f"{self.where(number)} and following", _REMEDY):
                values = next((batch.column(self.config.text_column).to_pylist() for batch in batches), None)
            if values is None:
                return
            yield from enumerate(values, start=number)
            number += len(values)

    def where(self, number: int) -> str:
        return f"{self.path}, row {self.row + number + 1}"


@dataclass(frozen=True)
class LinesSlice(FileSlice):
    """The lines of a JSON-lines file that begin in bytes [start, stop). A packed file is one slice."""

    start: int
    stop: int

    def documents(self) -> Iterator[tuple[int, object]]:
        for number, line in enumerate(self._lines()):
            if not line.strip():
                continue
            try:
                record = json.loads(line)
                if not isinstance(record, dict):
                    raise ValueError("not an object")
            except (ValueError, RecursionError) as failure:
                raise ValueError(f"{self.where(number)}: not JSON ({failure}); repair it") from failure
            if self.config.text_column not in record:
                require_column(self.where(number), self.config.text_column, record)
            yield number, record[self.config.text_column]

    def _lines(self) -> Iterator[bytes]:
        """Yield the lines. One that is too long is not read whole: decompressed, it might fill the memory."""
        packed = self.path.endswith(".gz")
        with reading(self.path, _REMEDY):
            file = gzip.open(self.path, "rb") if packed else open(self.path, "rb")
        with file:
            position = number = 0
            # The line that holds the byte before `start` belongs to the slice before.
            if self.start:
                position = file.seek(self.start - 1) + len(file.readline(self.config.max_line_bytes + 2))
            while packed or position < self.stop:
                with reading(self.path, _REMEDY):
                    line = file.readline(self.config.max_line_bytes + 2)
                if not line:
                    return
                self.check_length(number, len(line.rstrip(b"\n")))
                yield line
                position, number = position + len(line), number + 1

    def where(self, number: int) -> str:
        before = min(self.start, 1)  # the line that holds the byte before `start`
        with open(self.path, "rb") as file:
            while (left := self.start - 1 - file.tell()) > 0:
                before += file.read(min(left, 1 << 24)).count(b"\n")
        return f"{self.path}, line {before + number + 1}"


def require_column(where: object, column: str, names: Iterable[str]) -> None:
    """Raise `ValueError` if `names` lacks the column."""
    if column not in names:
        raise ValueError(f"{where}: no column '{column}' (it has {', '.join(names)}); set data.text_column")


def find_files(path: str, endings: tuple[str, ...] = _ENDINGS, follow: bool = True) -> list[tuple[str, Path]]:
    """Return (name, file) of each corpus file behind a file, folder (recursive) or glob, sorted by name.

    Leave out hidden files and folders, as `datasets` does. Read each folder once, however many links lead to
    it; without `follow` read no folder through a link.

    Raises:
        ValueError: there is none.
        OSError: a folder can't be read.
    """
    root = Path(path).expanduser()
    if root.is_dir():
        named = [(file.relative_to(root).as_posix(), file) for file in _below(root, follow)]
    else:
        matches = {root} if root.is_file() else {*map(Path, glob.glob(str(root), recursive=True))}
        named = [(file.name, file) for file in matches]
    matching = ((name, file) for name, file in named if name.endswith(endings))
    # A broken link stays, and raises an error when it is read.
    chosen = sorted((name, file) for name, file in matching if file.is_file() or not file.exists())
    if not chosen:
        ending = f" ending in {', '.join(endings)}" if all(endings) else ""
        what = f"no file{ending}" if named or root.is_dir() else "no such file or folder"
        raise ValueError(f"data.path={path}: {what}; give a file, a folder or a quoted glob")
    return chosen


def _below(root: Path, follow: bool) -> Iterator[Path]:
    """Yield the files below a folder that are not hidden, each folder once, in a fixed order of folders."""

    def refuse(error: OSError) -> None:
        raise error

    seen = set()
    for folder, folders, names in os.walk(root, onerror=refuse, followlinks=follow):
        real = os.path.realpath(folder)
        folders[:] = [] if real in seen else sorted(name for name in folders if not name.startswith("."))
        if real not in seen:
            yield from (Path(folder, name) for name in names if not name.startswith("."))
        seen.add(real)


def describe_files(files: Sequence[tuple[str, Path]]) -> list[dict[str, str | int]]:
    """Return the identity of files without reading them whole: name, size, and a hash of both ends."""
    return [{"name": name, "bytes": file.stat().st_size, "ends": _hash_ends(file)} for name, file in files]


def _hash_ends(path: Path) -> str:
    with reading(str(path), "give access, or remove it"), path.open("rb") as file:
        digest = hashlib.sha256(file.read(_END_BYTES))
        if (size := path.stat().st_size) > _END_BYTES:
            file.seek(max(_END_BYTES, size - _END_BYTES))
            digest.update(file.read())
    return digest.hexdigest()


def cut_files(
    config: DataConfig, files: Sequence[tuple[str, Path]], identities: Sequence[Any]
) -> Iterator[Slice]:
    """Cut files into slices of about `data.shard_bytes`; no slice crosses the end of a file.

    Args:
        identities: what `describe_files` returned.

    Raises:
        ValueError: a parquet file can't be read or lacks the column.
    """
    for (_, path), identity in zip(files, identities, strict=True):
        size = path.stat().st_size
        if path.suffix == ".parquet":
            with reading(str(path), _REMEDY):
                file = parquet.ParquetFile(path)
            require_column(path, config.text_column, file.schema_arrow.names)
            groups = [file.metadata.row_group(group) for group in range(file.num_row_groups)]
            sizes, rows = [group.total_byte_size for group in groups], [group.num_rows for group in groups]
            for first, stop in cut(sizes, config.shard_bytes):
                key, share = [identity, first, stop], size * sum(sizes[first:stop]) // max(1, sum(sizes))
                yield ParquetSlice(config, key, share, str(path), first, stop, sum(rows[:first]))
        else:
            step = size if path.suffix == ".gz" else config.shard_bytes
            for start in range(0, size, max(1, step)):
                stop = min(start + step, size)
                yield LinesSlice(config, [identity, start, stop], stop - start, str(path), start, stop)


def cut(sizes: Iterable[int], limit: int) -> Iterator[tuple[int, int]]:
    """Yield [first, stop) of consecutive groups of items; each group but the last reaches `limit`."""
    first = stop = total = 0
    for stop, size in enumerate(sizes, start=1):
        total += size
        if total >= limit:
            yield first, stop
            first, total = stop, 0
    if first < stop:
        yield first, stop


@contextmanager
def reading(
    where: str,
    remedy: str,
    error: type[ValueError] = ValueError,
    request_errors: tuple[type[Exception], ...] = (),
) -> Iterator[None]:
    """Raise a failure inside as an `error` that names the place; one of `request_errors` as `ValueError`."""
    try:
        yield
    except Exception as failure:
        message = " ".join(str(failure).split())
        kind = ValueError if isinstance(failure, request_errors) else error
        raise kind(f"{where}: cannot be read ({message}); {remedy}") from failure
