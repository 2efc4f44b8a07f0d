"""Chunks: consecutive documents as read and not yet parsed, cheap to hand to another process.

This module and those it imports stay light (no torch, no transformers): every tokenizing process loads them.
"""

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol, TypedDict

CHUNK_BYTES = 1 << 19  # text in a chunk, about: a fifth of a second of tokenization

# Where reading goes on, JSON-able; the reader that made it understands it.
Cursor = dict[str, Any]


class Document(TypedDict):
    """One text and a name for it that a person can look up (used in error messages)."""

    text: str
    id: str


class Chunk(Protocol):
    """Documents in the source's order; `after` is the place behind them."""

    after: Cursor

    def documents(self) -> Iterator[Document]:
        """Parse. Raises `ValueError` naming the place of what is no document."""
        ...


@dataclass(frozen=True)
class TextChunk:
    """Documents that reading has parsed already."""

    texts: list[Document]
    after: Cursor

    def documents(self) -> Iterator[Document]:
        return iter(self.texts)


@dataclass(frozen=True)
class ParquetChunk:
    """Rows of a parquet file: an Arrow stream of the text column and, if there is one, the id column."""

    stream: bytes
    name: str
    first_row: int  # counted from 1 within the file
    text_column: str
    after: Cursor

    def documents(self) -> Iterator[Document]:
        import pyarrow

        table = pyarrow.ipc.open_stream(self.stream).read_all()
        texts = table.column(0).to_pylist()
        ids = table.column(1).to_pylist() if table.num_columns > 1 else [None] * len(texts)
        for row, (text, identity) in enumerate(zip(texts, ids, strict=True), start=self.first_row):
            yield make_document(text, identity, f"{self.name} row {row}", self.text_column)


@dataclass(frozen=True)
class JsonChunk:
    """Lines of a JSON-lines file."""

    lines: list[bytes]
    path: str
    name: str
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
            if len(line.rstrip(b"\n")) > self.max_line_bytes:
                limit = f"{self.max_line_bytes:,} bytes (data.max_line_bytes)"
                raise ValueError(f"{where}: longer than {limit}; split or remove it")
            try:
                record = json.loads(line)
            except (ValueError, RecursionError) as failure:
                raise ValueError(f"{where}: not JSON ({failure}); {remedy}") from failure
            if not isinstance(record, dict):
                raise ValueError(f"{where}: not a JSON object; {remedy}")
            require_column(where, self.text_column, record)
            place = f"{self.name} line {number}"
            yield make_document(record[self.text_column], record.get(self.id_column), place, self.text_column)


def make_document(text: object, identity: object, place: str, column: str) -> Document:
    """A null text counts as empty (preparing leaves empty documents out and counts them)."""
    if not isinstance(text, str | None):
        raise ValueError(f"{place}: '{column}' is {type(text).__name__}, not text; set data.text_column")
    return {"text": text or "", "id": place if identity is None else str(identity)}


def require_column(where: object, column: str, names: Iterable[str]) -> None:
    """Raise `ValueError` if `names` lacks the column."""
    if column not in names:
        raise ValueError(f"{where}: no column '{column}' (it has {', '.join(names)}); set data.text_column")
