"""Parquet and JSON-lines files with FineWeb's columns, read in chunks from any place on.

A cursor is `{"file": n, "row": rows read}` in a parquet file and `{"file": n, "offset": bytes, "line": lines
read}` in a JSON-lines file.
"""

import glob
import gzip
import hashlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, TYPE_CHECKING, TypeVar

from fla_train.data.chunks import CHUNK_BYTES, Chunk, Cursor, JsonChunk, ParquetChunk, require_column
from fla_train.data.faults import Interrupted

if TYPE_CHECKING:
    import pyarrow
    import pyarrow.parquet

_T = TypeVar("_T")
_ENDINGS = (".parquet", ".jsonl", ".jsonl.gz")
_PROBE = 1 << 16  # bytes at each end of a file that stand for its content
_READ_BYTES = 16 << 20  # of a row group decoded at once, so that large documents don't fill the memory


def find_files(path: str, endings: tuple[str, ...] = _ENDINGS) -> list[tuple[str, Path]]:
    """(name, file) of every corpus file behind a file, folder (recursive) or glob, sorted by name.

    In a folder, names that begin with a dot are left out, as `datasets` does: what editors, downloads and
    notebooks keep there is no text of the corpus.

    Raises:
        ValueError: if there are none.
    """
    root = Path(path).expanduser()
    if root.is_file():
        candidates = [root]
    elif root.is_dir():
        candidates = [f for f in root.rglob("*") if not _is_hidden(f.relative_to(root)) and f.is_file()]
    else:
        candidates = [Path(f) for f in glob.glob(str(root), recursive=True) if Path(f).is_file()]
    base = root if root.is_dir() else None
    named = sorted(
        (f.relative_to(base).as_posix() if base else f.name, f)
        for f in candidates
        if f.name.endswith(endings)
    )
    if not named:
        ending = f" ending in {', '.join(endings)}" if all(endings) else ""
        what = f"no file{ending}" if candidates or root.is_dir() else "no such file or folder"
        raise ValueError(f"data.path={path}: {what}; give a file, a folder or a quoted glob")
    return named


def _is_hidden(name: Path) -> bool:
    return any(part.startswith(".") for part in name.parts)


def describe_files(files: list[tuple[str, Path]]) -> list[dict[str, str | int]]:
    """What tells changed files apart without reading terabytes: name, size, hash of both ends."""
    return [{"name": name, "bytes": file.stat().st_size, "ends": _ends(file)} for name, file in files]


def _ends(path: Path) -> str:
    size = path.stat().st_size
    with path.open("rb") as file:
        digest = hashlib.sha256(file.read(_PROBE))
        if size > _PROBE:
            file.seek(max(_PROBE, size - _PROBE))
            digest.update(file.read())
    return digest.hexdigest()


def read_files(
    files: list[tuple[str, Path]],
    text_column: str,
    id_column: str,
    max_line_bytes: int,
    start: Cursor | None,
) -> Iterator[Chunk]:
    """The documents of all files from `start` on.

    Raises:
        ValueError: while reading, naming the file and the place that cannot be read.
    """
    first = 0 if start is None else start["file"]
    for number in range(first, len(files)):
        name, path = files[number]
        within = start if start is not None and number == first else {}
        columns = text_column, id_column
        if path.name.endswith(".parquet"):
            yield from _read_parquet(path, name, number, *columns, within)
        else:
            yield from _read_jsonl(path, name, number, *columns, max_line_bytes, within)


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


class SourceInterrupted(Interrupted):
    """A remote source stopped answering: another attempt may go on from there."""


@contextmanager
def reading(
    where: str,
    remedy: str,
    fault: type[ValueError] = ValueError,
    wrong: tuple[type[Exception], ...] = (),
) -> Iterator[None]:
    """Inside, any failure becomes a `fault` that names the place; one of the `wrong` a plain `ValueError`."""
    try:
        yield
    except Exception as failure:
        message = " ".join(str(failure).split())
        kind = ValueError if isinstance(failure, wrong) else fault
        raise kind(f"{where}: cannot be read ({message}); {remedy}") from failure


def guarded(
    items: Iterable[_T], where: str, remedy: str, fault: type[ValueError] = ValueError
) -> Iterator[_T]:
    """`items`, each of them produced under `reading`."""
    iterator = iter(items)
    while True:
        with reading(where, remedy, fault):
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
    kind = file.schema_arrow.field(column).type
    kind = kind.value_type if types.is_dictionary(kind) else kind
    if not (types.is_string(kind) or types.is_large_string(kind) or types.is_string_view(kind)):
        raise ValueError(f"{path}: column '{column}' holds {kind}, not text; set data.text_column")
    return file


def _read_parquet(
    path: Path, name: str, number: int, text_column: str, id_column: str, start: Cursor
) -> Iterator[ParquetChunk]:
    file = _open_parquet(path, text_column)
    columns = [text_column] + [id_column] * (
        id_column in file.schema_arrow.names and id_column != text_column
    )
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
            for piece in _pieces(fresh.select(columns), text_column):
                first, row = row + 1, row + piece.num_rows
                after = {"file": number, "row": row}
                yield ParquetChunk(_arrow_stream(piece), name, first, text_column, after)


def _pieces(batch: "pyarrow.RecordBatch", column: str) -> Iterator["pyarrow.RecordBatch"]:
    """Cut a batch after each document that completes `CHUNK_BYTES` of text."""
    import numpy as np
    import pyarrow
    from pyarrow import compute, types

    texts = batch.column(column)
    texts = texts.dictionary_decode() if types.is_dictionary(texts.type) else texts
    texts = texts.cast(pyarrow.large_string()) if types.is_string_view(texts.type) else texts
    # Of a dictionary or of views each piece would carry all the text.
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
    path: Path,
    name: str,
    number: int,
    text_column: str,
    id_column: str,
    max_line_bytes: int,
    start: Cursor,
) -> Iterator[JsonChunk]:
    remedy = "fetch the file again or remove it"
    line = start.get("line", 0)
    with reading(str(path), remedy):
        packed = path.suffix == ".gz"
        if packed and not path.stat().st_size:  # to gzip no fault: a file of no streams
            raise EOFError("it has no bytes, as a download that was cut short")
        opened = gzip.open(path, "rb") if packed else path.open("rb")
    with opened as file:
        with reading(str(path), remedy):
            # Decompresses what lies before the offset once more; a plain file jumps there.
            file.seek(start.get("offset", 0))
        blocks = iter(lambda: _read_lines(file, max_line_bytes), [])
        for lines in guarded(blocks, str(path), remedy):
            first, line = line + 1, line + len(lines)
            after = {"file": number, "offset": file.tell(), "line": line}
            yield JsonChunk(lines, str(path), name, first, text_column, id_column, max_line_bytes, after)
            if len(lines[-1]) > max_line_bytes and not lines[-1].endswith(b"\n"):
                return  # only its beginning was read; the chunk refuses it


def _read_lines(file: IO[bytes], max_line_bytes: int) -> list[bytes]:
    """Lines of about `CHUNK_BYTES` together; at the end of the file none.

    Of a line that is too long the last one holds the first `max_line_bytes + 1` bytes: a small archive may
    hold one that would fill the memory.
    """
    lines: list[bytes] = []
    size = 0
    while size < CHUNK_BYTES and (line := file.readline(max_line_bytes + 1)):
        lines.append(line)
        size += len(line)
        if len(line) > max_line_bytes:
            break
    return lines
