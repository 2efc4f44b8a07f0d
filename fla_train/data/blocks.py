"""Block checksums of shards: written once beside each file, compared when a block is first read.

`tokens-00000.bin` has `tokens-00000.crc32`: little-endian uint32, first the bytes of a block, then the CRC-32
of each block. They find flipped bits; the manifest's sha256 stays the proof of a whole file.
"""

import logging
import zlib
from pathlib import Path

import numpy as np

from fla_train.utils.filesystem import sha256, write_whole

BLOCK = 1 << 16  # bytes; what Linux reads ahead of a page fault is twice that (docs/data.md has figures)

logger = logging.getLogger(__name__)


def checksums_file(path: Path) -> Path:
    """Where the block checksums of a shard's file lie."""
    return path.with_suffix(".crc32")


def write_checksums(path: Path) -> None:
    """Write the block checksums of a file, as it is, beside it.

    Raises:
        OSError: the disk is full, or the folder can't be written.
    """
    write_whole(checksums_file(path), _checksums(path))


def restore_checksums(path: Path) -> None:
    """Write the block checksums of a file known to be intact, unless they are there and right.

    Where the folder can't be written, a warning says so: the file loads without them.
    """
    file = checksums_file(path)
    if file.is_file() and file.read_bytes() == _checksums(path):
        return
    try:
        write_checksums(path)
    except OSError as failure:
        logger.warning("%s can't be written (%s): its shard is read unchecked", file, failure.strerror)


def _checksums(path: Path) -> bytes:
    with path.open("rb") as file:
        blocks = iter(lambda: file.read(BLOCK), b"")
        return np.array([BLOCK, *map(zlib.crc32, blocks)], dtype="<u4").tobytes()


class CheckedFile:
    """A memory-mapped file of a shard. Each block is compared with its checksum when it is first read.

    A file without checksums, as earlier versions prepared it, is read unchecked.

    Args:
        dtype: of its items.
        digest: sha256 that the manifest has for the file.

    Raises:
        ValueError: the file of checksums does not fit the shard.
    """

    def __init__(self, path: Path, dtype: np.dtype, digest: str):
        self._path, self._digest = path, digest
        self._items = np.memmap(path, dtype=dtype, mode="r").view(np.ndarray)
        self._bytes = self._items.view(np.uint8)
        self._block, self._checksums = 1, np.empty(0, dtype="<u4")
        if checksums_file(path).is_file():
            content = np.fromfile(checksums_file(path), dtype="<u4")
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
            ValueError: a block of them is not as it was written; names the file, the block and what to do.
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
            f"{checksums_file(self._path)} is corrupt, not the shard: delete it, or have `fla-prepare ... "
            "verify=true` write it again"
        )
