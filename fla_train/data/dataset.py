"""Fixed-length token sequences from prepared shards, in an order that is a pure function of (seed, index)."""

from bisect import bisect_right
from pathlib import Path

import numpy as np
import torch

from fla_train.data.shards import Record, Shard, read_manifest
from fla_train.utils.permutation import permute


class TokenStream:
    """The tokens of a split from its first shard to its last, and the ends of its documents.

    Args:
        folder: of the shards.
        dtype: of tokens.
        records: descriptions of the shards; more can be added.
    """

    def __init__(self, folder: Path, split: str, dtype: str, records: list[Record]):
        self._folder, self._split, self._dtype = folder, split, dtype
        self._records: list[Record] = []
        self._starts = [0]  # first token of each shard, and the end
        self._shards: dict[int, Shard] = {}
        self._ends: dict[int, np.ndarray] = {}
        for record in records:
            self.add(record)

    def __len__(self) -> int:
        """Return the number of tokens so far."""
        return self._starts[-1]

    @property
    def shards(self) -> int:
        """Return the number of shards so far."""
        return len(self._records)

    def add(self, record: Record) -> None:
        """Add the next shard."""
        self._records.append(record)
        self._starts.append(self._starts[-1] + record[self._split]["tokens"])

    def read(self, start: int, out: np.ndarray) -> None:
        """Fill `out` with the tokens from `start` on. Raises `ValueError` for a damaged shard."""
        filled, number = 0, bisect_right(self._starts, start) - 1
        while filled < len(out):
            offset = start + filled - self._starts[number]
            piece = self._shard(number).tokens(offset, offset + len(out) - filled)
            out[filled : filled + len(piece)] = piece
            filled, number = filled + len(piece), number + 1

    def document_starts(self, start: int, length: int) -> np.ndarray:
        """Return where documents begin in `length` tokens from `start` on: ascending int64 in (0, length)."""
        starts = []
        number = bisect_right(self._starts, start) - 1
        while number < len(self._records) and self._starts[number] < start + length:
            if number not in self._ends:
                self._ends[number] = self._shard(number).ends().astype(np.int64) + self._starts[number]
            first, last = self._ends[number].searchsorted([start + 1, start + length])
            starts.append(self._ends[number][first:last] - start)
            number += 1
        return np.concatenate(starts)

    def _shard(self, number: int) -> Shard:
        if number not in self._shards:
            record = self._records[number]
            self._shards[number] = Shard(self._folder, number, record, self._split, self._dtype)
        return self._shards[number]


class TokenDataset:
    """A split's token stream, cut into consecutive, non-overlapping sequences; a shorter tail is left out.

    Index `i` is position `i % len` of epoch `i // len`; `seed` gives each epoch another order. With
    `seed=None` the order is that of the stream.

    Args:
        folder: a prepared folder (`PreparedData.folder`).
        split: "train" or "validation".
        seq_len: tokens per sequence.

    Raises:
        ValueError: the manifest is corrupt, or no sequence fits; while reading, a shard is lost or damaged.
    """

    def __init__(self, folder: str | Path, split: str, seq_len: int, seed: int | None = None):
        self.folder, self.split, self.seq_len, self.seed = Path(folder), split, seq_len, seed
        manifest = read_manifest(self.folder)
        self._tokens = TokenStream(self.folder, split, manifest["dtype"], manifest["shards"])
        self._len = len(self._tokens) // seq_len
        if self._len == 0:
            raise ValueError(f"{self.folder}: {split} is below a sequence: lower trainer.seq_len={seq_len}")

    def __len__(self) -> int:
        """Return the number of sequences per epoch."""
        return self._len

    def sequences(self, indices: np.ndarray) -> torch.Tensor:
        """Return sequences `indices` (int64, >= 0, any epoch): [n, seq_len] int64."""
        out = np.empty((len(indices), self.seq_len), dtype=np.int64)
        for row, first in zip(out, self._first_tokens(indices), strict=True):
            self._tokens.read(first, row)
        return torch.from_numpy(out)

    def boundaries(self, indices: np.ndarray) -> list[np.ndarray]:
        """Return where in (0, seq_len) each sequence's new documents begin: ascending int64."""
        return [self._tokens.document_starts(i, self.seq_len) for i in self._first_tokens(indices)]

    def begins_document(self, indices: np.ndarray) -> np.ndarray:
        """Return whether a document begins with each sequence's first token: [n] bool."""
        firsts = self._first_tokens(indices)
        return np.array([i == 0 or len(self._tokens.document_starts(i - 1, 2)) > 0 for i in firsts])

    def _first_tokens(self, indices: np.ndarray) -> list[int]:
        """Return where in the stream each sequence begins, in tokens."""
        return (self.positions(indices) * self.seq_len).tolist()

    def positions(self, indices: np.ndarray) -> np.ndarray:
        """Return the sequence of the stream that each index stands for: [n] int64."""
        epochs, within = np.divmod(np.asarray(indices, dtype=np.int64), self._len)
        if self.seed is None:
            return within
        out = np.empty_like(within)
        for epoch in np.unique(epochs):
            chosen = epochs == epoch
            out[chosen] = permute(within[chosen], self._len, self.seed, int(epoch))
        return out
