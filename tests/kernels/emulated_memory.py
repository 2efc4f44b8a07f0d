"""Memory for `emulated_gluon`: pointers, shared tiles with their books, matrices for the copy engine."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor


class Pointer:
    """Elements of a flat tensor from `offset` on, an integer or a tensor of them.

    Args:
        pairs: the same memory as 32-bit elements, each in the place of two 16-bit ones.
        bits: 16; or 32 of a pointer to such pairs, whose `pairs` are the 16-bit elements.
    """

    def __init__(self, data: Tensor, offset: Tensor | int = 0, pairs: Tensor | None = None, bits: int = 16):
        self.data, self.offset, self.bits = data, offset, bits
        self.pairs = torch.full(((data.numel() + 1) // 2,), torch.nan) if pairs is None else pairs

    @classmethod
    def to_first(cls, tensor: Tensor) -> "Pointer":
        """To a tensor's first element, and to all that follows in memory."""
        offset = tensor.storage_offset()
        elements = tensor.untyped_storage().nbytes() // tensor.element_size() - offset
        return cls(tensor.as_strided((elements,), (1,), offset))

    def __add__(self, further: Tensor | int) -> "Pointer":
        return Pointer(self.data, self.offset + further, self.pairs, self.bits)

    def __sub__(self, further: Tensor | int) -> "Pointer":
        return self + -further

    def to(self, dtype: torch.dtype, bitcast: bool) -> "Pointer":
        """A pointer to the same memory as 32-bit elements."""
        assert bitcast and dtype == torch.float32 and self.bits == 16 and self.offset % 2 == 0
        return Pointer(self.pairs, self.offset // 2, self.data, bits=32)

    def store(self, index: Tensor, value: Tensor) -> None:
        """Elements by their number; what shares their memory becomes NaN."""
        self.data[index] = value.to(self.data.dtype)
        if self.bits == 16:
            self.pairs[index // 2] = torch.nan
        else:
            self.pairs[2 * index] = self.pairs[2 * index + 1] = torch.nan


@dataclass
class Book:
    """What has happened to a tile."""

    empty: bool = True  # nothing has been stored, and no copy has come
    unfenced: bool = False  # stored to since the last fence
    touched: bool = False  # loaded from or stored to since the last barrier of threads
    written: bool = False  # stored to since then
    read: bool = False  # by a product that this warp group has waited for, since then


class Shared:
    """Shared memory: an array of tiles of `rank` dimensions, or one of them, with the books of each.

    `memory` lists all that was allocated or is named anew.
    """

    def __init__(self, data: Tensor, rank: int, books: list[Book], memory: list["Shared"]):
        self.data, self.rank, self.books, self.memory = data, rank, books, memory

    @classmethod
    def register(cls, data: Tensor, rank: int, memory: list["Shared"]) -> "Shared":
        """With new books: nothing is there yet."""
        count = data.shape[0] if data.ndim > rank else 1
        memory.append(cls(data, rank, [Book() for _ in range(count)], memory))
        return memory[-1]

    def reinterpret(self, dtype: torch.dtype, shape: list[int], rank: int) -> "Shared":
        """Other tiles in the same place; as many of them stay the same in the books."""
        assert dtype == self.data.dtype
        if len(shape) == self.data.ndim > rank and shape[0] == len(self.books):
            data = self.data.view(shape[0], -1)[:, : math.prod(shape[1:])].view(shape)
            return Shared(data, rank, self.books, self.memory)
        if len(shape) == rank and self.data.ndim == self.rank and math.prod(shape) == self.data.numel():
            return Shared(self.data.view(shape), rank, self.books, self.memory)
        return self.register(self.data.view(-1)[: math.prod(shape)].view(shape), rank, self.memory)

    @property
    def shape(self) -> torch.Size:
        return self.data.shape

    def index(self, i: Tensor | int) -> "Shared":
        assert self.data.ndim == self.rank + 1
        return Shared(self.data[int(i)], self.rank, [self.books[int(i)]], self.memory)

    def slice(self, start: int, length: int, dim: int = 0) -> "Shared":
        assert start + length <= self.data.shape[dim]
        return Shared(self.data.narrow(dim, start, length), self.rank, self.books, self.memory)

    def permute(self, order: tuple[int, ...]) -> "Shared":
        return Shared(self.data.permute(order), self.rank, self.books, self.memory)

    def load(self, layout: object = None) -> Tensor:
        (book,) = self.books
        book.touched = True
        assert not book.empty, "shared memory that nobody has filled"
        assert not book.written, "a load of what other threads have stored, without a barrier"
        return self.data.clone()

    def store(self, value: Tensor) -> None:
        (book,) = self.books
        assert not book.read, "a store over a tile that another warp group's product may still read"
        book.touched = book.written = book.unfenced = True
        book.empty = False
        self.data.copy_(value.to(self.data.dtype))

    def operand(self) -> Tensor:
        (book,) = self.books
        assert not book.unfenced and not book.written, "a product of a tile without fence or barrier"
        assert not book.empty, "a product of a tile that has not come"
        return self.data.float()


class Descriptor:
    """A matrix, or a tensor of three dimensions, of which tiles are read; `layout` counts its dimensions."""

    def __init__(self, data: Tensor, block_shape: list[int]):
        self.data, self.block_shape, self.dtype, self.layout = data, block_shape, data.dtype, data.ndim

    def tile(self, place: list[int]) -> Tensor:
        """The tile that begins at `place`; beyond the tensor it is zero."""
        assert len(place) == self.layout and min(place) >= 0
        tile = torch.zeros(self.block_shape, dtype=self.dtype)
        found = self.data[tuple(slice(i, i + size) for i, size in zip(place, self.block_shape, strict=True))]
        tile[tuple(map(slice, found.shape))] = found
        return tile
