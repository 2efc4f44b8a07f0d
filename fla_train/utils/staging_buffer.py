"""Hold one copy of a checkpoint in host memory that another process can read."""

import mmap
import os
from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.serialization import config as serialization

ALIGNMENT = 64  # bytes, of a tensor in the staging buffer

# Segment of a file: whether its bytes are in the staging buffer (otherwise separate), offset, length.
Segment = tuple[bool, int, int]


class StagingBuffer:
    """Hold the tensors of a checkpoint in memory that another process can read by `descriptor`.

    The memory is as large as the tensors need and is reused for each checkpoint. If there is a GPU, it is
    pinned and the copies run on a separate stream: `wait` must return before the tensors change.
    """

    def __init__(self) -> None:
        self.descriptor = os.memfd_create("checkpoint")
        self._memory: mmap.mmap | None = None
        self._address = self._size = 0
        self._pinned = False
        self._stream: torch.cuda.Stream | None = None
        self._copied: torch.cuda.Event | None = None
        # Keep the sources until they have been copied. Otherwise their memory could be reused.
        self._sources: dict[tuple, Tensor] = {}

    def stage(self, files: Mapping[str, object]) -> tuple[dict[str, list[Segment]], bytes]:
        """Start to copy the tensors of `files`. Return the segments of each file, and all other bytes.

        Args:
            files: name -> bytes, or content for `torch.save`: nested dicts, lists and tuples, in which
                tensors that are views of one memory, such as tied weights, stay shared.

        Raises:
            OSError: memory is exhausted, or a limit on file sizes forbids it.
        """
        tensors = [leaf for leaf in tree_leaves(files) if isinstance(leaf, Tensor) and leaf.numel()]
        self._sources = {_key(tensor): tensor.detach() for tensor in tensors}
        offsets, size = {}, 0
        for key, source in self._sources.items():
            offsets[key] = size
            size += -(-source.nbytes // ALIGNMENT) * ALIGNMENT
        on_gpu = any(source.is_cuda for source in self._sources.values())
        self._grow(size)
        if on_gpu and not self._pinned:
            torch.cuda.check_error(torch.cuda.cudart().cudaHostRegister(self._address, self._size, 0))
            self._pinned = True
        copies = {}
        for key, source in self._sources.items():
            place = {"dtype": source.dtype, "count": source.numel(), "offset": offsets[key]}
            copies[key] = torch.frombuffer(self._memory, **place).view(source.shape)
        self._copy(copies, on_gpu)
        recorder = _Recorder(self._address, size)
        copied = tree_map_only(
            Tensor, lambda tensor: copies.get(_key(tensor), torch.empty_like(tensor, device="cpu")), files
        )
        segments = {name: recorder.record(content) for name, content in copied.items()}
        staged = {begin for parts in segments.values() for is_staged, begin, _ in parts if is_staged}
        assert staged == set(offsets.values()), "torch.save wrote copies of the tensors"
        return segments, bytes(recorder.unstaged)

    def wait(self) -> None:
        """Wait until all copies are complete."""
        if self._copied is not None:
            self._copied.synchronize()
            self._copied = None
        self._sources.clear()

    def close(self) -> None:
        """Free the memory."""
        self._unpin()
        self._memory = None
        os.close(self.descriptor)

    @property
    def copying(self) -> bool:
        """Return whether copies may still run."""
        return self._copied is not None

    def _grow(self, size: int) -> None:
        """Make the memory at least `size` bytes large. Memory that has grown must be pinned again."""
        if size <= self._size:
            return
        self._unpin()
        os.ftruncate(self.descriptor, size)
        self._memory = mmap.mmap(self.descriptor, size)
        self._address, self._size = torch.frombuffer(self._memory, dtype=torch.uint8).data_ptr(), size

    def _unpin(self) -> None:
        if self._pinned:
            torch.cuda.check_error(torch.cuda.cudart().cudaHostUnregister(self._address))
            self._pinned = False

    def _copy(self, copies: Mapping[tuple, Tensor], on_gpu: bool) -> None:
        if on_gpu:
            self._stream = self._stream or torch.cuda.Stream()
            self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):  # a stream of None has no effect
            for key, copy in copies.items():
                copy.copy_(self._sources[key], non_blocking=True)
        if on_gpu:
            self._copied = torch.cuda.Event(blocking=True)
            self._copied.record(self._stream)


def _key(tensor: Tensor) -> tuple:
    """Identify a view of memory: equal keys are the same bytes in the same shape."""
    storage = tensor.untyped_storage().data_ptr()
    return storage, tensor.storage_offset(), tensor.shape, tensor.stride(), tensor.dtype


class _Recorder:
    """Record where the bytes of a `torch.save` are, without copying those in the buffer.

    The tensors may therefore be copied later. `torch.save` would read them only for its checksum, which is
    disabled, because the manifest has better ones and this one takes three quarters of the time of a save.
    """

    def __init__(self, address: int, size: int):
        self._address, self._size = address, size
        self._segments: list[Segment] = []
        self.unstaged = bytearray()  # bytes that are not in the buffer

    def record(self, content: object) -> list[Segment]:
        """Return the segments of the file that holds `content`."""
        self._segments = []
        if isinstance(content, bytes):
            self.write(content)
        else:
            with serialization.patch("save.compute_crc32", False):
                torch.save(content, self)
        return self._segments

    def write(self, data: bytes | memoryview) -> int:
        begin = np.frombuffer(data, np.uint8).ctypes.data - self._address
        if 0 <= begin < self._size:
            self._segments.append((True, begin, len(data)))
        else:
            start, before = len(self.unstaged), 0
            if self._segments and not self._segments[-1][0]:
                _, start, before = self._segments.pop()
            self._segments.append((False, start, before + len(data)))
            self.unstaged += data
        return len(data)

    def flush(self) -> None:
        """Do nothing: no bytes are held back."""
