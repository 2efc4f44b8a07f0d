"""Building a prepared folder, with a journal from which a killed build goes on.

Every few seconds the shards are synced and `progress.json` is replaced by the writers' states and the place
in the source they have reached. Whatever a kill leaves behind that state is cut off, so the finished shards
are those of an undisturbed build, byte for byte, however often it was killed and whatever the number of
tokenizing processes.
"""

import json
import math
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from fla_train.data.chunks import Cursor
from fla_train.data.config import DataConfig
from fla_train.data.encoding import Encoded, Encoder
from fla_train.data.progress import Progress
from fla_train.data.shards import ShardWriter
from fla_train.data.sources import Source
from fla_train.data.workers import encode_all
from fla_train.utils.filesystem import write_whole

PROGRESS = "progress.json"
COMMIT_SECONDS = 10.0  # work that a kill can cost
_SPLITS = ("train", "validation")


class Build:
    """The shards of one preparation, in `folder`, as far as they have come.

    Args:
        description: the source's.
        resumed: what `resume` returned; None: begin.
    """

    def __init__(
        self,
        folder: Path,
        config: DataConfig,
        dtype: str,
        vocab_size: int,
        description: dict[str, Any],
        resumed: dict[str, Any] | None,
    ):
        self._folder, self._config, self._description = folder, config, description
        state = resumed["now"] if resumed else {"cursor": None, "read": 0, "empty": 0, "splits": {}}
        self.cursor: Cursor | None = state["cursor"]
        self.read: int = state["read"]
        self.empty: int = state["empty"]
        self._writers = {
            split: ShardWriter(
                folder / split, dtype, config.shard_tokens, vocab_size, state["splits"].get(split)
            )
            for split in _SPLITS
        }
        self._file_start: dict[str, Any] | None = resumed["file_start"] if resumed else None
        self._writing = False
        self._committed = time.monotonic()

    @property
    def tokens(self) -> int:
        """Of both splits so far."""
        return sum(writer.tokens for writer in self._writers.values())

    def run(self, source: Source, encoder: Encoder, progress: Progress) -> dict[str, dict[str, Any]]:
        """Tokenize what is left of the source; returns the splits' entries of the manifest.

        Raises:
            ValueError: what reading the source raises. The work up to there is committed.
            OSError: the disk is full or gone; the last commit stands.
        """
        progress.start(self._done(progress.unit), self.tokens)
        encoded = encode_all(encoder, source.chunks(self.cursor), self._config.num_workers)
        try:
            ended = self._is_full()
            while not ended and (piece := next(encoded, None)) is not None:
                ended = self._take(piece)
                progress.update(self._done(progress.unit), self.tokens)
                if time.monotonic() - self._committed >= COMMIT_SECONDS:
                    self._commit()
        except BaseException:
            if not self._writing:  # else the writers stand between two chunks
                with suppress(OSError):
                    self._commit()
            for writer in self._writers.values():
                writer.abandon()
            raise
        finally:
            encoded.close()
            progress.close()
        return {split: writer.close() for split, writer in self._writers.items()}

    def _take(self, piece: Encoded) -> bool:
        """Write one chunk's documents up to the caps; returns whether a cap is reached."""
        config, train = self._config, self._writers["train"]
        if self.cursor is not None and piece.after.get("file") != self.cursor.get("file"):
            self._file_start = self._snapshot()
        take = len(piece.lengths)
        if config.max_documents is not None:
            take = min(take, config.max_documents - self.read)
        if config.max_tokens is not None:  # the document that reaches the cap stays whole
            grown = np.cumsum(np.where(piece.held_out, 0, piece.lengths))
            take = min(take, int(np.searchsorted(grown, config.max_tokens - train.tokens)) + 1)
        lengths, sizes, held_out = piece.lengths[:take], piece.sizes[:take], piece.held_out[:take]
        tokens = piece.tokens[: int(lengths.sum())]
        if piece.fault is not None and take == len(piece.lengths) and not self._is_full(piece, take):
            raise ValueError(piece.fault)
        self._writing = True
        for split, writer in self._writers.items():
            chosen = (held_out == (split == "validation")) & (sizes > 0)
            if chosen.any():
                mask = np.repeat(chosen, lengths)
                writer.add(tokens[mask], lengths[chosen], int(sizes[chosen].sum()))
        self.empty += int((sizes == 0).sum())
        self.read += take
        self.cursor = piece.after
        self._writing = False
        return self._is_full()

    def _is_full(self, piece: Encoded | None = None, take: int = 0) -> bool:
        """Whether a cap is reached, if wanted with the first `take` documents of a chunk."""
        config = self._config
        tokens = self._writers["train"].tokens
        if piece is not None:
            tokens += int(piece.lengths[:take][~piece.held_out[:take]].sum())
        return (self.read + take) == config.max_documents or tokens >= (config.max_tokens or math.inf)

    def _done(self, unit: str) -> int:
        """How far it has come, in the unit of the progress: training tokens, documents or text bytes."""
        match unit:
            case "tok":
                return self._writers["train"].tokens
            case "doc":
                return self.read
        return sum(writer.text_bytes for writer in self._writers.values())

    def _snapshot(self) -> dict[str, Any]:
        splits = {split: writer.state() for split, writer in self._writers.items()}
        return {"cursor": self.cursor, "read": self.read, "empty": self.empty, "splits": splits}

    def _commit(self) -> None:
        for writer in self._writers.values():
            writer.sync()
        journal = {"source": self._description, "now": self._snapshot(), "file_start": self._file_start}
        write_whole(self._folder / PROGRESS, json.dumps(journal))
        self._committed = time.monotonic()


def read_journal(folder: Path) -> dict[str, Any] | None:
    """The journal of an unfinished build; None if it never came to a commit.

    It holds the `source`'s description and two snapshots: `now`, and `file_start`, taken where the file now
    being read begins (None in the first one).
    """
    try:
        return json.loads((folder / PROGRESS).read_text())
    except FileNotFoundError:
        return None
    except ValueError as failure:
        raise ValueError(f"{folder / PROGRESS} is corrupt ({failure}); delete {folder}") from failure


def resume(journal: dict[str, Any], description: dict[str, Any]) -> dict[str, Any] | None:
    """The journal, gone back to the latest snapshot of whose text the source still holds all, if any.

    A file that was at fault and has been repaired or removed costs no more than its own documents: the build
    goes back to the snapshot at its beginning.
    """
    if journal["source"] == description:
        return journal
    if journal["source"].get("kind") != "local" or not _same_but_files(journal["source"], description):
        return None
    before, now = journal["source"]["files"], description["files"]
    for state in (journal["now"], journal["file_start"]):
        cursor = state and state["cursor"]  # None also where the first chunk was at fault
        read = cursor["file"] + 1 if cursor else 0  # files this state has taken text from
        if read and before[:read] == now[:read]:
            return journal | {"now": state}
    return None


def _same_but_files(one: dict[str, Any], other: dict[str, Any]) -> bool:
    return one | {"files": None} == other | {"files": None}
