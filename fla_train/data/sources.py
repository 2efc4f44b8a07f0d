"""Sources of documents: the standard library's own text, parquet and JSON-lines files, `datasets` streams.

A `Source` can be opened any number of times and yields the same documents in the same order each time.
"""

import glob
import gzip
import hashlib
import json
import sysconfig
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypedDict, TypeVar

from fla_train.data.config import DataConfig

if TYPE_CHECKING:
    import pyarrow.parquet

_T = TypeVar("_T")
_ENDINGS = (".parquet", ".jsonl", ".jsonl.gz")
_PROBE = 1 << 16  # bytes at each end of a file that stand for its content


class Document(TypedDict):
    """One text and a name for it that a person can look up (used in error messages)."""

    text: str
    id: str


@dataclass(frozen=True)
class Source:
    """A corpus that can be read.

    Attributes:
        description: JSON-able identity; two sources with equal descriptions hold the same text.
        total_bytes: finds the text bytes to expect, approximately; None when unknown.
        documents: opens the corpus and yields its documents in their fixed order.
    """

    description: dict[str, Any]
    total_bytes: Callable[[], int | None]
    documents: Callable[[], Iterator[Document]]


def open_source(config: DataConfig) -> Source:
    """The source that `config` names.

    Raises:
        ValueError: if it does not exist or lacks the text column; reading raises it too, for corrupt input.
    """
    match config.source:
        case "stdlib":
            return _stdlib()
        case "local":
            return _local(config)
        case "hub":
            return _hub(config)
    raise ValueError(f"data.source={config.source} is none of stdlib, local, hub")


# ---- the running Python's standard library


def _stdlib() -> Source:
    root = Path(sysconfig.get_path("stdlib"))
    documents: list[Document] = []
    digest = hashlib.sha256()
    for path in sorted(root.rglob("*.py")):
        name = path.relative_to(root).as_posix()
        if "site-packages" in name or "dist-packages" in name:
            continue
        try:
            text = path.read_bytes().decode("utf-8")
        except UnicodeDecodeError:  # a few of the library's own tests are broken on purpose
            continue
        documents.append({"text": text, "id": name})
        digest.update(f"{name}\0{len(text)}\0{text}".encode())
    if not documents:
        raise ValueError(
            f"no .py files in {root}; install Python's standard library as sources, or use data=local"
        )
    description = {"kind": "stdlib", "files": len(documents), "sha256": digest.hexdigest()}
    size = sum(len(d["text"]) for d in documents)
    return Source(description, lambda: size, lambda: iter(documents))


# ---- parquet and JSON lines


def _local(config: DataConfig) -> Source:
    assert config.path
    files = find_files(config.path)
    description = {
        "kind": "local",
        "text_column": config.text_column,
        "files": [{"name": name, "bytes": f.stat().st_size, "ends": _ends(f)} for name, f in files],
    }

    def documents() -> Iterator[Document]:
        for name, path in files:
            read = _read_parquet if path.name.endswith(".parquet") else _read_jsonl
            yield from read(path, name, config.text_column, config.id_column)

    return Source(description, lambda: _text_bytes([f for _, f in files], config.text_column), documents)


def find_files(path: str) -> list[tuple[str, Path]]:
    """(name, file) of every corpus file behind a file, folder (recursive) or glob, sorted by name.

    Raises:
        ValueError: if there are none.
    """
    root = Path(path).expanduser()
    if root.is_file():
        candidates = [root]
    elif root.is_dir():
        candidates = [f for f in root.rglob("*") if f.is_file()]
    else:
        candidates = [Path(f) for f in glob.glob(str(root), recursive=True) if Path(f).is_file()]
    base = root if root.is_dir() else None
    named = sorted(
        (f.relative_to(base).as_posix() if base else f.name, f)
        for f in candidates
        if f.name.endswith(_ENDINGS)
    )
    if not named:
        what = "no such file or folder" if not candidates else f"no file ending in {', '.join(_ENDINGS)}"
        raise ValueError(f"data.path={path}: {what}; give a file, a folder or a quoted glob")
    return named


def _ends(path: Path) -> str:
    """sha256 of a file's first and last 64 KiB: tells changed files apart without reading terabytes."""
    size = path.stat().st_size
    with path.open("rb") as file:
        digest = hashlib.sha256(file.read(_PROBE))
        if size > _PROBE:
            file.seek(max(_PROBE, size - _PROBE))
            digest.update(file.read())
    return digest.hexdigest()


def _text_bytes(files: list[Path], column: str) -> int | None:
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


def _open_parquet(path: Path, column: str) -> "pyarrow.parquet.ParquetFile":
    from pyarrow import parquet, types

    try:
        file = parquet.ParquetFile(path)
    except Exception as failure:
        raise ValueError(
            f"{path}: not a readable parquet file ({failure}); fetch it again or remove it"
        ) from failure
    _require_column(path, column, file.schema_arrow.names)
    kind = file.schema_arrow.field(column).type
    kind = kind.value_type if types.is_dictionary(kind) else kind
    if not (types.is_string(kind) or types.is_large_string(kind)):
        raise ValueError(f"{path}: column '{column}' holds {kind}, not text; set data.text_column")
    return file


def _require_column(where: object, column: str, names: Iterable[str]) -> None:
    if column not in names:
        raise ValueError(f"{where}: no column '{column}' (it has {', '.join(names)}); set data.text_column")


def _read_parquet(path: Path, name: str, text_column: str, id_column: str) -> Iterator[Document]:
    file = _open_parquet(path, text_column)
    columns = [text_column] + [id_column] * (id_column in file.schema_arrow.names)
    row = 0
    for group in range(file.num_row_groups):
        batches = file.iter_batches(batch_size=1024, row_groups=[group], columns=columns)
        for batch in _guarded(batches, f"{path}, row group {group}", "fetch the file again or remove it"):
            texts = batch.column(text_column).to_pylist()
            ids = batch.column(id_column).to_pylist() if len(columns) > 1 else [None] * len(texts)
            for text, identity in zip(texts, ids, strict=True):
                row += 1
                yield _document(text, identity, f"{name} row {row}", text_column)


def _read_jsonl(path: Path, name: str, text_column: str, id_column: str) -> Iterator[Document]:
    remedy = "repair or remove the line, or fetch the file again"
    with gzip.open(path, "rb") if path.suffix == ".gz" else path.open("rb") as file:
        for number, line in enumerate(
            _guarded(file, str(path), "fetch the file again or remove it"), start=1
        ):
            if not line.strip():
                continue
            where = f"{path}, line {number}"
            try:
                record = json.loads(line)
            except ValueError as failure:
                raise ValueError(f"{where}: not JSON ({failure}); {remedy}") from failure
            if not isinstance(record, dict):
                raise ValueError(f"{where}: not a JSON object; {remedy}")
            _require_column(where, text_column, record)
            yield _document(record[text_column], record.get(id_column), f"{name} line {number}", text_column)


def _guarded(items: Iterable[_T], where: str, remedy: str) -> Iterator[_T]:
    """`items`, with any failure to produce the next one turned into a `ValueError` that names the place."""
    iterator = iter(items)
    while True:
        try:
            item = next(iterator)
        except StopIteration:
            return
        except Exception as failure:
            message = " ".join(str(failure).split())
            raise ValueError(f"{where}: cannot be read ({message}); {remedy}") from failure
        yield item


def _document(text: object, identity: object, place: str, column: str) -> Document:
    """A null text counts as empty (prepare leaves empty documents out and counts them)."""
    if not isinstance(text, str | None):
        raise ValueError(f"{place}: '{column}' is {type(text).__name__}, not text; set data.text_column")
    return {"text": text or "", "id": place if identity is None else str(identity)}


# ---- datasets


def _hub(config: DataConfig) -> Source:
    assert config.path
    description = {
        "kind": "hub",
        "path": config.path,
        "name": config.name,
        "revision": config.revision,
        "split": config.split,
        "text_column": config.text_column,
    }
    if Path(config.path).expanduser().is_dir():  # a local mirror: its content decides, not where it lies
        local = _local(config).description
        description |= {"path": None, "files": local["files"]}
    return Source(description, lambda: None, lambda: _stream(config))


def _stream(config: DataConfig) -> Iterator[Document]:
    import datasets

    def records() -> Iterator[dict[str, Any]]:
        # In here, so that a failure to find the dataset is reported like one to read it.
        yield from datasets.load_dataset(
            config.path, name=config.name, split=config.split, revision=config.revision, streaming=True
        )

    where = (
        f"dataset {config.path}" + (f" ({config.name})" if config.name else "") + f", split {config.split}"
    )
    remedy = "check data.path, data.name, data.split and the network, or point data.path at a local copy"
    for row, record in enumerate(_guarded(records(), where, remedy)):
        _require_column(where, config.text_column, record)
        place = f"{where}, row {row}"
        yield _document(record[config.text_column], record.get(config.id_column), place, config.text_column)
