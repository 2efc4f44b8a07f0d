"""Streaming dataset: tokenize a source while training; only a validation shard is prepared.

Sequence i holds tokens [i T, (i + 1) T) of the training documents in the source's order. There is no shuffle,
because a shuffle buffer cannot be resumed. Every rank reads and tokenizes the whole stream and keeps its
share, so the sequences do not depend on the number of ranks.

While reading, positions are recorded in `stream-index.jsonl` beside the manifest: the first token of a chunk,
the cursor to open the source at, and a hash of the chunk's tokens. A resumed run opens the source at the last
record before its position and compares the hash, so it reads the same tokens or raises an error. Without the
file it reads from the beginning, which takes longer.
"""

import fcntl
import hashlib
import json
from bisect import bisect_right
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple, TextIO

import numpy as np
import torch

from fla_train.data.cache import open_prepared
from fla_train.data.config import DataConfig, TokenizerConfig
from fla_train.data.files import Cursor
from fla_train.data.sources import open_source
from fla_train.data.tokenize import encode_all, make_encoder

INDEX = "stream-index.jsonl"
SPACING = 1 << 20  # tokens between two records, at least


class Record(NamedTuple):
    """A position in the stream: `token` is the first of the chunk behind `cursor` (None: the beginning)."""

    token: int
    cursor: Cursor | None
    digest: str  # of that chunk's training tokens


class StreamDataset:
    """The stream's sequences. Memory holds those from the lowest index of the last request on.

    Any index may be read; going back, or far ahead, opens the source again at the nearest record.

    Args:
        folder: of a stream (`prepare` with `data.stream=true`).

    Raises:
        ValueError: while reading: as the source, or if the text is not what was prepared or recorded.
    """

    def __init__(self, folder: str | Path, seq_len: int):
        self.folder, self.seq_len = Path(folder), seq_len
        manifest = open_prepared(self.folder).manifest
        settings = manifest["settings"]
        self._config = DataConfig(**settings | {"tokenizer": TokenizerConfig(**settings["tokenizer"])})
        shard = open_prepared(self.folder.with_name(manifest["head"]))
        self._encoder = make_encoder(
            shard.tokenizer(), shard.folder / "tokenizer", self._config, manifest["dtype"]
        )
        self._source: dict[str, Any] = manifest["source"]
        self._commit: str | None = manifest.get("commit")
        # A cache that was prepared again may hold records of another commit.
        records = [
            r for r in read_index(self.folder / INDEX) if (r.cursor or {}).get("commit") == self._commit
        ]
        self._records = [Record(0, None, ""), *records]
        self._writer = IndexWriter(self.folder / INDEX)
        self._open(self._records[0])

    def __len__(self) -> int:
        raise TypeError("a stream has no length")

    def sequences(self, indices: np.ndarray) -> torch.Tensor:
        """Sequences `indices` (int64, >= 0). Returns [n, seq_len] int64."""
        self._read(indices)
        whole = np.concatenate(self._held)
        offsets = np.asarray(indices, dtype=np.int64) * self.seq_len - self._first
        rows = np.stack([whole[offset : offset + self.seq_len] for offset in offsets])
        return torch.from_numpy(rows.astype(np.int64))

    def boundaries(self, indices: np.ndarray) -> list[np.ndarray]:
        """For each sequence, where in (0, seq_len) a new document begins: ascending int64."""
        self._read(indices)
        ends = np.unique(np.concatenate(self._ends))
        starts = np.asarray(indices, dtype=np.int64)[:, None] * self.seq_len + [[1, self.seq_len]]
        bounds = np.searchsorted(ends, starts)
        return [ends[a:b] - first + 1 for (a, b), (first, _) in zip(bounds, starts, strict=True)]

    def _read(self, indices: np.ndarray) -> None:
        """Read the tokens from the lowest index to the end of the highest into memory."""
        first, last = int(min(indices)) * self.seq_len, (int(max(indices)) + 1) * self.seq_len
        nearest = self._records[bisect_right(self._records, first, key=lambda record: record.token) - 1]
        if first < self._first or nearest.token > self._end:
            self._open(nearest)
        while self._end < last:
            next(self._reader)
            while len(self._held) > 1 and self._first + len(self._held[0]) <= first:
                self._first += len(self._held.pop(0))
                self._ends.pop(0)

    def _open(self, record: Record) -> None:
        """Start reading at `record`."""
        self._held = [np.empty(0, dtype=self._encoder.dtype)]  # tokens [_first, _end), chunk by chunk
        self._ends = [np.empty(0, dtype=np.int64)]  # where their documents end in the stream
        self._first = self._end = record.token
        self._reader = self._chunks(record)

    def _chunks(self, record: Record) -> Iterator[None]:
        """Append a chunk at each `next`, epoch after epoch."""
        cursor, expected = record.cursor, record.digest
        while True:
            began, whole = self._end, cursor is None
            source = open_source(self._config, self._commit)
            if source.description != self._source:
                raise ValueError(
                    f"the stream's text has changed since {self.folder} was prepared: put "
                    f"{self._config.path or 'it'} back as it was, or begin another run"
                )
            for piece in encode_all(self._encoder, source.chunks(cursor), self._config.num_workers or 0):
                if piece.error is not None:
                    raise ValueError(piece.error)
                keep = ~piece.held_out & (piece.sizes > 0)
                tokens = piece.tokens[np.repeat(keep, piece.lengths)]
                digest = hashlib.sha256(tokens.astype("<u4")).hexdigest()[:16]
                if expected and digest != expected:
                    raise ValueError(
                        f"the stream is not what it was at token {record.token:,} when it was first read: "
                        "pin data.revision, keep the version of datasets, or begin another run"
                    )
                expected = ""
                self._record(Record(self._end, cursor, digest))
                self._held.append(tokens)
                self._ends.append(self._end + np.cumsum(piece.lengths[keep]))
                self._end += len(tokens)
                cursor = piece.after
                yield
            if whole and self._end == began:
                raise ValueError("the stream has no training document; see data.path")
            cursor = None

    def _record(self, record: Record) -> None:
        if record.token >= self._records[-1].token + SPACING:
            self._records.append(record)
            self._writer.append(record)


class IndexWriter:
    """Appends records to the index, in one of the processes that read the stream."""

    def __init__(self, path: Path):
        self._path = path
        self._file: TextIO | None = None
        self._mine = True

    def append(self, record: Record) -> None:
        """Append, unless another process does or the disk refuses; then a resumed run only reads more."""
        if not self._mine:
            return
        try:
            if self._file is None:
                self._file = self._path.open("a")
                fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self._file.write(json.dumps(record._asdict()) + "\n")
            self._file.flush()
        except OSError:
            self._mine = False


def read_index(path: Path) -> list[Record]:
    """The records of an index in order; an invalid line, such as one cut short by a kill, is left out."""
    records = []
    for line in path.read_bytes().splitlines() if path.is_file() else []:
        try:
            record = Record(**json.loads(line))
        except (ValueError, TypeError):
            continue
        if (
            isinstance(record.token, int)
            and isinstance(record.cursor, dict | None)
            and isinstance(record.digest, str)
        ):
            records.append(record)
    return sorted(records, key=lambda record: record.token)
