"""Fixed-length token sequences from prepared shards, in an order that is a pure function of (seed, index)."""

import hashlib
from bisect import bisect_right
from functools import lru_cache
from itertools import accumulate
from pathlib import Path
from typing import Protocol

import numpy as np
import torch

from fla_train.data import shards

_ROUNDS = 8  # of the Feistel network


class Dataset(Protocol):
    """A map-style dataset. Sequence i is the same on any rank, in any batch and after any resume."""

    def __len__(self) -> int:
        """Sequences per epoch."""
        ...

    def sequences(self, indices: np.ndarray) -> torch.Tensor:
        """Sequences `indices` (int64, >= 0). Returns [n, seq_len] int64."""
        ...

    def boundaries(self, indices: np.ndarray) -> list[np.ndarray]:
        """For each sequence, where in (0, seq_len) a new document begins: ascending int64."""
        ...


class TokenDataset:
    """A split's token stream, cut into consecutive, non-overlapping sequences; a shorter tail is left out.

    Index `i` is position `i % len` of epoch `i // len`; `seed` gives each epoch another order. With
    `seed=None` the order is that of the stream.

    Args:
        folder: a prepared folder (`PreparedData.folder`).
        split: "train" or "validation".
        seq_len: tokens per sequence.

    Raises:
        ValueError: if the manifest is corrupt, a shard is missing or cut short, or no sequence fits; while
            reading, if a block of a shard differs from what was written.
    """

    def __init__(self, folder: str | Path, split: str, seq_len: int, seed: int | None = None):
        self.folder = Path(folder)
        self.split = split
        self.seq_len = seq_len
        self.seed = seed
        manifest = shards.read_manifest(self.folder)
        if split not in manifest["splits"]:
            raise ValueError(f"{self.folder} has no split '{split}'; it has {', '.join(manifest['splits'])}")
        shards.check_sizes(self.folder, manifest, split)
        entry = manifest["splits"][split]
        self._dtype = np.dtype(manifest["dtype"]).newbyteorder("<")
        # [shards + 1] where each shard begins in the stream
        self._starts = list(accumulate((shard["tokens"] for shard in entry["shards"]), initial=0))
        self._len = entry["tokens"] // seq_len
        if self._len == 0:
            raise ValueError(
                f"the {split} split of {self.folder} has {entry['tokens']} tokens, fewer than one sequence "
                f"of {seq_len}; use shorter sequences, more data or another data.validation_fraction"
            )
        self._shards = entry["shards"]
        self._files: dict[int, shards.CheckedFile] = {}  # tokens by shard
        self._ends: dict[int, np.ndarray] = {}

    def __len__(self) -> int:
        """Sequences per epoch."""
        return self._len

    def sequences(self, indices: np.ndarray) -> torch.Tensor:
        """Sequences `indices` (int64, >= 0, any epoch). Returns [n, seq_len] int64."""
        out = np.empty((len(indices), self.seq_len), dtype=np.int64)
        for row, position in zip(out, self.positions(indices), strict=True):
            self._read(int(position) * self.seq_len, row)
        return torch.from_numpy(out)

    def boundaries(self, indices: np.ndarray) -> list[np.ndarray]:
        """For each sequence, where in (0, seq_len) a new document begins: ascending int64."""
        return [self._document_starts(int(position) * self.seq_len) for position in self.positions(indices)]

    def begins_document(self, indices: np.ndarray) -> np.ndarray:
        """[n] bool: whether a document begins with a sequence's first token."""
        firsts = (int(position) * self.seq_len for position in self.positions(indices))
        return np.array([first == 0 or 1 in self._document_starts(first - 1) for first in firsts])

    def positions(self, indices: np.ndarray) -> np.ndarray:
        """[n] int64: the sequence of the stream that each index stands for."""
        epochs, within = np.divmod(np.asarray(indices, dtype=np.int64), self._len)
        if self.seed is None:
            return within
        out = np.empty_like(within)
        for epoch in np.unique(epochs):
            chosen = epochs == epoch
            out[chosen] = permute(within[chosen], self._len, self.seed, int(epoch))
        return out

    def _read(self, start: int, out: np.ndarray) -> None:
        """Fill `out` with the stream's tokens from `start` on, across shards."""
        filled = 0
        number = self._shard_of(start)
        while filled < len(out):
            offset = start + filled - self._starts[number]
            piece = self._shard(number).read(offset, offset + len(out) - filled)
            out[filled : filled + len(piece)] = piece
            filled += len(piece)
            number += 1

    def _document_starts(self, start: int) -> np.ndarray:
        """Where the documents after the first begin in the `seq_len` tokens from `start` on."""
        found = []
        number = self._shard_of(start)
        while self._starts[number] < start + self.seq_len:
            if number not in self._ends:
                path = self.folder / self.split / shards.documents_file(number)
                file = shards.CheckedFile(path, np.dtype("<u8"), self._shards[number]["documents_sha256"])
                self._ends[number] = file.read(0, len(file))  # all, since a search reads anywhere
            local = start - self._starts[number]
            bounds = np.array([max(local + 1, 0), local + self.seq_len], dtype=np.uint64)
            first, last = self._ends[number].searchsorted(bounds)
            found.append(self._ends[number][first:last].astype(np.int64) - local)
            number += 1
        ends = np.concatenate(found) if len(found) > 1 else found[0]
        fresh = np.ones(len(ends), dtype=bool)
        fresh[1:] = ends[1:] > ends[:-1]  # an empty document ends where the one before it does
        return ends[fresh]

    def _shard_of(self, token: int) -> int:
        """The shard that holds a token of the stream."""
        return bisect_right(self._starts, token) - 1

    def _shard(self, number: int) -> shards.CheckedFile:
        if number not in self._files:
            path = self.folder / self.split / shards.tokens_file(number)
            self._files[number] = shards.CheckedFile(path, self._dtype, self._shards[number]["tokens_sha256"])
        return self._files[number]


def permute(index: np.ndarray, n: int, seed: int, epoch: int = 0) -> np.ndarray:
    """Positions of `index` (int64, each in [0, n)) in a seeded pseudo-random order of one epoch.

    It takes O(1) time an index and no memory: a Feistel network on pairs (left, right) in Z_a x Z_b with
    a b >= n. Each round adds to one half a keyed hash of the other, which is invertible, so the whole is a
    bijection of range(a b). Cycle walking (repeat until the value is below n) restricts it to range(n);
    a b < n + sqrt(n) + 1, so it hardly ever repeats.
    """
    a = int(np.ceil(np.sqrt(n)))
    b = -(-n // a)
    keys = _keys(seed, epoch)
    out = np.asarray(index, dtype=np.uint64).copy()
    outside = np.ones(out.shape, dtype=bool)
    while outside.any():
        out[outside] = _feistel(out[outside], np.uint64(a), np.uint64(b), keys)
        outside = out >= n
    return out.astype(np.int64)


def _feistel(x: np.ndarray, a: np.uint64, b: np.uint64, keys: tuple[np.uint64, ...]) -> np.ndarray:
    left, right = x // b, x % b
    for r, key in enumerate(keys):
        if r % 2:
            right = (right + _mix(left ^ key) % b) % b
        else:
            left = (left + _mix(right ^ key) % a) % a
    return left * b + right


def _mix(x: np.ndarray) -> np.ndarray:
    """The finalizer of SplitMix64 (Steele, Lea and Flood, 2014): each input bit affects all of the output."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


@lru_cache(maxsize=16)
def _keys(seed: int, epoch: int) -> tuple[np.uint64, ...]:
    digest = hashlib.blake2b(f"{seed}/{epoch}".encode(), digest_size=8 * _ROUNDS).digest()
    return tuple(np.frombuffer(digest, dtype="<u8"))
