"""How tokens fall into chunks and chunks into sequences: packing for the chunked backend, and unpacking."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

SUBSTEPS = 64  # at most, per chunk: near the fastest on CPUs for head dims 32 to 128


@dataclass(frozen=True)
class ChunkLayout:
    """How tokens fall into chunks, and chunks into sequences.

    States live in one list of slots: a sequence of c chunks owns c + 1 neighbouring slots (an empty one
    owns one slot, its initial and its final state), and a chunk leads from its slot to the next.
    """

    size: int  # tokens per chunk
    slots: list[int]  # for each chunk, the slot of the state it starts from
    first: list[int]  # for each sequence, its first and last slot
    last: list[int]
    rows: Tensor | None  # [T] where each token goes among size * len(slots) rows; None: in order from row 0

    @staticmethod
    def of(tokens: int, substeps: int, cu_seqlens: Tensor | None) -> "ChunkLayout":
        fitting = max(1, SUBSTEPS // substeps)
        size = min(tokens, 1 << (fitting.bit_length() - 1))  # a power of two: odd sizes are a third slower
        lengths = [tokens] if cu_seqlens is None else cu_seqlens.diff().tolist()
        slots, first, last, rows = [], [], [], []
        for length in lengths:
            chunks, start = -(-length // size), len(slots) + len(first)
            rows.append(torch.arange(length) + len(slots) * size)
            first.append(start)
            last.append(start + chunks)
            slots.extend(range(start, start + chunks))
        ordered = len(lengths) == 1
        return ChunkLayout(
            size, slots, first, last, None if ordered else torch.cat(rows).to(cu_seqlens.device)
        )

    def pack(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        """[B, T, N, H, D] -> [chunks, B * H, size * N, D], zeros where a chunk has no token."""
        batch, tokens, substeps, heads, dim = x.shape
        total = self.size * len(self.slots)
        if self.rows is not None:
            x = x.new_zeros(batch, total, substeps, heads, dim).index_copy_(1, self.rows, x)
        elif total > tokens:
            x = F.pad(x, (0, 0) * 3 + (0, total - tokens))
        x = x.view(batch, len(self.slots), self.size, substeps, heads, dim).permute(1, 0, 4, 2, 3, 5)
        return x.to(dtype, copy=True, memory_format=torch.contiguous_format).view(
            len(self.slots), batch * heads, self.size * substeps, dim
        )

    def unpack(self, x: Tensor, like: Tensor) -> Tensor:
        """The inverse of `pack`, in the dtype and first four axes of `like` [B, T, N, H, .]."""
        batch, tokens, substeps, heads = like.shape[:4]
        x = x.view(len(self.slots), batch, heads, self.size, substeps, x.shape[-1]).permute(1, 0, 3, 4, 2, 5)
        x = x.to(like.dtype, copy=True, memory_format=torch.contiguous_format).flatten(1, 2)
        return x[:, :tokens].contiguous() if self.rows is None else x.index_select(1, self.rows)

    def before(self, states: Tensor) -> Tensor:
        """For each chunk, the state that it starts from."""
        return states[:-1] if len(self.first) == 1 else states[self.slots]

    def after(self, states: Tensor) -> Tensor:
        """For each chunk, the state that it ends in."""
        return states[1:] if len(self.first) == 1 else states[[slot + 1 for slot in self.slots]]
