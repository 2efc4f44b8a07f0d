"""Sequences cut into pieces that run at once, for calls with too few heads and sequences to fill the device.

`state_kernel` and `adjoint_kernel` have one program per sequence, head and tile of V. Where that leaves most
of the device idle, sequences are cut into pieces; `triton_pieces` finds the true state at each piece's start
(backwards, the gradient at its end), and the same two kernels then take the pieces for the documents of a
packed row. Everything follows from sizes: nothing is tuned and nothing waits for the device.

The cut is as stable as the uncut recurrence whatever the norm of the keys: an error in a piece's start is
carried on by the same transitions that carry on the rounding of the state itself.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fla_train.kernels.delta_product.launches import MIN_TILE, Options
from fla_train.kernels.delta_product.triton_common import CHUNK
from fla_train.kernels.delta_product.triton_pieces import (
    combine_kernel,
    cut_kernel,
    piece_adjoint_kernel,
    piece_state_kernel,
)
from fla_train.kernels.sizes import ceil_div

CHUNK_STEPS = CHUNK.value
# Of the serial kernels that share a multiprocessor, with tiles of 64 columns of V; 128 take two places.
PROGRAMS_PER_PROCESSOR = 2
# Measured on an H100 (docs/kernels.md): the extra pass over two or three pieces costs what it saves, so do
# the combination's steps over shorter ones; on shorter rows six more launches may cost more than is saved.
LEAST_PIECES, LEAST_CHUNKS, LEAST_ROW = 4, 16, 256

_forced: int | None = None


@contextmanager
def cutting(chunks: int) -> Iterator[None]:
    """Calls inside have pieces of so many chunks, 0 for none, whatever their sizes: for checks and tests."""
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
    (batch, length, heads, _), chunk_tokens, chunks = q.shape, CHUNK_STEPS // k.shape[2], _forced
    if chunks is None:
        chunks = piece_chunks(batch, ceil_div(length, chunk_tokens), heads, value_dim, _processors(q.device))
    if not chunks:
        return None
    tokens = chunks * chunk_tokens
    if bounds:
        return Cut(chunks, length // tokens + bounds[0].numel() - 1)
    return Cut(chunks, batch * ceil_div(length, tokens))


def _processors(device: torch.device) -> int:
    if device.type != "cuda":
        return 1  # the interpreter runs one program at a time
    return torch.cuda.get_device_properties(device).multi_processor_count


class Pieces:
    """The pieces of one call: where they lie, what each begins with and, in the backward, ends with; in fp32.

    Args:
        q, k, value_dim, bounds: of a call that `find_cut` cuts.
        sizes: the arguments that all kernels of the call share.
        forgets: whether the gates bound every transition: there are some, and keys have norm one.
    """

    def __init__(
        self,
        q: Tensor,
        k: Tensor,
        value_dim: int,
        bounds: Sequence[Tensor],
        sizes: Mapping[str, Any],
        forgets: bool,
    ) -> None:
        cut = find_cut(q, k, value_dim, bounds)
        segments = bounds[0].numel() - 1 if bounds else q.shape[0]
        self.count, self.programs = cut.pieces, cut.pieces * q.shape[2]
        self._chunks, self._sizes, self._segments = cut.chunks, sizes, segments
        self._forgets = forgets
        # Rows of a multiple of 16 bytes: a pointer's alignment decides which variant of a kernel is compiled.
        table = torch.empty(4, -(-(cut.pieces + 1) // 4) * 4, dtype=torch.int32, device=q.device)
        lengths = (cut.pieces + 1, cut.pieces, cut.pieces, segments + 1)
        bounds, chunk, segment, self._offsets = (x[:n] for x, n in zip(table, lengths, strict=True))
        self._spans = {"bounds": bounds, "piece_chunk": chunk, "piece_segment": segment}
        cut_kernel[(segments,)](
            *(sizes["cu_seqlens"], sizes["chunk_offsets"]),
            **self._spans,
            piece_offsets=self._offsets,
            T=sizes["T"],
            NT=sizes["NT"],
            n_pieces=cut.pieces,
            piece_chunks=cut.chunks,
            C=sizes["C"],
            PACKED=sizes["PACKED"],
            BLOCK=128,
        )

    @property
    def sizes(self) -> dict[str, Any]:
        """The shared arguments for a kernel that is to take the pieces for the documents of a packed row."""
        tables = {"cu_seqlens": self._spans["bounds"], "chunk_offsets": self._spans["piece_chunk"]}
        return {**self._sizes, **tables, "PACKED": True}

    def start_states(
        self,
        k: Tensor,
        v: Tensor,
        products: Mapping[str, Tensor],
        initial_state: Tensor | None,
        transitions: Tensor,
        options: Options,
    ) -> Tensor:
        """The state at each piece's start [pieces, H, K, V]; fills `transitions` [pieces, H, K, K]."""
        heads, key_dim, value_dim = *k.shape[3:], v.shape[-1]
        local = transitions.new_empty(self.count, heads, value_dim, key_dim)
        tiles = ceil_div(value_dim, options["BV"]) + ceil_div(key_dim, options["BV"])
        piece_state_kernel[(self.count * heads * tiles,)](
            *(k, v),
            **{name: products[name] for name in ("x", "read", "write", "decay")},
            initial_state=initial_state,
            local=local,
            transition=transitions,
            **self._spans,
            piece_offsets=self._offsets,
            piece_chunks=self._chunks,
            V=value_dim,
            HAS_INITIAL=initial_state is not None,
            FORGETS=self._forgets,
            **self._pick("n_total", "H", "K", "N", "C", "M", "BK", "OPERAND", "PRECISION"),
            **options,
        )
        return self._combine(local, transitions, initial_state, reverse=False)

    def end_gradients(
        self,
        q: Tensor,
        k: Tensor,
        do: Tensor,
        products: Mapping[str, Tensor],
        dfinal_state: Tensor | None,
        transitions: Tensor,
        options: Options,
    ) -> Tensor:
        """The gradient of the state at each piece's end [pieces, H, K, V]."""
        heads, key_dim, value_dim = *k.shape[3:], do.shape[-1]
        local = transitions.new_empty(self.count, heads, value_dim, key_dim)
        piece_adjoint_kernel[(self.count * heads * ceil_div(value_dim, options["BV"]),)](
            *(q, k, do),
            **products,
            dfinal_state=dfinal_state,
            local=local,
            **self._spans,
            piece_offsets=self._offsets,
            V=value_dim,
            HAS_FINAL=dfinal_state is not None,
            FORGETS=self._forgets,
            **self._pick("n_total", "H", "K", "N", "C", "M", "BC", "BK", "OPERAND", "PRECISION"),
            **options,
        )
        return self._combine(local, transitions, dfinal_state, reverse=True)

    def first(self, states: Tensor, out: Tensor) -> None:
        """Of `states` [pieces, ...] those of each segment's first piece."""
        torch.index_select(states, 0, self._offsets[:-1], out=out)

    def last(self, states: Tensor, out: Tensor) -> None:
        """Of `states` [pieces, ...] those of each segment's last piece."""
        torch.index_select(states, 0, self._offsets[1:] - 1, out=out)

    def _combine(self, local: Tensor, transitions: Tensor, edge: Tensor | None, reverse: bool) -> Tensor:
        _, heads, value_dim, key_dim = local.shape
        states = local.new_empty(self.count, heads, key_dim, value_dim)
        combine_kernel[(self._segments * heads * ceil_div(value_dim, MIN_TILE),)](
            *(local, transitions, edge, states, self._offsets),
            V=value_dim,
            BV=MIN_TILE,
            HAS_EDGE=edge is not None,
            REVERSE=reverse,
            **self._pick("H", "K", "BK", "PRECISION"),
            num_warps=4 if key_dim <= 2 * MIN_TILE else 8,
            num_stages=1,
        )
        return states

    def _pick(self, *names: str) -> dict[str, Any]:
        return {name: self._sizes[name] for name in names}
