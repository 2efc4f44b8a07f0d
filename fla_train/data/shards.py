"""Token shards on disk: writing them, the manifest that vouches for them, and checking them again.

A split is a folder of pairs: `tokens-00000.bin` (uint16 or uint32, little-endian) and `documents-00000.bin`
(uint64, the end of each document in tokens from the shard's start). Documents never cross a shard. Beside
each file lie its block checksums (`blocks.py`).
"""

import hashlib
import json
import os
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from fla_train.data.blocks import checksums_file, restore_checksums, write_checksums
from fla_train.utils.filesystem import sha256, sync, write_whole

FORMAT = 1
MANIFEST = "manifest.json"


def tokens_file(number: int) -> str:
    return f"tokens-{number:05d}.bin"


def documents_file(number: int) -> str:
    return f"documents-{number:05d}.bin"


class ShardWriter:
    """Writes one split, from the beginning or from where an earlier writer's `state` was.

    Args:
        folder: made if need be.
        state: what an earlier writer returned; whatever it wrote after that is cut off.
    """

    def __init__(
        self,
        folder: Path,
        dtype: str,
        shard_tokens: int,
        vocab_size: int,
        state: dict[str, Any] | None = None,
    ):
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder
        self._dtype = np.dtype(dtype).newbyteorder("<")
        self._shard_tokens = shard_tokens
        state = state or {"documents": 0, "tokens": 0, "text_bytes": 0, "counts": "", "shards": []}
        self.documents: int = state["documents"]
        self.tokens: int = state["tokens"]
        self.text_bytes: int = state["text_bytes"]
        self._shards: list[dict[str, Any]] = list(state["shards"])
        self._counts = np.zeros(vocab_size, dtype=np.int64)
        if state["counts"]:
            self._counts += np.frombuffer(bytes.fromhex(state["counts"]), dtype="<i8")
        self._open_shard()
        self._resume_shard()

    def add(self, tokens: np.ndarray, lengths: np.ndarray, text_bytes: int) -> None:
        """Append documents.

        Args:
            tokens: of all of them in order, separators included.
            lengths: [documents] int64, tokens of each.
            text_bytes: of all of them together.
        """
        self._counts += np.bincount(tokens, minlength=len(self._counts))
        self.documents += len(lengths)
        self.tokens += len(tokens)
        self.text_bytes += text_bytes
        tokens = tokens.astype(self._dtype, copy=False)
        ends = np.cumsum(lengths)
        first = done = 0
        while first < len(ends):
            # The document that fills the shard is its last.
            room = self._shard_tokens - self._size
            stop = min(int(np.searchsorted(ends, done + room)) + 1, len(ends))
            last = int(ends[stop - 1])
            self._append(tokens[done:last], ends[first:stop] - done + self._size)
            first, done = stop, last

    def sync(self) -> None:
        """Have the disk hold everything so far."""
        for file in (self._tokens_file, self._ends_file):
            if file is not None:
                _sync(file)

    def state(self) -> dict[str, Any]:
        """What another writer needs to go on from here, JSON-able; to be kept once `sync` has run."""
        return {
            "documents": self.documents,
            "tokens": self.tokens,
            "text_bytes": self.text_bytes,
            "counts": self._counts.astype("<i8").tobytes().hex(),
            "shards": list(self._shards),
        }

    def close(self) -> dict[str, Any]:
        """Finish the last shard and return the split's entry of the manifest."""
        self._finish_shard()
        return {
            "documents": self.documents,
            "tokens": self.tokens,
            "text_bytes": self.text_bytes,
            "unigram_entropy": unigram_entropy(self._counts),
            "shards": self._shards,
        }

    def abandon(self) -> None:
        """Close the files as they are."""
        for file in (self._tokens_file, self._ends_file):
            if file is not None:
                file.close()

    def _open_shard(self) -> None:
        self._size = self._count = 0  # tokens and documents of the shard
        self._digests = (hashlib.sha256(), hashlib.sha256())
        self._tokens_file: BinaryIO | None = None
        self._ends_file: BinaryIO | None = None

    def _resume_shard(self) -> None:
        """Go on in the shard that the state leaves unfinished; drop all that lies behind it."""
        self._size = self.tokens - sum(shard["tokens"] for shard in self._shards)
        self._count = self.documents - sum(shard["documents"] for shard in self._shards)
        number = len(self._shards)
        kept: dict[str, int] = {}  # name -> bytes
        for n, (tokens, documents) in enumerate(
            [*((s["tokens"], s["documents"]) for s in self._shards), (self._size, self._count)]
        ):
            if documents:
                kept |= {tokens_file(n): tokens * self._dtype.itemsize, documents_file(n): documents * 8}
        present = {path.name: path for path in self._folder.iterdir()}
        for name, size in kept.items():
            if name not in present or present[name].stat().st_size < size:
                remedy = f"delete {self._folder.parent} and run fla-prepare again"
                raise ValueError(f"{self._folder / name} is cut short; {remedy}")
        finished = [name(n) for n in range(number) for name in (tokens_file, documents_file)]
        wanted = kept.keys() | {checksums_file(Path(name)).name for name in finished}
        for name, path in present.items():
            if name not in wanted:
                path.unlink()
        if self._count:
            self._tokens_file, self._ends_file = (
                _reopen(present[name], kept[name], digest)
                for name, digest in zip(
                    (tokens_file(number), documents_file(number)), self._digests, strict=True
                )
            )

    def _append(self, tokens: np.ndarray, ends: np.ndarray) -> None:
        if self._tokens_file is None:
            number = len(self._shards)
            self._tokens_file = (self._folder / tokens_file(number)).open("wb")
            self._ends_file = (self._folder / documents_file(number)).open("wb")
        for file, digest, data in zip(
            (self._tokens_file, self._ends_file), self._digests, (tokens, ends.astype("<u8")), strict=True
        ):
            file.write(data)
            digest.update(data)
        self._size += len(tokens)
        self._count += len(ends)
        if self._size >= self._shard_tokens:
            self._finish_shard()

    def _finish_shard(self) -> None:
        if self._tokens_file is None:
            return
        for file in (self._tokens_file, self._ends_file):
            _sync(file)
            file.close()
            write_checksums(Path(file.name))
        tokens_sha256, documents_sha256 = (digest.hexdigest() for digest in self._digests)
        self._shards.append(
            {
                "tokens": self._size,
                "documents": self._count,
                "tokens_sha256": tokens_sha256,
                "documents_sha256": documents_sha256,
            }
        )
        self._open_shard()


def _reopen(path: Path, size: int, digest: "hashlib._Hash") -> BinaryIO:
    """A file cut to its first `size` bytes, which `digest` takes in, open for more."""
    file = path.open("r+b")
    file.truncate(size)
    while block := file.read(1 << 20):
        digest.update(block)
    return file


def _sync(file: BinaryIO) -> None:
    file.flush()
    os.fsync(file.fileno())


def unigram_entropy(counts: np.ndarray) -> float | None:
    """Entropy in nats per token of the empirical distribution `counts / sum`; None without tokens."""
    total = int(counts.sum())
    if not total:
        return None
    p = counts[counts > 0] / total
    return float(-(p * np.log(p)).sum())


def write_manifest(folder: Path, manifest: dict[str, Any]) -> None:
    write_whole(folder / MANIFEST, json.dumps(manifest, indent=2))
    for part in (*(path for path in folder.iterdir() if path.is_dir()), folder):
        sync(part)


def read_manifest(folder: Path) -> dict[str, Any]:
    """The manifest of a prepared folder, of this format.

    Raises:
        ValueError: if it is missing, not JSON, of another format, or lacks a split.
    """
    path = folder / MANIFEST
    remedy = f"delete {folder} and run fla-prepare again"
    try:
        manifest = json.loads(path.read_bytes())
        complete = all(
            {"documents", "tokens", "text_bytes", "unigram_entropy", "shards"}
            <= manifest["splits"][split].keys()
            for split in ("train", "validation")
        )
        complete = complete and {"dtype", "tokenizer", "source"} <= manifest.keys()
        version = manifest["format"]
    except FileNotFoundError as failure:
        raise ValueError(
            f"{path} does not exist: {folder} holds no prepared data; run fla-prepare"
        ) from failure
    except (ValueError, KeyError, TypeError, AttributeError) as failure:
        raise ValueError(f"{path} is corrupt ({type(failure).__name__}: {failure}); {remedy}") from failure
    if version != FORMAT:
        raise ValueError(f"{path} has format {version}, this version reads {FORMAT}; {remedy}")
    if not complete:
        raise ValueError(f"{path} is incomplete; {remedy}")
    return manifest


def check_sizes(folder: Path, manifest: dict[str, Any], split: str) -> None:
    """Raise `ValueError` naming the first shard of a split whose size is not the manifest's."""
    width = np.dtype(manifest["dtype"]).itemsize
    for number, shard in enumerate(manifest["splits"][split]["shards"]):
        expected = {
            tokens_file(number): shard["tokens"] * width,
            documents_file(number): shard["documents"] * 8,
        }
        for name, size in expected.items():
            path = folder / split / name
            found = path.stat().st_size if path.is_file() else None
            if found != size:
                state = "is missing" if found is None else f"has {found} bytes instead of {size}"
                raise ValueError(f"shard {path} {state}; delete {folder} and run fla-prepare again")


def verify(folder: Path) -> None:
    """Read every shard of both splits and compare checksums; write block checksums that are missing or wrong.

    Raises:
        ValueError: naming the first file that is missing, cut short or altered.
    """
    manifest = read_manifest(folder)
    for split, entry in manifest["splits"].items():
        check_sizes(folder, manifest, split)
        for number, shard in enumerate(entry["shards"]):
            for name, key in (
                (tokens_file(number), "tokens_sha256"),
                (documents_file(number), "documents_sha256"),
            ):
                path = folder / split / name
                if sha256(path) != shard[key]:
                    raise ValueError(
                        f"shard {path} is corrupt (checksum); delete {folder} and run fla-prepare again"
                    )
                restore_checksums(path)
