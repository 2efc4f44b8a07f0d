"""The Triton backend of `delta_product`: launches of its four kernels and their autograd function.

Forward: `prepare_kernel` (all chunks at once), `state_kernel` (serial over chunks). Backward: `adjoint_kernel` (serial),
`gradient_kernel` (all chunks at once). No atomics: results are bit-reproducible. For the backward the forward keeps,
per head, X and P (2 M bytes per sub-step and per token in bf16) and one state per chunk of 64 sub-steps.
Launch configurations are fixed, so no call ever tunes; `tests/kernels/test_triton.py` checks all of them on a GPU.
"""

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from fla_train.kernels.delta_product.contract import L2NORM_EPS
from fla_train.kernels.delta_product.triton_backward import adjoint_kernel, gradient_kernel
from fla_train.kernels.delta_product.triton_common import CHUNK
from fla_train.kernels.delta_product.triton_forward import (
    LOG2E,
    MIN_LOG2_DECAY,
    prepare_kernel,
    state_kernel,
)
from torch import Tensor
from torch.autograd.function import once_differentiable

MAX_KEY_DIM = 256
# The interpreter computes no bf16 (its products are garbage): operands are upcast there. Chosen when triton loads.
INTERPRETED = triton.knobs.runtime.interpret
FP32_PRECISION = "tf32x3"  # of products of fp32 operands
OPERAND_DTYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


def triton_delta_product(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    g: Tensor | None,
    *,
    scale: float,
    initial_state: Tensor | None,
    output_final_state: bool,
    cu_seqlens: Tensor | None,
    qk_l2norm: bool,
) -> tuple[Tensor, Tensor | None]:
    """`delta_product` on validated inputs; shapes, dtypes and results as there, differentiable in every tensor.

    Gates below 2^-50 per token count as zero.

    Raises:
        ValueError: for float64, more than 64 sub-steps per token, or a key dimension over 256.
    """
    if q.dtype not in OPERAND_DTYPES:
        raise ValueError(f"the triton backend takes no {q.dtype}: choose backend=recurrent or chunked")
    if k.shape[2] > CHUNK.value:
        raise ValueError(
            f"the triton backend takes at most {CHUNK.value} sub-steps per token, got {k.shape[2]}"
        )
    if q.shape[3] > MAX_KEY_DIM:
        raise ValueError(
            f"the triton backend takes a key dimension of at most {MAX_KEY_DIM}, got {q.shape[3]}"
        )
    tensors = [x if x is None else x.contiguous() for x in (q, k, v, beta, g, initial_state)]
    plan = _make_plan(q, k, v, g, scale, cu_seqlens, qk_l2norm)
    keep = torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors)
    o, final_state = _DeltaProduct.apply(*tensors, plan, output_final_state, keep)
    return o, final_state


@dataclass(frozen=True)
class _Plan:
    """Sizes of one call, how its chunks lie, and the arguments that its kernels share."""

    segments: int  # sequences: batch rows, or packed documents
    heads: int
    chunks: (
        int  # over all segments; for a packed row an upper bound, so that the host need not read cu_seqlens
    )
    value_tiles: int
    shared: dict[str, Any]  # arguments of every kernel
    value_shape: dict[str, int]  # of the kernels that read v
    chunk_segment: Tensor | None  # [chunks], of the kernels that run over chunks

    @property
    def parallel_grid(self) -> tuple[int, int]:
        return self.chunks, self.heads

    @property
    def serial_grid(self) -> tuple[int]:
        return (self.segments * self.heads * self.value_tiles,)


def _make_plan(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None,
    scale: float,
    cu_seqlens: Tensor | None,
    qk_l2norm: bool,
) -> _Plan:
    (batch, length, heads, key_dim), sub_steps, value_dim = q.shape, k.shape[2], v.shape[-1]
    chunk_tokens = CHUNK.value // sub_steps
    row_chunks = triton.cdiv(length, chunk_tokens)
    segments, chunks, offsets, chunk_segment = batch, batch * row_chunks, None, None
    if cu_seqlens is not None:
        segments = cu_seqlens.numel() - 1
        chunks = length // chunk_tokens + segments
        ends = ((cu_seqlens.diff() + chunk_tokens - 1) // chunk_tokens).cumsum(0)
        offsets = torch.nn.functional.pad(ends, (1, 0))
        numbers = torch.arange(chunks, device=q.device, dtype=ends.dtype)
        chunk_segment = torch.searchsorted(ends, numbers, right=True).clamp_(max=segments - 1)
    value_tile = min(64, _padded(value_dim))
    return _Plan(
        segments=segments,
        heads=heads,
        chunks=chunks,
        value_tiles=triton.cdiv(value_dim, value_tile),
        shared={
            "cu_seqlens": cu_seqlens,
            "chunk_offsets": offsets,
            "scale": scale,
            "n_total": batch * length,
            "T": length,
            "NT": row_chunks,
            "H": heads,
            "K": key_dim,
            "N": sub_steps,
            "C": chunk_tokens,
            "M": CHUNK.value,
            "BC": _padded(chunk_tokens),
            "BK": _padded(key_dim),
            "GATED": g is not None,
            "L2NORM": qk_l2norm,
            "PACKED": cu_seqlens is not None,
            "OPERAND": tl.float32 if INTERPRETED else OPERAND_DTYPES[q.dtype],
            "PRECISION": FP32_PRECISION,
        },
        value_shape={"V": value_dim, "BV": value_tile},
        chunk_segment=chunk_segment,
    )


def _padded(size: int) -> int:
    """The tile extent that holds `size`: a power of two, and no less than a matrix instruction takes."""
    return max(16, triton.next_power_of_2(size))


def _warps(plan: _Plan, narrow: int, wide: int) -> int:
    return narrow if plan.shared["BK"] <= 128 else wide


class _DeltaProduct(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        beta: Tensor,
        g: Tensor | None,
        initial_state: Tensor | None,
        plan: _Plan,
        output_final_state: bool,
        keep: bool,
    ) -> tuple[Tensor, Tensor | None]:
        (batch, length, heads, key_dim), value_dim = q.shape, v.shape[-1]
        tokens, sub_steps = batch * length, batch * length * k.shape[2]
        gated, l2norm = plan.shared["GATED"], plan.shared["L2NORM"]

        def scalars(rows: int, wanted: bool = True) -> Tensor | None:
            return beta.new_empty(heads, rows) if wanted else None

        prepared = {
            "x": q.new_empty(sub_steps, heads, CHUNK.value),
            "p": q.new_empty(tokens, heads, CHUNK.value),
            "gc": scalars(tokens, gated),
            "rq": scalars(tokens, l2norm),
            "rk": scalars(sub_steps, l2norm),
            "bh": scalars(sub_steps),
        }
        o = torch.empty_like(v[:, :, 0])
        states = q.new_empty(plan.chunks, heads, value_dim, key_dim) if keep else None
        final_state = beta.new_empty(plan.segments, heads, key_dim, value_dim) if output_final_state else None
        with torch.cuda.device_of(q):
            prepare_kernel[plan.parallel_grid](
                q,
                k,
                beta,
                g,
                **prepared,
                **plan.shared,
                chunk_segment=plan.chunk_segment,
                eps=L2NORM_EPS,
                INVERSE_PRECISION=FP32_PRECISION,
                num_warps=_warps(plan, 4, 8),
            )
            state_kernel[plan.serial_grid](
                q,
                k,
                v,
                **prepared,
                o=o,
                states=states,
                initial_state=initial_state,
                final_state=final_state,
                **plan.shared,
                **plan.value_shape,
                HAS_INITIAL=initial_state is not None,
                STORE_FINAL=output_final_state,
                STORE_STATES=keep,
                num_warps=_warps(plan, 4, 8),
                num_stages=2,
            )
        ctx.set_materialize_grads(False)
        ctx.plan = plan
        ctx.prepared_names = tuple(prepared)
        ctx.save_for_backward(q, k, v, beta, g, initial_state, states, *prepared.values())
        return o, final_state

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, do: Tensor | None, dfinal_state: Tensor | None) -> tuple[Tensor | None, ...]:
        plan = ctx.plan
        q, k, v, beta, g, initial_state, states, *prepared = ctx.saved_tensors
        prepared = dict(zip(ctx.prepared_names, prepared, strict=True))
        do = torch.zeros_like(v[:, :, 0]) if do is None else do.contiguous()
        dfinal_state = None if dfinal_state is None else dfinal_state.contiguous()
        dq, dk, dv, dbeta = (torch.empty_like(x) for x in (q, k, v, beta))
        dg = None if g is None else torch.empty_like(g)
        dinitial_state = torch.empty_like(initial_state) if ctx.needs_input_grad[5] else None
        dstates = torch.empty_like(states)
        with torch.cuda.device_of(q):
            adjoint_kernel[plan.serial_grid](
                q,
                k,
                do,
                **prepared,
                dv=dv,
                dstates=dstates,
                dfinal_state=dfinal_state,
                dinitial_state=dinitial_state,
                **plan.shared,
                **plan.value_shape,
                HAS_FINAL=dfinal_state is not None,
                STORE_INITIAL=dinitial_state is not None,
                num_warps=_warps(plan, 4, 8),
                num_stages=2,
            )
            gradient_kernel[plan.parallel_grid](
                q,
                k,
                v,
                do,
                dv,
                **prepared,
                states=states,
                dstates=dstates,
                g=g,
                dq=dq,
                dk=dk,
                dbeta=dbeta,
                dg=dg,
                **plan.shared,
                **plan.value_shape,
                chunk_segment=plan.chunk_segment,
                MIN_LOG_DECAY=MIN_LOG2_DECAY.value / LOG2E.value,
                num_warps=8,
                num_stages=1,
            )
        return dq, dk, dv, dbeta, dg, dinitial_state, None, None, None
