"""Keyword arguments that the chunk kernels of one call share, derived from its tensors."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fla_train.kernels.delta_product.select import CHUNK_STEPS
from fla_train.kernels.delta_product.triton.launch_table import MIN_TILE
from fla_train.kernels.optional_triton import tl, triton
from fla_train.kernels.sizes import ceil_div, next_power_of_2

# Least rows of the tiles of q: 16 gave dk that changes from run to run where V <= 64 (launch_table.MIN_TILE).
MIN_TOKENS = 32
# The interpreter's bf16 products are garbage, so it gets fp32 operands.
INTERPRETED = triton.knobs.runtime.interpret
FP32_PRECISION = "tf32x3"  # precision of products of fp32 operands
OPERAND_DTYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}
# A head's row of scalars is as long as a multiple of this: where 16 does not divide a row's length, which it
# seldom does in evaluations, Triton would compile each kernel once more.
ROW_MULTIPLE = 16


@dataclass(frozen=True)
class Call:
    """Keyword arguments that several kernels of one call share, and its numbers of programs."""

    factors: dict[str, Tensor]  # from chunk_prepare_wy: wy, p and the row factors
    rows: dict[str, Tensor | None]  # from chunk_prepare_wy: cumulative gates and norms, or None
    sequences: dict[str, Any]  # where sequences and their chunks lie
    chunk_sequence: Tensor | None
    sizes: dict[str, int]
    tiles: dict[str, Any]
    num_sequences: int
    num_chunks: int

    @staticmethod
    def of(
        q: Tensor,
        k: Tensor,
        beta: Tensor,
        gated: bool,
        bounds: Sequence[Tensor],
        qk_l2norm: bool,
        prepared: Sequence[Tensor],
    ) -> "Call":
        (batch, length, key_heads, key_dim), (num_householder, heads) = q.shape, beta.shape[2:]
        chunk_tokens = CHUNK_STEPS // num_householder
        row_chunks = ceil_div(length, chunk_tokens)
        cu_seqlens, chunk_offsets, chunk_sequence = bounds or (None, None, None)
        num_chunks = chunk_sequence.numel() if bounds else batch * row_chunks
        factors = dict(zip(prepared_shapes(q, beta, num_chunks, gated, qk_l2norm), prepared, strict=True))
        return Call(
            rows={name: factors.pop(name, None) for name in ("g_cum", "q_rnorm", "k_rnorm")},
            factors=factors,
            sequences=dict(
                cu_seqlens=cu_seqlens, chunk_offsets=chunk_offsets, n_total=row_length(q),
                T=length, NT=row_chunks, PACKED=bool(bounds),
            ),
            chunk_sequence=chunk_sequence,
            sizes=dict(H=heads, G=heads // key_heads, K=key_dim, N=num_householder, C=chunk_tokens),
            tiles=dict(
                M=CHUNK_STEPS,
                BC=max(MIN_TOKENS, next_power_of_2(chunk_tokens)),
                BK=max(MIN_TILE, next_power_of_2(key_dim)),
                L2NORM=qk_l2norm,
                OPERAND=tl.float32 if INTERPRETED else OPERAND_DTYPES[q.dtype],
                PRECISION=FP32_PRECISION,
            ),
            num_sequences=cu_seqlens.numel() - 1 if bounds else batch,
            num_chunks=num_chunks,
        )  # fmt: skip


def prepared_shapes(
    q: Tensor, beta: Tensor, chunks: int, gated: bool, qk_l2norm: bool
) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the tensors that `chunk_prepare_wy` writes, in the order of their list."""
    tokens, (num_householder, heads) = q.shape[0] * q.shape[1], beta.shape[2:]
    by_token, by_step = (heads, row_length(q)), (heads, row_length(q) * num_householder)
    shapes = {
        "wy": (tokens * num_householder, heads, CHUNK_STEPS),
        "p": (tokens, heads, CHUNK_STEPS),
        **{"read": by_step, "write": by_step, "query": by_token},
        **{"decay": (chunks, heads), "peak": (chunks, heads)},
    }
    shapes |= {"g_cum": by_token} if gated else {}
    return shapes | ({"q_rnorm": by_token, "k_rnorm": by_step} if qk_l2norm else {})


def make_prepared(q: Tensor, beta: Tensor, chunks: int, gated: bool, qk_l2norm: bool) -> list[Tensor]:
    """Allocate the tensors of `prepared_shapes`; the two matrices have 16 bits if possible."""
    dtype = torch.float16 if in_half(q, qk_l2norm) else q.dtype
    return [
        beta.new_empty(shape, dtype=dtype if name in ("wy", "p") else beta.dtype)
        for name, shape in prepared_shapes(q, beta, chunks, gated, qk_l2norm).items()
    ]


def row_length(q: Tensor) -> int:
    """Return scalars in a head's row of the tables by token: B * T, or a few more."""
    return ROW_MULTIPLE * ceil_div(q.shape[0] * q.shape[1], ROW_MULTIPLE)


def in_half(q: Tensor, qk_l2norm: bool) -> bool:
    """Return whether the triangle is inverted, and the inverse kept, in fp16.

    With unit keys and beta <= 2 the entries of both are at most 2.
    """
    return qk_l2norm and q.dtype != torch.float32 and not INTERPRETED


def pick(arguments: dict[str, Any], *names: str) -> dict[str, Any]:
    """Return the arguments of these names."""
    return {name: arguments[name] for name in names}
