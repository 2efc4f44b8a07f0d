"""Training straight from a source: tokenized as it is read, nothing prepared but a validation split.

Sequence i holds tokens [i T, (i + 1) T) of the training documents in the source's order; there is no shuffle,
because a shuffle buffer cannot be resumed. Every rank reads and tokenizes the whole stream and keeps its
share, so the sequences do not depend on the number of ranks.

While reading, places in the source are noted in `stream-index.jsonl` beside the manifest: the token a chunk
begins at, where to open the source, and a hash of the chunk's tokens. A resumed run opens the source at the
last note before its position and compares the hash, so it sees the same tokens or an error, never others.
Without the file it reads from the beginning: slower, and the same.
"""

import fcntl
import hashlib
import json
import math
import os
from bisect import bisect_right
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple, TextIO

import numpy as np
import torch

from fla_train.data.chunks import Cursor
from fla_train.data.config import DataConfig, TokenizerConfig, cache_folder
from fla_train.data.lock import Log, locked
from fla_train.data.prepared import PreparedData, open_prepared
from fla_train.data.shards import FORMAT, read_manifest, write_manifest
from fla_train.data.sources import hub_commit, is_on_hub, open_source
from fla_train.data.tokenizers import make_encoder
from fla_train.data.workers import encode_all

INDEX = "stream-index.jsonl"
_SPACING = 1 << 20  # tokens between two notes, at least


class Note(NamedTuple):
    """A place in the stream: its `token` is the first of the chunk behind `cursor` (None: the beginning)."""

    token: int
    cursor: Cursor | None
    digest: str  # of that chunk's training tokens


class StreamSequences:
    """The stream's sequences, held in memory only from the lowest index of the newest request on.

    Indices may ask for anything; going back, or on by far, opens the source anew at the nearest note.

    Args:
        folder: what `prepare_stream` returned.

    Raises:
        ValueError: while reading: what the source raises, and a stream that has changed since it was noted.
    """

    def __init__(self, folder: str | Path, seq_len: int):
        self.folder, self.seq_len = Path(folder), seq_len
        manifest = read_manifest(self.folder)
        settings = manifest["settings"]
        self._config = DataConfig(**settings | {"tokenizer": TokenizerConfig(**settings["tokenizer"])})
        head = open_prepared(self.folder.with_name(manifest["head"]))
        self._encoder = make_encoder(
            head.tokenizer(), head.folder / "tokenizer", self._config, manifest["dtype"]
        )
        self._commit: str | None = manifest.get("commit")
        # Of the text that is read: a cache that was prepared anew may hold another commit's notes.
        notes = (n for n in read_notes(self.folder / INDEX) if (n.cursor or {}).get("commit") == self._commit)
        self._notes = [Note(0, None, ""), *notes]
        self._writer = _IndexWriter(self.folder / INDEX)
        self._open(self._notes[0])

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
        """Hold the tokens from the lowest index to the end of the highest."""
        first, last = int(min(indices)) * self.seq_len, (int(max(indices)) + 1) * self.seq_len
        nearest = self._notes[bisect_right(self._notes, first, key=lambda note: note.token) - 1]
        if first < self._first or nearest.token > self._end:
            self._open(nearest)
        while self._end < last:
            next(self._reader)
            while len(self._held) > 1 and self._first + len(self._held[0]) <= first:
                self._first += len(self._held.pop(0))
                self._ends.pop(0)

    def _open(self, note: Note) -> None:
        """Read from there on."""
        self._held = [np.empty(0, dtype=self._encoder.dtype)]  # tokens [_first, _end), chunk by chunk
        self._ends = [np.empty(0, dtype=np.int64)]  # where their documents end in the stream
        self._first = self._end = note.token
        self._reader = self._chunks(note)

    def _chunks(self, note: Note) -> Iterator[None]:
        """Append chunk after chunk, epoch after epoch."""
        cursor, expected = note.cursor, note.digest
        while True:
            began, whole = self._end, cursor is None
            source = open_source(self._config, self._commit)
            for piece in encode_all(self._encoder, source.chunks(cursor), self._config.num_workers or 0):
                if piece.fault is not None:
                    raise ValueError(piece.fault)
                keep = ~piece.held_out & (piece.sizes > 0)
                tokens = piece.tokens[np.repeat(keep, piece.lengths)]
                digest = hashlib.sha256(tokens.astype("<u4")).hexdigest()[:16]
                if expected and digest != expected:
                    raise ValueError(
                        f"the stream is not what it was at token {note.token:,} when it was first read: pin "
                        "data.revision, keep the version of datasets, or begin another run"
                    )
                expected = ""
                self._note(Note(self._end, cursor, digest))
                self._held.append(tokens)
                self._ends.append(self._end + np.cumsum(piece.lengths[keep]))
                self._end += len(tokens)
                cursor = piece.after
                yield
            if whole and self._end == began:
                raise ValueError("the stream has no training document; see data.path")
            cursor = None

    def _note(self, note: Note) -> None:
        if note.token >= self._notes[-1].token + _SPACING:
            self._notes.append(note)
            self._writer.append(note)


class _IndexWriter:
    """Appends notes to the index, in one of the processes that read the stream."""

    def __init__(self, path: Path):
        self._path = path
        self._file: TextIO | None = None
        self._mine = True

    def append(self, note: Note) -> None:
        if not self._mine:
            return
        try:
            if self._file is None:
                self._file = self._path.open("a")
                fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self._file.write(json.dumps(note._asdict()) + "\n")
            self._file.flush()
        except OSError:  # another process notes the same, or the disk is full: a resume reads more then
            self._mine = False


def read_notes(path: Path) -> list[Note]:
    """The notes of an index in order; a line that is none, such as one cut short by a kill, is left out."""
    notes = []
    for line in path.read_bytes().splitlines() if path.is_file() else []:
        try:
            note = Note(**json.loads(line))
        except (ValueError, TypeError):
            continue
        if (
            isinstance(note.token, int)
            and isinstance(note.cursor, dict | None)
            and isinstance(note.digest, str)
        ):
            notes.append(note)
    return sorted(notes, key=lambda note: note.token)


def head_config(config: DataConfig) -> DataConfig:
    """The settings of the preparation of a stream's first documents."""
    return replace(config, stream=False, max_documents=config.stream_head_documents)


def stream_folder(config: DataConfig, head: PreparedData) -> Path:
    content = json.dumps({"head": head.folder.name, "stream": True})
    return cache_folder(config) / hashlib.sha256(content.encode()).hexdigest()[:16]


def prepare_stream(
    config: DataConfig, prepare: Callable[[DataConfig], PreparedData], commit: str | None, log: Log
) -> PreparedData:
    """A folder to train from: the manifest, and a preparation of the source's first documents beside it.

    The held-out documents among those first `stream_head_documents` are the validation split, and a bpe
    tokenizer is trained on the others. The stream is read from the head's commit, in every epoch and by every
    rank, whatever the Hub's branch points to by then.

    Args:
        commit: to be read with a head from before commits were kept; None: that of now.
    """
    head = prepare(head_config(config))
    if "commit" in head.manifest or not is_on_hub(config):
        commit = head.manifest.get("commit")
    else:
        commit = commit or hub_commit(config)
    # The head may have been prepared when the same text lay elsewhere.
    settings = head.manifest["settings"] | {"max_documents": None, "path": config.path}
    settings["max_line_bytes"] = config.max_line_bytes  # of reading, which goes on while it trains
    folder = stream_folder(config, head)
    unknown = dict.fromkeys(("documents", "text_bytes", "unigram_entropy"))
    train = unknown | {"tokens": math.inf, "shards": []}
    manifest: dict[str, Any] = {
        "format": FORMAT,
        "fingerprint": folder.name,
        "settings": settings,
        "source": head.manifest["source"],
        "head": head.folder.name,
        "dtype": head.manifest["dtype"],
        "tokenizer": head.manifest["tokenizer"],
        "splits": {"train": train, "validation": head.manifest["splits"]["validation"]},
    }
    if commit is not None:
        manifest["commit"] = commit
    # All machines of a run, and all runs of a sweep, come here at once.
    with locked(folder.with_name(f".{folder.name}.lock"), log):
        folder.mkdir(exist_ok=True)
        if not (folder / "tokenizer").exists():
            os.symlink(Path("..") / head.folder.name / "tokenizer", folder / "tokenizer")
        write_manifest(folder, manifest)
    return open_prepared(folder)
