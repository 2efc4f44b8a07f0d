"""The Triton backend of `delta_product`: launches of its four kernels and their autograd function.

Forward: `prepare_kernel` (all chunks at once), then `state_kernel` (serial over chunks). Backward:
`adjoint_kernel` (serial), then `gradient_kernel` (all chunks at once). There are no atomics, so results are
reproducible to the bit. For the backward the forward keeps, in the dtype of q: X and E per sub-step (M and V
elements a head; v itself is not kept), P D per token (M elements), and one state per chunk of M = 64 steps.
Launch configurations are fixed, so no call ever tunes; the tests marked `gpu` check them.
"""

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from fla_train.kernels.delta_product.contract import L2NORM_EPS
from fla_train.kernels.delta_product.triton_backward import adjoint_kernel, gradient_kernel
from fla_train.kernels.delta_product.triton_common import CHUNK
from fla_train.kernels.delta_product.triton_forward import (
    LOG2E,
    MIN_LOG2_DECAY,
    prepare_kernel,
    state_kernel,
)

# Least extent of the tiles of K and V. On Hopper, Triton 3.6 compiled tiles of 32 columns to wrong dk and to
# illegal accesses (measured 2026-11-21 with its ptxas 12.8); narrower heads are padded with zeros instead.
MIN_TILE = 64
# Least rows of the tiles of q, for the same reason: 16 gave irreproducible dk where V <= 64.
MIN_TOKENS = 32
# The interpreter's bf16 products are garbage, so it gets fp32 operands.
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
    """`delta_product` on validated inputs; shapes and results as there, differentiable in every tensor.

    Gates below 2^-50 per token count as zero.

    Raises:
        ValueError: for float64, over 64 sub-steps per token, or a key dimension over 256 (128 in float32).
    """
    if q.dtype not in OPERAND_DTYPES:
        raise ValueError(f"the triton backend takes no {q.dtype}: choose backend=recurrent or chunked")
    if k.shape[2] > CHUNK.value:
        raise ValueError(
            f"the triton backend takes at most {CHUNK.value} sub-steps per token, got {k.shape[2]}"
        )
    limit = 128 if q.dtype == torch.float32 else 256  # the tiles of a chunk must fit in shared memory
    if q.shape[3] > limit:
        raise ValueError(
            f"the triton backend takes a key dimension of at most {limit} in {q.dtype}, got {q.shape[3]}"
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
    chunks: int  # over all segments; for a packed row an upper bound, since reading cu_seqlens would wait
    value_tiles: int
    shared: dict[str, Any]  # arguments of every kernel
    parallel: dict[str, Any]  # further ones of the kernels that run over all chunks at once
    value: dict[str, int]  # further ones of the kernels that read v or its like
    inverse: tl.dtype  # of the operands that invert a chunk's triangle
    gradient: dict[str, int]  # further ones of `gradient_kernel`, with its launch options
    narrow: bool  # tiles small enough for four warps and two stages

    @property
    def parallel_grid(self) -> tuple[int]:
        return (self.chunks * self.heads,)

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
    key_tile = max(MIN_TILE, triton.next_power_of_2(key_dim))
    narrow = key_tile <= 128 and q.dtype != torch.float32
    return _Plan(
        segments=segments,
        heads=heads,
        chunks=chunks,
        value_tiles=triton.cdiv(value_dim, MIN_TILE),
        shared={
            "cu_seqlens": cu_seqlens,
            "chunk_offsets": offsets,
            "n_total": batch * length,
            "T": length,
            "NT": row_chunks,
            "H": heads,
            "K": key_dim,
            "N": sub_steps,
            "C": chunk_tokens,
            "M": CHUNK.value,
            "BC": max(MIN_TOKENS, triton.next_power_of_2(chunk_tokens)),
            "BK": key_tile,
            "PACKED": cu_seqlens is not None,
            "OPERAND": tl.float32 if INTERPRETED else OPERAND_DTYPES[q.dtype],
            "PRECISION": FP32_PRECISION,
        },
        parallel={
            "chunk_segment": chunk_segment,
            "scale": scale,
            "GATED": g is not None,
            "L2NORM": qk_l2norm,
        },
        value={"V": value_dim, "BV": MIN_TILE},
        # With unit keys and beta <= 2 the entries of the triangle and of its inverse are at most 2.
        inverse=tl.float16 if qk_l2norm and q.dtype != torch.float32 and not INTERPRETED else tl.float32,
        gradient=_gradient_options(value_dim, key_tile, sub_steps, narrow),
        narrow=narrow,
    )


def _gradient_options(value_dim: int, key_tile: int, sub_steps: int, narrow: bool) -> dict[str, int]:
    """Tile widths and launch options of `gradient_kernel` (docs/kernels.md has the times of others)."""
    options = {"V": value_dim, "BV": MIN_TILE, "BKO": MIN_TILE, "num_warps": 8, "num_stages": 1}
    if not narrow:
        return options
    options["BKO"] = key_tile
    if sub_steps > 1 and value_dim > MIN_TILE:
        return options | {"BV": 2 * MIN_TILE, "num_warps": 4}
    # Of three stages with more than two tiles of V, Triton 3.6 made wrong dk (measured 2026-11-22).
    return options | {"num_stages": 3 if value_dim <= 2 * MIN_TILE else 1}


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

        def scalars(*shape: int) -> Tensor:
            return beta.new_empty(shape)

        products = {
            "x": q.new_empty(sub_steps, heads, CHUNK.value),
            "p": q.new_empty(tokens, heads, CHUNK.value),
            "read": scalars(heads, sub_steps),
            "write": scalars(heads, sub_steps),
            "query": scalars(heads, tokens),
            "decay": scalars(plan.chunks, heads),
        }
        norms = {
            "gc": scalars(heads, tokens) if g is not None else None,
            "rq": scalars(heads, tokens) if plan.parallel["L2NORM"] else None,
            "rk": scalars(heads, sub_steps) if plan.parallel["L2NORM"] else None,
        }
        o = v.new_empty(batch, length, heads, value_dim)
        errors = torch.empty_like(v) if keep else None
        states = q.new_empty(plan.chunks, heads, value_dim, key_dim) if keep else None
        final_state = scalars(plan.segments, heads, key_dim, value_dim) if output_final_state else None
        with torch.cuda.device_of(q):
            prepare_kernel[plan.parallel_grid](
                *(q, k, beta, g),
                **products,
                **norms,
                **plan.shared,
                **plan.parallel,
                eps=L2NORM_EPS,
                INVERSE=plan.inverse,
                num_warps=4 if plan.narrow else 8,
                maxnreg=168 if plan.narrow else None,  # three programs share an SM
            )
            state_kernel[plan.serial_grid](
                *(q, k, v),
                **products,
                o=o,
                errors=errors,
                states=states,
                initial_state=initial_state,
                final_state=final_state,
                **plan.shared,
                **plan.value,
                HAS_INITIAL=initial_state is not None,
                STORE_FINAL=output_final_state,
                KEEP=keep,
                num_warps=4 if plan.narrow else 8,
                num_stages=2 if plan.narrow else 1,
            )
        ctx.set_materialize_grads(False)
        ctx.plan = plan
        ctx.names = *products, *norms
        saved = (*products.values(), *norms.values()) if keep else ()
        ctx.save_for_backward(q, k, beta, g, initial_state, errors, states, *saved)
        return o, final_state

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, do: Tensor | None, dfinal_state: Tensor | None) -> tuple[Tensor | None, ...]:
        plan = ctx.plan
        q, k, beta, g, initial_state, errors, states, *saved = ctx.saved_tensors
        prepared = dict(zip(ctx.names, saved, strict=True))
        norms = {name: prepared.pop(name) for name in ("gc", "rq", "rk")}
        dv = torch.empty_like(errors)
        do = torch.zeros_like(dv[:, :, 0]).contiguous() if do is None else do.contiguous()
        dfinal_state = None if dfinal_state is None else dfinal_state.contiguous()
        dq, dk, dbeta = (torch.empty_like(x) for x in (q, k, beta))
        dg = None if g is None else torch.empty_like(g)
        dinitial_state = torch.empty_like(initial_state) if ctx.needs_input_grad[5] else None
        dstates = torch.empty_like(states)
        with torch.cuda.device_of(q):
            adjoint_kernel[plan.serial_grid](
                *(q, k, do),
                **prepared,
                dv=dv,
                dstates=dstates,
                dfinal_state=dfinal_state,
                dinitial_state=dinitial_state,
                **plan.shared,
                **plan.value,
                HAS_FINAL=dfinal_state is not None,
                STORE_INITIAL=dinitial_state is not None,
                num_warps=4 if plan.narrow else 8,
                num_stages=2 if plan.narrow else 1,
            )
            gradient_kernel[plan.parallel_grid](
                *(q, k, beta, g, do, dv, errors),
                **norms,
                states=states,
                dstates=dstates,
                dq=dq,
                dk=dk,
                dbeta=dbeta,
                dg=dg,
                **plan.shared,
                **plan.parallel,
                **plan.gradient,
                MIN_LOG_DECAY=MIN_LOG2_DECAY.value / LOG2E.value,
            )
        return dq, dk, dv, dbeta, dg, dinitial_state, None, None, None
