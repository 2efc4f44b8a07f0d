"""Sequences cut into pieces that run at once, for calls with too few heads and sequences to fill the device.

`state_kernel` and `adjoint_kernel` have one program per sequence, head and tile of V. Where that leaves most
of the device idle, sequences are cut into pieces; `segment_kernels` finds the true state at each piece's start
(backwards, the gradient at its end), and the same kernels, or Hopper's whole backward pass, then take the
pieces for the documents of a packed row. Everything follows from sizes: nothing is tuned and nothing waits
for the device.

The cut is as stable as the uncut recurrence: an error in a piece's start is carried on by the same
transitions that carry on the rounding of the state itself. With 16-bit inputs state and transition are
rounded to fp16 once more for each piece, which shows only where beta is so small that the chunks add less.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fla_train.kernels.cached_launch import run_kernel
from fla_train.kernels.delta_product.triton.common import CHUNK
from fla_train.kernels.delta_product.triton.launch_table import MIN_TILE, Options
from fla_train.kernels.delta_product.triton.segment_kernels import (
    combine_kernel,
    cut_kernel,
    piece_adjoint_kernel,
    piece_state_kernel,
)
from fla_train.kernels.sizes import ceil_div

CHUNK_STEPS = CHUNK.value
# Of the serial kernels that share a multiprocessor, with tiles of 64 columns of V; 128 take two places.
PROGRAMS_PER_PROCESSOR = 2
# Measured on an H100 (docs/kernels.md): the extra pass over two or three pieces costs what it saves, and on
# shorter rows the host takes longer for five more launches than the device for the rows as they are.
LEAST_PIECES, LEAST_CHUNKS, LEAST_ROW = 4, 8, 128

_forced: int | None = None


@contextmanager
def cutting(chunks: int | None) -> Iterator[None]:
    """Calls inside have pieces of so many chunks, 0 for none, whatever their sizes: for checks and tests.

    None: by their sizes, as outside.
    """
    global _forced
    before, _forced = _forced, chunks
    try:
        yield
    finally:
        _forced = before


def piece_chunks(rows: int, row_chunks: int, heads: int, value_dim: int, processors: int) -> int:
    """Chunks per piece, or 0 where sequences stay whole.

    As many pieces as fill the device once, of at least LEAST_CHUNKS each; no cut into fewer than
    LEAST_PIECES, nor of a row with fewer chunks than LEAST_ROW.

    Args:
        rows: sequences of the batch; a packed row counts as one, since its documents' lengths aren't known.
        row_chunks: chunks of a row.
        processors: multiprocessors of the device.
    """
    programs = rows * heads * -(-value_dim // MIN_TILE)
    pieces = min(PROGRAMS_PER_PROCESSOR * processors // programs, row_chunks // LEAST_CHUNKS)
    return -(-row_chunks // pieces) if pieces >= LEAST_PIECES and row_chunks >= LEAST_ROW else 0


@dataclass(frozen=True)
class Cut:
    """How many chunks a piece has, and how many pieces there are: for packed rows an upper bound."""

    chunks: int
    pieces: int


def find_cut(q: Tensor, k: Tensor, value_dim: int, bounds: Sequence[Tensor]) -> Cut | None:
    """How to cut the sequences of a call, None for not at all. `bounds[0]`: `cu_seqlens` of a packed row."""
    (batch, length, heads, key_dim), chunk_tokens, chunks = q.shape, CHUNK_STEPS // k.shape[2], _forced
    row_chunks = ceil_div(length, chunk_tokens)
    documents = bounds[0].numel() - 1 if bounds else 0
    # Short rows stay whole, and asking for the device's properties takes longer than all of this.
    if chunks is None and row_chunks >= LEAST_ROW:
        processors, hopper = _device(q.device)
        if key_dim <= 2 * MIN_TILE or hopper:  # whose shared memory holds a wider transition, too
            chunks = piece_chunks(batch, row_chunks, heads, value_dim, processors)
        if chunks and documents * chunks >= row_chunks:  # the mean document is no longer than a piece
            chunks = 0
    if not chunks:
        return None
    tokens = chunks * chunk_tokens
    if bounds:
        return Cut(chunks, length // tokens + documents)
    return Cut(chunks, batch * ceil_div(length, tokens))


def _device(device: torch.device) -> tuple[int, bool]:
    """Multiprocessors, and whether it is a Hopper GPU.

    Without the caches of `sizes` and `launches`: torch.compile traces this, and warns of caches.
    """
    if device.type != "cuda":
        return 1, False
    properties = torch.cuda.get_device_properties(device)
    return properties.multi_processor_count, properties.major == 9


class Pieces:
    """The pieces of one call: where they lie, what each begins with and, in the backward, ends with; in fp32.

    Args:
        q, k, value_dim, bounds: of a call that `find_cut` cuts.
        arguments: what kernels of the call take, by name.
    """

    def __init__(
        self,
        q: Tensor,
        k: Tensor,
        value_dim: int,
        bounds: Sequence[Tensor],
        arguments: Mapping[str, Any],
    ) -> None:
        cut = find_cut(q, k, value_dim, bounds)
        segments = bounds[0].numel() - 1 if bounds else q.shape[0]
        self.count, self.programs = cut.pieces, cut.pieces * q.shape[2]
        self._segments = segments
        # Rows of a multiple of 16 bytes: a pointer's alignment decides which variant of a kernel is compiled.
        # The longest has the end of the last piece, too; there are never fewer pieces than segments.
        table = torch.empty(4, -(-(cut.pieces + 1) // 4) * 4, dtype=torch.int32, device=q.device)
        bounds, chunk, segment, self._offsets = table.unbind()
        self._arguments = {
            **arguments,
            **{"bounds": bounds, "piece_chunk": chunk, "piece_segment": segment},
            "piece_offsets": self._offsets,
            "n_pieces": cut.pieces,
            "piece_chunks": cut.chunks,
            # Whether the gates bound every transition: there are some, and keys have norm one.
            "FORGETS": arguments["GATED"] and arguments["L2NORM"],
            "BLOCK": 128,
        }
        run_kernel(cut_kernel, (segments,), self._arguments)

    @property
    def arguments(self) -> dict[str, Any]:
        """Those of a kernel that is to take the pieces for the documents of a packed row."""
        bounds, chunk = self._arguments["bounds"], self._arguments["piece_chunk"]
        return {**self._arguments, "cu_seqlens": bounds, "chunk_offsets": chunk, "PACKED": True}

    def start_states(
        self, v: Tensor, initial_state: Tensor | None, transitions: Tensor, options: Options
    ) -> Tensor:
        """The state at each piece's start [pieces, H, K, V]; fills `transitions` [pieces, H, K, K]."""
        (_, heads, key_dim, _), value_dim = transitions.shape, v.shape[-1]
        local = _empty(v, self.count, heads, value_dim, key_dim)
        tiles = ceil_div(value_dim, options["BV"]) + ceil_div(key_dim, options["BV"])
        arguments = {
            **self._arguments,
            **{"v": v, "initial_state": initial_state, "local": local, "transition": transitions},
            "HAS_INITIAL": initial_state is not None,
        }
        run_kernel(piece_state_kernel, (self.count * heads * tiles,), arguments, **options)
        return self._combine(local, transitions, initial_state, reverse=False)

    def end_gradients(
        self, do: Tensor, dfinal_state: Tensor | None, transitions: Tensor, options: Options
    ) -> Tensor:
        """The gradient of the state at each piece's end [pieces, H, K, V]."""
        (_, heads, key_dim, _), value_dim = transitions.shape, do.shape[-1]
        local = _empty(do, self.count, heads, value_dim, key_dim)
        tiles = ceil_div(value_dim, options["BV"])
        arguments = {
            **self._arguments,
            **{"do": do, "dfinal_state": dfinal_state, "local": local},
            "HAS_FINAL": dfinal_state is not None,
        }
        run_kernel(piece_adjoint_kernel, (self.count * heads * tiles,), arguments, **options)
        return self._combine(local, transitions, dfinal_state, reverse=True)

    def first(self, states: Tensor, out: Tensor) -> None:
        """Of `states` [pieces, ...] those of each segment's first piece."""
        torch.index_select(states, 0, self._offsets[: self._segments], out=out)

    def last(self, states: Tensor, out: Tensor) -> None:
        """Of `states` [pieces, ...] those of each segment's last piece."""
        torch.index_select(states, 0, self._offsets[1 : self._segments + 1] - 1, out=out)

    def _combine(self, local: Tensor, transitions: Tensor, edge: Tensor | None, reverse: bool) -> Tensor:
        _, heads, value_dim, key_dim = local.shape
        states = local.new_empty(self.count, heads, key_dim, value_dim)
        arguments = {
            **self._arguments,
            **{"local": local, "transition": transitions, "edge": edge, "states": states},
            **{"BV": MIN_TILE, "HAS_EDGE": edge is not None, "REVERSE": reverse},
        }
        programs = self._segments * heads * ceil_div(value_dim, MIN_TILE)
        # Of K = 256, and of float32, one Phi fills the shared memory; else the next one is on its way.
        large = key_dim > 2 * MIN_TILE or transitions.dtype == torch.float32
        warps, stages = (8, 1) if large else (4, 2)
        run_kernel(combine_kernel, (programs,), arguments, num_warps=warps, num_stages=stages)
        return states


def _empty(like: Tensor, *shape: int) -> Tensor:
    return like.new_empty(shape, dtype=torch.float32)
