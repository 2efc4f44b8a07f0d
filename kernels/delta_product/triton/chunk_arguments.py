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
FP32_PRECISION = "tf32x3"  # of products of fp32 operands
OPERAND_DTYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}
# A head's row of scalars is as long as a multiple of this: where 16 does not divide a row's length, which it
# seldom does in evaluations, Triton would compile each kernel once more.
ROW_MULTIPLE = 16


@dataclass(frozen=True)
class Call:
    """Keyword arguments that several kernels of one call share, and its numbers of programs."""

    factors: dict[str, Tensor]  # from chunk_prepare_wy: wy, p and the row factors
    rows: dict[str, Tensor | None]  # from there, too: cumulative gates (None without), norms (None without)
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
        names = ("wy", "p", "read", "write", "query", "decay", "peak")
        rest = list(prepared[len(names) :])
        return Call(
            factors=dict(zip(names, prepared, strict=False)),
            rows=dict(
                g_cum=rest.pop(0) if gated else None,
                q_rnorm=rest[0] if qk_l2norm else None,
                k_rnorm=rest[1] if qk_l2norm else None,
            ),
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
            num_chunks=chunk_sequence.numel() if bounds else batch * row_chunks,
        )  # fmt: skip


def row_length(q: Tensor) -> int:
    """Scalars in a head's row of the tables by token: B * T, or a few more."""
    return ROW_MULTIPLE * ceil_div(q.shape[0] * q.shape[1], ROW_MULTIPLE)


def in_half(q: Tensor, qk_l2norm: bool) -> bool:
    """Whether the triangle is inverted, and the inverse kept, in fp16.

    With unit keys and beta <= 2 the entries of both are at most 2.
    """
    return qk_l2norm and q.dtype != torch.float32 and not INTERPRETED


def pick(arguments: dict[str, Any], *names: str) -> dict[str, Any]:
    """Those of the arguments that a kernel takes."""
    return {name: arguments[name] for name in names}
