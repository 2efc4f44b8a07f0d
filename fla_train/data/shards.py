"""Token shards on disk: writing them, the manifest that vouches for them, and checking them again.

A split is a folder of pairs: `tokens-00000.bin` (uint16 or uint32, little-endian) and `documents-00000.bin`
(uint64, the end of each document in tokens from the shard's start). Documents never cross a shard.
"""

import hashlib
import json
import os
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

FORMAT = 1
MANIFEST = "manifest.json"
_BUFFER_TOKENS = 1 << 20


def tokens_file(number: int) -> str:
    return f"tokens-{number:05d}.bin"


def documents_file(number: int) -> str:
    return f"documents-{number:05d}.bin"


class ShardWriter:
    """Writes one split, holding about a million tokens, and the ends of one shard's documents, in memory."""

    def __init__(self, folder: Path, dtype: str, shard_tokens: int, vocab_size: int):
        folder.mkdir(parents=True)
        self.documents = 0
        self.tokens = 0
        self.text_bytes = 0
        self._folder = folder
        self._dtype = np.dtype(dtype).newbyteorder("<")
        self._shard_tokens = shard_tokens
        self._counts = np.zeros(vocab_size, dtype=np.int64)
        self._shards: list[dict[str, Any]] = []
        self._start_shard()

    def add(self, ids: list[int], text_bytes: int) -> None:
        """Append one document (its separator included)."""
        self._buffer.append(np.asarray(ids, dtype=self._dtype))
        self._buffered += len(ids)
        self._shard_size += len(ids)
        self._ends.append(self._shard_size)
        self.documents += 1
        self.tokens += len(ids)
        self.text_bytes += text_bytes
        if self._buffered >= _BUFFER_TOKENS:
            self._flush()
        if self._shard_size >= self._shard_tokens:
            self._finish_shard()

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

    def _start_shard(self) -> None:
        self._file = None
        self._digest = hashlib.sha256()
        self._buffer: list[np.ndarray] = []
        self._buffered = 0
        self._shard_size = 0
        self._ends: list[int] = []

    def _flush(self) -> None:
        if not self._buffer:
            return
        tokens = np.concatenate(self._buffer)
        self._counts += np.bincount(tokens, minlength=len(self._counts))
        if self._file is None:
            self._file = (self._folder / tokens_file(len(self._shards))).open("wb")
        self._file.write(tokens)
        self._digest.update(tokens)
        self._buffer, self._buffered = [], 0

    def _finish_shard(self) -> None:
        self._flush()
        if self._file is None:
            return
        _sync_and_close(self._file)
        ends = np.asarray(self._ends, dtype="<u8")
        number = len(self._shards)
        with (self._folder / documents_file(number)).open("wb") as file:
            file.write(ends)
            _sync_and_close(file)
        digests = {
            "tokens_sha256": self._digest.hexdigest(),
            "documents_sha256": hashlib.sha256(ends).hexdigest(),
        }
        self._shards.append({"tokens": self._shard_size, "documents": len(ends), **digests})
        self._start_shard()


def _sync_and_close(file: BinaryIO) -> None:
    file.flush()
    os.fsync(file.fileno())
    file.close()


def sync(path: Path) -> None:
    """Have the disk hold a file's content, or a folder's entries, before what is written next."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def unigram_entropy(counts: np.ndarray) -> float | None:
    """Entropy in nats per token of the empirical distribution `counts / sum`; None without tokens."""
    total = int(counts.sum())
    if not total:
        return None
    p = counts[counts > 0] / total
    return float(-(p * np.log(p)).sum())


def write_manifest(folder: Path, manifest: dict[str, Any]) -> None:
    with (folder / MANIFEST).open("wb") as file:
        file.write(json.dumps(manifest, indent=2).encode())
        _sync_and_close(file)
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
    """Read every shard of both splits and compare checksums.

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
                with path.open("rb") as file:
                    digest = hashlib.file_digest(file, "sha256").hexdigest()
                if digest != shard[key]:
                    raise ValueError(
                        f"shard {path} is corrupt (checksum); delete {folder} and run fla-prepare again"
                    )
