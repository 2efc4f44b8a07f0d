"""The `triton` backend: autograd function of `delta_product`, and the tensors that its kernels write.

Narrow heads in float32 run Householder step by step (`fused_recurrent`), all others by chunks: `select`
decides. For the backward the chunk forward keeps, in the dtype of q: u per Householder step (V elements a
head; v itself is not kept) and one state per chunk of M = 64 steps; and in 16 bits, where q has them, T per
step and P diag(beta) per token (M elements each). The recurrent one keeps v and the state before each step.

`chunk_launch` launches the kernels; torch.compile traces this module, and each pass is one node.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from fla_train.kernels.delta_product.select import CHUNK_STEPS, check_limits, select_for
from fla_train.kernels.delta_product.triton.chunk_arguments import make_prepared
from fla_train.kernels.delta_product.triton.chunk_launch import delta_product_backward, delta_product_forward
from fla_train.kernels.sizes import ceil_div


def triton_delta_product(
    q: Tensor, k: Tensor, v: Tensor, beta: Tensor, g: Tensor | None, *, scale: float,
    initial_state: Tensor | None, output_final_state: bool, cu_seqlens: Tensor | None, qk_l2norm: bool,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """Run `delta_product` on validated inputs; shapes and results as there, differentiable in all tensors.

    The chunk kernels treat gates below 2^-50 per token as 2^-50.

    Raises:
        ValueError: see `check_limits`.
    """
    check_limits(q.dtype, q.shape[3], k.shape[2])
    tensors = [x if x is None else x.contiguous() for x in (q, k, v, beta, g, initial_state)]
    cu_seqlens = None if cu_seqlens is None else cu_seqlens.contiguous()
    keep = torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors)
    bounds = () if cu_seqlens is None else (cu_seqlens,)
    if bounds and select_for(q, v, cu_seqlens, qk_l2norm).algorithm == "chunk":
        bounds += _chunk_bounds(cu_seqlens, q.shape[1], CHUNK_STEPS // k.shape[2])
    return _DeltaProduct.apply(*tensors, scale, qk_l2norm, output_final_state, keep, *bounds)


def _chunk_bounds(cu_seqlens: Tensor, length: int, chunk_tokens: int) -> tuple[Tensor, Tensor]:
    """Return each document's first chunk [S + 1] and each chunk's document [chunks] of a packed row.

    The number of chunks is an upper bound, since reading `cu_seqlens` would wait for the device.
    """
    documents = cu_seqlens.numel() - 1
    ends = ((cu_seqlens.diff() + chunk_tokens - 1) // chunk_tokens).cumsum(0)
    numbers = torch.arange(length // chunk_tokens + documents, device=ends.device, dtype=ends.dtype)
    chunk_sequence = torch.searchsorted(ends, numbers, right=True).clamp_(max=documents - 1)
    return torch.nn.functional.pad(ends, (1, 0)), chunk_sequence


class _DeltaProduct(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx, q, k, v, beta, g, initial_state, scale, qk_l2norm, output_final_state, keep, *bounds
    ) -> tuple[Tensor, Tensor | None]:
        (batch, length, _, key_dim), (num_householder, heads, value_dim) = q.shape, v.shape[2:]
        selection = select_for(q, v, bounds[0] if bounds else None, qk_l2norm)
        sequences = bounds[0].numel() - 1 if bounds else batch
        o = v.new_empty(batch, length, heads, value_dim)
        final_state = beta.new_empty(sequences, heads, key_dim, value_dim) if output_final_state else None
        prepared, u, states, transitions = [], None, None, None
        if selection.algorithm == "chunk":
            chunks = bounds[2].numel() if bounds else batch * ceil_div(length, CHUNK_STEPS // num_householder)
            prepared = make_prepared(q, beta, chunks, g is not None, qk_l2norm)
            if keep:
                u, states = torch.empty_like(v), q.new_empty(chunks, heads, value_dim, key_dim)
            if selection.num_segments:
                # With |k| <= 1 and beta <= 2 no element is beyond 1.
                dtype = torch.float32 if q.dtype == torch.float32 else torch.float16
                transitions = q.new_empty(selection.num_segments, heads, key_dim, key_dim, dtype=dtype)
        elif keep:
            states = v.new_empty(*v.shape[:-1], key_dim, value_dim)
        delta_product_forward(
            q, k, v, beta, g, initial_state, bounds, scale, qk_l2norm,
            o, prepared, u, states, transitions, final_state,
        )  # fmt: skip
        ctx.set_materialize_grads(False)
        ctx.scale, ctx.qk_l2norm, ctx.num_bounds = scale, qk_l2norm, len(bounds)
        if keep:
            values = v if u is None else u
            ctx.save_for_backward(q, k, beta, g, values, states, transitions, *bounds, *prepared)
        return o, final_state

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, do: Tensor | None, dfinal_state: Tensor | None) -> tuple[Tensor | None, ...]:
        q, k, beta, g, u, states, transitions, *kept = ctx.saved_tensors
        bounds, prepared = kept[: ctx.num_bounds], kept[ctx.num_bounds :]
        # Where the graph is not kept nobody needs u again. chunk_bwd_fused reads each element of it before it
        # writes that of dv, which may have its place.
        spent = not torch.compiler.is_compiling() and not _keeps_graph()
        cu_seqlens = bounds[0] if bounds else None
        in_place = spent and select_for(q, u, cu_seqlens, ctx.qk_l2norm).fused_backward
        dv = u if in_place else torch.empty_like(u)
        do = torch.zeros_like(dv[:, :, 0]).contiguous() if do is None else do.contiguous()
        dfinal_state = None if dfinal_state is None else dfinal_state.contiguous()
        dq, dk, dbeta = (torch.empty_like(x) for x in (q, k, beta))
        dg = None if g is None else torch.empty_like(g)
        dinitial_state = None
        if ctx.needs_input_grad[5]:
            sequences, (heads, value_dim) = cu_seqlens.numel() - 1 if bounds else len(q), u.shape[-2:]
            dinitial_state = beta.new_empty(sequences, heads, q.shape[-1], value_dim)
        delta_product_backward(
            q, k, beta, g, do, dfinal_state, bounds, ctx.scale, ctx.qk_l2norm,
            prepared, u, states, transitions,
            dq, dk, dv, dbeta, dg, dinitial_state,
        )  # fmt: skip
        return dq, dk, dv, dbeta, dg, dinitial_state, *[None] * (4 + ctx.num_bounds)


def _keeps_graph() -> bool:
    """Return whether the backward pass that runs may be followed by another of the same graph."""
    return torch._C._autograd._get_current_graph_task_keep_graph()
