"""Read documents from parquet and JSON-lines files, in chunks, from any position.

A cursor, the position behind a chunk, is `{"file": n, "row": rows read}` in a parquet file and `{"file": n,
"offset": bytes, "line": lines read}` in a JSON-lines file.

Tokenizing processes import this module: it imports neither torch nor transformers, and pyarrow when needed.
"""

import glob
import gzip
import hashlib
import json
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Protocol, TypedDict, TypeVar

if TYPE_CHECKING:
    import pyarrow
    import pyarrow.parquet

_T = TypeVar("_T")
_ENDINGS = (".parquet", ".jsonl", ".jsonl.gz")
_PROBE = 1 << 16  # bytes at each end of a file that are hashed
_READ_BYTES = 16 << 20  # bytes of a row group decoded at once, so that large documents don't fill the memory
CHUNK_BYTES = 1 << 19  # approximate bytes of text in a chunk: a fifth of a second of tokenization

# A position in a source, JSON-able, from which its reader can continue.
Cursor = dict[str, Any]


class Document(TypedDict):
    """One text and a name for it that a person can look up (used in error messages)."""

    text: str
    id: str


class Chunk(Protocol):
    """Consecutive documents as read and not yet parsed, cheap to send to another process.

    Attributes:
        after: the position behind them.
    """

    after: Cursor

    def documents(self) -> Iterator[Document]:
        """Parse. Raises `ValueError` that names the place of an invalid document."""
        ...


@dataclass(frozen=True)
class TextChunk:
    """Documents that the reader has parsed already."""

    texts: list[Document]
    after: Cursor

    def documents(self) -> Iterator[Document]:
        return iter(self.texts)


@dataclass(frozen=True)
class ParquetChunk:
    """Rows of a parquet file: an Arrow stream of the text column and, if there is one, the id column."""

    stream: bytes
    path: str
    first_row: int  # counted from 1 within the file
    text_column: str
    max_line_bytes: int  # of a text
    after: Cursor

    def documents(self) -> Iterator[Document]:
        import pyarrow

        table = pyarrow.ipc.open_stream(self.stream).read_all()
        texts, ids = (self._values(column) for column in (*table.columns, pyarrow.nulls(len(table)))[:2])
        for row, (text, identity) in enumerate(zip(texts, ids, strict=True), start=self.first_row):
            where = f"{self.path}, row {row}"
            if isinstance(text, str) and 4 * len(text) > self.max_line_bytes:  # a character has up to 4 bytes
                _check_length(where, len(text.encode()), self.max_line_bytes)
            yield make_document(text, identity, where, self.text_column)

    def _values(self, column: "pyarrow.ChunkedArray | pyarrow.Array") -> list:
        try:
            return column.to_pylist()
        except ValueError:  # not UTF-8
            for row, value in enumerate(column, start=self.first_row):
                try:
                    value.as_py()
                except ValueError as failure:
                    where = f"{self.path}, row {row}"
                    raise ValueError(f"{where}: cannot be read ({failure}); repair or remove it") from failure
            raise


@dataclass(frozen=True)
class JsonChunk:
    """Lines of a JSON-lines file."""

    lines: list[bytes]
    path: str
    first_line: int  # counted from 1
    text_column: str
    id_column: str
    max_line_bytes: int
    after: Cursor

    def documents(self) -> Iterator[Document]:
        remedy = "repair or remove the line, or fetch the file again"
        for number, line in enumerate(self.lines, start=self.first_line):
            if not line.strip():
                continue
            where = f"{self.path}, line {number}"
            _check_length(where, len(line.rstrip(b"\n")), self.max_line_bytes)
            try:
                record = json.loads(line)
            except (ValueError, RecursionError) as failure:
                raise ValueError(f"{where}: not JSON ({failure}); {remedy}") from failure
            if not isinstance(record, dict):
                raise ValueError(f"{where}: not a JSON object; {remedy}")
            require_column(where, self.text_column, record)
            yield make_document(record[self.text_column], record.get(self.id_column), where, self.text_column)


def _check_length(where: str, size: int, limit: int) -> None:
    if size > limit:
        raise ValueError(
            f"{where}: longer than {limit:,} bytes; split or remove it, or raise data.max_line_bytes"
        )


def make_document(text: object, identity: object, place: str, column: str) -> Document:
    """A null text counts as empty (preparing leaves empty documents out and counts them)."""
    if not isinstance(text, str | None):
        raise ValueError(f"{place}: '{column}' is {type(text).__name__}, not text; set data.text_column")
    return {"text": text or "", "id": place if identity is None else str(identity)}


def require_column(where: object, column: str, names: Iterable[str]) -> None:
    """Raise `ValueError` if `names` lacks the column."""
    if column not in names:
        raise ValueError(f"{where}: no column '{column}' (it has {', '.join(names)}); set data.text_column")


def find_files(
    path: str, endings: tuple[str, ...] = _ENDINGS, *, follow: bool = True
) -> list[tuple[str, Path]]:
    """(name, file) of every corpus file behind a file, folder (recursive) or glob, sorted by name.

    In a folder, names that begin with a dot are left out, as `datasets` does: editors, downloads and
    notebooks keep other things there. Links to folders are followed where `follow`; a folder is read once.

    Raises:
        ValueError: if there are none, or a folder can't be read.
    """
    root = Path(path).expanduser()
    if root.is_file():
        candidates = [root]
    elif root.is_dir():
        candidates = [file for file in _below(root, follow=follow) if file.is_file()]
    else:  # a glob may find a file in several ways
        candidates = [Path(f) for f in set(glob.glob(str(root), recursive=True)) if Path(f).is_file()]
    base = root if root.is_dir() else None
    named = sorted(
        (f.relative_to(base).as_posix() if base else f.name, f)
        for f in candidates
        if f.name.endswith(endings)
    )
    if not named:
        ending = f" ending in {', '.join(endings)}" if all(endings) else ""
        what = f"no file{ending}" if candidates or root.is_dir() else "no such file or folder"
        if candidates:
            what += f" (there is {min(f.name for f in candidates)})"
        raise ValueError(f"data.path={path}: {what}; give a file, a folder or a quoted glob")
    return named


def _below(root: Path, *, follow: bool) -> Iterator[Path]:
    """The files below a folder without hidden ones; where `follow`, below links to other folders as well."""

    def refuse(error: OSError) -> None:
        raise ValueError(
            f"data.path={root}: {error.filename} can't be read ({error.strerror}); give access, or a "
            "quoted glob that leaves it out"
        ) from error

    seen, starts = set(), [str(root)]
    while starts:  # links come after all folders, so that a folder below the root has its own name
        links = []
        for start in starts:
            for folder, folders, names in os.walk(start, onerror=refuse):
                folders[:] = sorted(name for name in folders if not name.startswith("."))
                real = os.path.realpath(folder)
                if real in seen:
                    folders.clear()
                    continue
                seen.add(real)
                links += [path for name in folders if os.path.islink(path := os.path.join(folder, name))]
                yield from (Path(folder, name) for name in names if not name.startswith("."))
        starts = links if follow else []


def describe_files(files: list[tuple[str, Path]]) -> list[dict[str, str | int]]:
    """The identity of files without reading terabytes: name, size and a hash of both ends of each."""
    return [{"name": name, "bytes": file.stat().st_size, "ends": _ends(file)} for name, file in files]


def _ends(path: Path) -> str:
    size = path.stat().st_size
    with reading(str(path), "give access, or remove it"), path.open("rb") as file:
        digest = hashlib.sha256(file.read(_PROBE))
        if size > _PROBE:
            file.seek(max(_PROBE, size - _PROBE))
            digest.update(file.read())
    return digest.hexdigest()


def read_files(
    files: list[tuple[str, Path]], text_column: str, id_column: str, max_line_bytes: int, start: Cursor | None
) -> Iterator[Chunk]:
    """The documents of all files from `start` on.

    Raises:
        ValueError: while reading, naming the file and the place that cannot be read.
    """
    first = 0 if start is None else start["file"]
    for number in range(first, len(files)):
        _, path = files[number]
        within = start if start is not None and number == first else {}
        read = _read_parquet if path.name.endswith(".parquet") else _read_jsonl
        yield from read(path, number, text_column, id_column, max_line_bytes, within)


def text_bytes(files: list[Path], column: str) -> int | None:
    """Text bytes by the files' own metadata; None if a compressed JSON-lines file hides it."""
    total = 0
    for path in files:
        if path.name.endswith(".gz"):
            return None
        if path.suffix == ".parquet":
            metadata = _open_parquet(path, column).metadata
            position = metadata.schema.names.index(column)
            groups = (metadata.row_group(i) for i in range(metadata.num_row_groups))
            total += sum(group.column(position).total_uncompressed_size for group in groups)
        else:
            total += path.stat().st_size
    return total


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


def guarded(
    items: Iterable[_T], where: str, remedy: str, error: type[ValueError] = ValueError
) -> Iterator[_T]:
    """`items`, each of them produced inside `reading`."""
    iterator = iter(items)
    while True:
        with reading(where, remedy, error):
            try:
                item = next(iterator)
            except StopIteration:
                return
        yield item


def _open_parquet(path: Path, column: str) -> "pyarrow.parquet.ParquetFile":
    from pyarrow import parquet, types

    try:
        file = parquet.ParquetFile(path)
    except Exception as failure:
        raise ValueError(
            f"{path}: not a readable parquet file ({failure}); fetch it again or remove it"
        ) from failure
    require_column(path, column, file.schema_arrow.names)
    if file.schema_arrow.names.count(column) > 1:
        raise ValueError(f"{path}: several columns are called '{column}'; rename them")
    kind = file.schema_arrow.field(column).type
    kind = kind.value_type if types.is_dictionary(kind) else kind
    if not (types.is_string(kind) or types.is_large_string(kind) or types.is_string_view(kind)):
        raise ValueError(f"{path}: column '{column}' holds {kind}, not text; set data.text_column")
    return file


def _read_parquet(
    path: Path, number: int, text_column: str, id_column: str, max_line_bytes: int, start: Cursor
) -> Iterator[ParquetChunk]:
    file = _open_parquet(path, text_column)
    named = file.schema_arrow.names.count(id_column) == 1 and id_column != text_column
    columns = [text_column, id_column] if named else [text_column]
    row, skip = 0, start.get("row", 0)
    for group in range(file.num_row_groups):
        metadata = file.metadata.row_group(group)
        if row + metadata.num_rows <= skip:
            row += metadata.num_rows
            continue
        share = _READ_BYTES * metadata.num_rows // max(1, metadata.total_byte_size)
        batches = file.iter_batches(max(1, min(1024, share)), row_groups=[group], columns=columns)
        where = f"{path}, row group {group}"
        for batch in guarded(batches, where, "fetch the file again or remove it"):
            fresh = batch.slice(max(0, min(skip - row, batch.num_rows)))
            row += batch.num_rows - fresh.num_rows
            for piece in _cut(fresh.select(columns), text_column):
                first, row = row + 1, row + piece.num_rows
                after = {"file": number, "row": row}
                yield ParquetChunk(_arrow_stream(piece), str(path), first, text_column, max_line_bytes, after)


def _cut(batch: "pyarrow.RecordBatch", column: str) -> Iterator["pyarrow.RecordBatch"]:
    """Cut a batch after each document that completes `CHUNK_BYTES` of text."""
    import numpy as np
    import pyarrow
    from pyarrow import compute, types

    texts = batch.column(column)
    texts = texts.dictionary_decode() if types.is_dictionary(texts.type) else texts
    texts = texts.cast(pyarrow.large_string()) if types.is_string_view(texts.type) else texts
    # Each slice of a dictionary or of views would carry all the text.
    batch = batch.set_column(batch.schema.get_field_index(column), column, texts)
    sizes = compute.fill_null(compute.binary_length(texts), 0).to_numpy()
    ends = np.cumsum(sizes)
    start = 0
    while start < batch.num_rows:
        done = ends[start - 1] if start else 0
        stop = min(int(np.searchsorted(ends, done + CHUNK_BYTES)) + 1, batch.num_rows)
        yield batch.slice(start, stop - start)
        start = stop


def _arrow_stream(batch: "pyarrow.RecordBatch") -> bytes:
    import pyarrow

    sink = pyarrow.BufferOutputStream()
    with pyarrow.ipc.new_stream(sink, batch.schema) as writer:
        writer.write_batch(batch)
    return sink.getvalue().to_pybytes()


def _read_jsonl(
    path: Path, number: int, text_column: str, id_column: str, max_line_bytes: int, start: Cursor
) -> Iterator[JsonChunk]:
    remedy = "fetch the file again or remove it"
    line = start.get("line", 0)
    with reading(str(path), remedy):
        packed = path.suffix == ".gz"
        if packed and not path.stat().st_size:  # gzip accepts it, as a file of no streams
            raise EOFError("it has no bytes, as a download that was cut short")
        opened = gzip.open(path, "rb") if packed else path.open("rb")
    with opened as file:
        with reading(str(path), remedy):
            # A compressed file is decompressed from its beginning again.
            file.seek(start.get("offset", 0))
        blocks = iter(lambda: _read_lines(file, max_line_bytes), [])
        for lines in guarded(blocks, str(path), remedy):
            first, line = line + 1, line + len(lines)
            after = {"file": number, "offset": file.tell(), "line": line}
            yield JsonChunk(lines, str(path), first, text_column, id_column, max_line_bytes, after)
            if len(lines[-1]) > max_line_bytes and not lines[-1].endswith(b"\n"):
                return  # only its beginning was read; the chunk refuses it


def _read_lines(file: IO[bytes], max_line_bytes: int) -> list[bytes]:
    """The next lines, about `CHUNK_BYTES` together; none at the end of the file.

    A line that is too long is cut after `max_line_bytes + 1` bytes and is the last one: decompressed, it
    might fill the memory.
    """
    lines: list[bytes] = []
    size = 0
    while size < CHUNK_BYTES and (line := file.readline(max_line_bytes + 1)):
        lines.append(line)
        size += len(line)
        if len(line) > max_line_bytes:
            break
    return lines
