"""Token shards on disk: write them, their manifest and checksums; read and verify them.

A split is a folder of pairs: `tokens-00000.bin` (uint16 or uint32, little-endian) and `documents-00000.bin`
(uint64, the end of each document in tokens from the shard's start). Documents never cross a shard.

Block checksums are written once beside each file and compared when a block is first read: `tokens-00000.bin`
has `tokens-00000.crc32`, little-endian uint32: first the bytes of a block, then the CRC-32 of each block.
They find flipped bits; the manifest's sha256 verifies a whole file. The manifest has a checksum of itself.
"""

import hashlib
import json
import os
import zlib
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from fla_train.utils.filesystem import sha256, sync, write_whole
from fla_train.utils.safe_files import read_json

FORMAT = 1
MANIFEST = "manifest.json"
BLOCK = 1 << 16  # bytes; what Linux reads ahead is twice that (docs/data.md has figures)


def tokens_file(number: int) -> str:
    return f"tokens-{number:05d}.bin"


def documents_file(number: int) -> str:
    return f"documents-{number:05d}.bin"


class ShardWriter:
    """Writes one split, from the beginning or from the `state` of an earlier writer.

    Args:
        folder: created if missing.
        state: what `state` of an earlier writer returned; whatever it wrote after that is cut off.
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
        self._resume_shard(state.get("open_sha256", []))

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
        """Flush everything written so far to the disk."""
        for file in (self._tokens_file, self._ends_file):
            if file is not None:
                _sync(file)

    def state(self) -> dict[str, Any]:
        """What another writer needs to continue from here, JSON-able; valid once `sync` has run."""
        return {
            "documents": self.documents,
            "tokens": self.tokens,
            "text_bytes": self.text_bytes,
            "counts": self._counts.astype("<i8").tobytes().hex(),
            "shards": list(self._shards),
            "open_sha256": [digest.hexdigest() for digest in self._digests],
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

    def _resume_shard(self, digests: list[str]) -> None:
        """Continue the shard that the state leaves unfinished; delete everything written after the state.

        Args:
            digests: sha256 of its two files.
        """
        self._size = self.tokens - sum(shard["tokens"] for shard in self._shards)
        self._count = self.documents - sum(shard["documents"] for shard in self._shards)
        number = len(self._shards)
        remedy = f"delete {self._folder.parent} and run fla-prepare again"
        kept: dict[str, int] = {}  # name -> bytes
        for n, (tokens, documents) in enumerate(
            [*((s["tokens"], s["documents"]) for s in self._shards), (self._size, self._count)]
        ):
            if documents:
                kept |= {tokens_file(n): tokens * self._dtype.itemsize, documents_file(n): documents * 8}
        present = {path.name: path for path in self._folder.iterdir()}
        for name, size in kept.items():
            if name not in present or present[name].stat().st_size < size:
                raise ValueError(f"{self._folder / name} is cut short; {remedy}")
        finished = [name(n) for n in range(number) for name in (tokens_file, documents_file)]
        wanted = kept.keys() | {checksums_file(Path(name)).name for name in finished}
        for name, path in present.items():
            if name not in wanted:
                path.unlink()
        if self._count:
            paths = [present[name] for name in (tokens_file(number), documents_file(number))]
            self._tokens_file, self._ends_file = (
                _reopen(path, kept[path.name], digest)
                for path, digest in zip(paths, self._digests, strict=True)
            )
            for path, digest, written in zip(paths, self._digests, digests, strict=True):
                if digest.hexdigest() != written:
                    self.abandon()
                    raise ValueError(f"{path} is not as it was written; {remedy}")

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
    """Open a file to append after its first `size` bytes, which are kept and added to `digest`."""
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
    """Write the manifest of a folder, with its checksum, and flush the entries of folder and subfolders."""
    write_whole(folder / MANIFEST, json.dumps(manifest | {"checksum": _digest(manifest)}, indent=2))
    for part in (*(path for path in folder.iterdir() if path.is_dir()), folder):
        sync(part)


def _digest(manifest: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()


def read_manifest(folder: Path) -> dict[str, Any]:
    """Read the manifest of a prepared folder.

    Raises:
        ValueError: it is missing, not JSON, of another format, or not as `write_manifest` wrote it.
    """
    path = folder / MANIFEST
    remedy = f"delete {folder} and run fla-prepare again"
    try:
        manifest = read_json(path)
        version, checksum = manifest["format"], manifest.pop("checksum", None)
        if (dtype := manifest.get("dtype", "uint16")) not in ("uint16", "uint32"):
            raise ValueError(f"dtype {dtype!r:.40}")
    except FileNotFoundError as failure:
        raise ValueError(
            f"{path} does not exist: {folder} holds no prepared data; run fla-prepare"
        ) from failure
    except (ValueError, KeyError, TypeError, AttributeError) as failure:
        raise ValueError(f"{path} is corrupt ({type(failure).__name__}: {failure}); {remedy}") from failure
    if version != FORMAT:
        raise ValueError(f"{path} has format {version}, this version reads {FORMAT}; {remedy}")
    if checksum != _digest(manifest):
        raise ValueError(f"{path} is not as it was written (checksum); {remedy}")
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
        OSError: checksums can't be written.
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
                file = checksums_file(path)
                if not file.is_file() or file.read_bytes() != _checksums(path):
                    write_checksums(path)


def checksums_file(path: Path) -> Path:
    """The path of the block checksums of a shard's file."""
    return path.with_suffix(".crc32")


def write_checksums(path: Path) -> None:
    """Write the block checksums of a file beside it.

    Raises:
        OSError: the disk is full, or the folder can't be written.
    """
    write_whole(checksums_file(path), _checksums(path))


def _checksums(path: Path) -> bytes:
    with path.open("rb") as file:
        blocks = iter(lambda: file.read(BLOCK), b"")
        return np.array([BLOCK, *map(zlib.crc32, blocks)], dtype="<u4").tobytes()


class CheckedFile:
    """A memory-mapped file of a shard. Each block is compared with its checksum when it is first read.

    Args:
        dtype: of its items.
        digest: the file's sha256 in the manifest.

    Raises:
        ValueError: the checksums are lost, or their number is not that of the shard's blocks.
    """

    def __init__(self, path: Path, dtype: np.dtype, digest: str):
        self._path, self._digest = path, digest
        self._items = np.memmap(path, dtype=dtype, mode="r").view(np.ndarray)
        self._bytes = self._items.view(np.uint8)
        file = checksums_file(path)
        content = np.fromfile(file, dtype="<u4") if file.is_file() else np.empty(0, dtype="<u4")
        self._block, self._checksums = int(content[0]) if len(content) else 0, content[1:]
        if self._block == 0 or len(self._checksums) != -(-len(self._bytes) // self._block):
            raise ValueError(self._wrong_checksums())
        self._unread = bytearray(b"\1") * len(self._checksums)  # 1: not compared yet

    def __len__(self) -> int:
        """Items in the file."""
        return len(self._items)

    def read(self, start: int, stop: int) -> np.ndarray:
        """Items [start, stop), as far as the file has them.

        Raises:
            ValueError: a block of them differs from what was written; names file, block and remedy.
        """
        width = self._items.itemsize
        first, last = start * width // self._block, -(-stop * width // self._block)
        while (number := self._unread.find(1, first, last)) >= 0:
            self._compare(number)
            self._unread[number] = 0
            first = number + 1
        return self._items[start:stop]

    def _compare(self, number: int) -> None:
        block = self._bytes[number * self._block : (number + 1) * self._block]
        if zlib.crc32(block) == self._checksums[number]:
            return
        if sha256(self._path) == self._digest:
            raise ValueError(self._wrong_checksums())
        items, kind = self._block // self._items.itemsize, self._path.stem.split("-")[0]
        raise ValueError(
            f"shard {self._path} is corrupt: block {number} ({kind} {number * items:,} to "
            f"{min((number + 1) * items, len(self)) - 1:,}) is not as it was written; "
            f"delete {self._path.parents[1]} and run fla-prepare again"
        )

    def _wrong_checksums(self) -> str:
        return (
            f"{checksums_file(self._path)} is missing or corrupt, not the shard: have `fla-prepare ... "
            "verify=true` write it again"
        )
