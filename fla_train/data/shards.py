"""Token shards on disk and the manifest that lists them.

A shard holds the documents of one slice of the source, `shard-00000.bin` those of the first. The file is a
sequence of little-endian arrays:

    train tokens | validation tokens | train ends | validation ends | checksums

- Tokens are uint16 or uint32, each document with its separator.
- Ends are uint64: the end of each document, in tokens from the beginning of its split in the shard.
- Checksums are uint32: the CRC-32 of each block of 64 KiB of the arrays before. A block is compared with its
  checksum when it is first read.

While a corpus is prepared, each shard has a record, `shard-00000.json`. It is written after the shard, so a
shard with a record is complete. The manifest collects the records.
"""

import hashlib
import json
import math
import os
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import accumulate, chain
from pathlib import Path
from typing import Any

import numpy as np

from fla_train.utils.filesystem import find_damage, replaced_file, write_whole
from fla_train.utils.safe_files import find_json

FORMAT = 1
MANIFEST = "manifest.json"
SPLITS = ("train", "validation")
BLOCK = 1 << 16  # bytes, half of what Linux reads ahead

# Description of a shard: `bytes`, `sha256`, and `tokens` and `documents` of each split. A record has more.
Record = dict[str, Any]


def shard_file(number: int) -> str:
    return f"shard-{number:05d}.bin"


def damaged(what: str, folder: Path) -> ValueError:
    """Return the error for damage in a prepared folder, which says how to repair it."""
    return ValueError(f"{what}; delete {folder} and run fla-prepare again")


def write_shard(path: Path, documents: Mapping[str, Sequence[np.ndarray]]) -> Record:
    """Write the tokens of each document of each split and return the description of the shard.

    The file is written under another name first, and renamed. It is never in memory as a whole.
    """
    lengths = {split: [len(tokens) for tokens in documents[split]] for split in SPLITS}
    ends = [np.cumsum(lengths[split], dtype="<u8") for split in SPLITS]
    crcs, digest = [], hashlib.sha256()
    with replaced_file(path) as file:
        for block in _blocks(chain(*(documents[split] for split in SPLITS), ends)):
            crcs.append(zlib.crc32(block))
            digest.update(block)
            file.write(block)
        checksums = np.array(crcs, "<u4").tobytes()
        digest.update(checksums)
        file.write(checksums)
        size = file.tell()
    counts = {split: {"tokens": sum(sizes), "documents": len(sizes)} for split, sizes in lengths.items()}
    return {"bytes": size, "sha256": digest.hexdigest(), **counts}


def _blocks(arrays: Iterable[np.ndarray]) -> Iterator[bytearray]:
    """Yield the bytes of all arrays in blocks of `BLOCK`; the last may be shorter."""
    block = bytearray()
    for array in arrays:
        block += memoryview(array)
        while len(block) >= BLOCK:
            yield block[:BLOCK]
            del block[:BLOCK]
    if block:
        yield block


def read_record(folder: Path, number: int) -> Record | None:
    """Return the record of a complete shard, or None."""
    record = find_json((folder / shard_file(number)).with_suffix(".json"))
    return record if record and has_size(folder, number, record) else None


def has_size(folder: Path, number: int, record: Record) -> bool:
    """Return whether the shard is there and as long as its description says."""
    path = folder / shard_file(number)
    return path.is_file() and path.stat().st_size == record["bytes"]


class Shard:
    """One split of a shard. Each block is compared with its checksum when it is first read.

    The file is open only while it is read: a corpus has more shards than a process may have open files.

    Args:
        record: the description of the shard.
        dtype: of tokens.

    Raises:
        ValueError: the file is missing or cut short.
    """

    def __init__(self, folder: Path, number: int, record: Record, split: str, dtype: str):
        self._path = folder / shard_file(number)
        if not has_size(folder, number, record):
            raise damaged(f"shard {self._path} is missing or cut short", folder)
        self._dtype = np.dtype(dtype).newbyteorder("<")
        # The file begins with the tokens of each split and the ends of each split. Checksums follow.
        sizes = [record[name]["tokens"] * self._dtype.itemsize for name in SPLITS]
        sizes += [record[name]["documents"] * 8 for name in SPLITS]
        *starts, self._crcs_start = accumulate(sizes, initial=0)
        column = SPLITS.index(split)
        self._tokens_start, self._ends_start = starts[column], starts[len(SPLITS) + column]
        self._token_count, self._end_count = record[split]["tokens"], record[split]["documents"]
        blocks = -(-self._crcs_start // BLOCK)
        self._crcs = np.frombuffer(self._read(self._crcs_start, 4 * blocks), "<u4", blocks)
        self._unchecked = bytearray(b"\1") * blocks  # 1: not compared yet, 0: intact

    def tokens(self, start: int, stop: int) -> np.ndarray:
        """Return tokens [start, stop), as far as there are. Raises `ValueError` for a damaged block."""
        count = max(0, min(stop, self._token_count) - start)
        return self._read_checked(self._tokens_start + start * self._dtype.itemsize, count, self._dtype)

    def ends(self) -> np.ndarray:
        """Return the end of each document, uint64. Raises `ValueError` for a damaged block."""
        return self._read_checked(self._ends_start, self._end_count, np.dtype("<u8"))

    def _read_checked(self, start: int, count: int, dtype: np.dtype) -> np.ndarray:
        stop = start + count * dtype.itemsize
        first, last = start // BLOCK, -(-stop // BLOCK)
        if self._unchecked.find(1, first, last) < 0:
            return np.frombuffer(self._read(start, stop - start), dtype, count)
        before = first * BLOCK
        content = self._read(before, min(last * BLOCK, self._crcs_start) - before)
        for number in range(first, last):
            block = memoryview(content)[number * BLOCK - before : (number + 1) * BLOCK - before]
            if zlib.crc32(block) != self._crcs[number]:
                state = f"is corrupt (block {number} of {BLOCK} bytes)"
                raise damaged(f"shard {self._path} {state}", self._path.parent)
            self._unchecked[number] = 0
        return np.frombuffer(content, dtype, count, start - before)

    def _read(self, start: int, size: int) -> bytes:
        descriptor = os.open(self._path, os.O_RDONLY)
        try:
            return os.pread(descriptor, size, start)
        finally:
            os.close(descriptor)


def unigram_entropy(counts: np.ndarray) -> float | None:
    """Return the entropy in nats per token of the distribution `counts / sum`; None without tokens."""
    total = int(counts.sum())
    if not total:
        return None
    p = counts[counts > 0] / total
    return float(-(p * np.log(p)).sum())


def write_manifest(folder: Path, manifest: dict[str, Any]) -> None:
    """Write the manifest of a folder, with its checksum."""
    write_whole(folder / MANIFEST, json.dumps(manifest | {"checksum": _digest(manifest)}, indent=1))


def _digest(manifest: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()


def read_manifest(folder: Path) -> dict[str, Any]:
    """Read the manifest of a prepared folder.

    Raises:
        ValueError: it is missing, of another format, or not as `write_manifest` wrote it.
    """
    path = folder / MANIFEST
    manifest = find_json(path)
    if manifest is None:
        raise damaged(f"{path} is missing or damaged", folder)
    if manifest.get("format") != FORMAT:
        raise damaged(f"{path} has format {manifest.get('format')}, this version reads {FORMAT}", folder)
    if manifest.pop("checksum", None) != _digest(manifest):
        raise damaged(f"{path} is not as it was written (checksum)", folder)
    return manifest


def check_files(folder: Path, manifest: dict[str, Any], *, hashed: bool) -> None:
    """Compare the size of every shard with the manifest, and with `hashed` its checksum.

    Raises:
        ValueError: naming the first file that is missing, cut short or altered.
    """
    files = {shard_file(number): record for number, record in enumerate(manifest["shards"])}
    if damage := find_damage(folder, files, hashed_bytes=math.inf if hashed else -1):
        raise damaged(f"shard {folder}/{damage}", folder)
