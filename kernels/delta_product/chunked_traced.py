"""The chunked backend as torch.compile sees it: two opaque calls, one each way.

The second runs the forward again, because the number of chunks, and with it the shape of what would be kept,
depends on the values of `cu_seqlens`.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from fla_train.kernels.custom_op import custom_op as opaque
from fla_train.kernels.delta_product.chunk_torch import run_chunks


def run_traced(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    g: Tensor | None,
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
    scale: float,
    qk_l2norm: bool,
) -> tuple[Tensor, Tensor]:
    """`run_chunks` for fake tensors."""
    return _Traced.apply(q, k, v, beta, g, initial_state, cu_seqlens, scale, qk_l2norm)


class _Traced(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        beta: Tensor,
        g: Tensor | None,
        initial_state: Tensor | None,
        cu_seqlens: Tensor | None,
        scale: float,
        qk_l2norm: bool,
    ) -> tuple[Tensor, Tensor]:
        sequences = q.shape[0] if cu_seqlens is None else cu_seqlens.numel() - 1
        o = q.new_empty(*q.shape[:3], v.shape[-1])
        final_state = beta.new_empty(sequences, *q.shape[2:], v.shape[-1])
        chunked_forward(q, k, v, beta, g, initial_state, cu_seqlens, scale, qk_l2norm, o, final_state)
        ctx.save_for_backward(q, k, v, beta, g, initial_state, cu_seqlens)
        ctx.scale, ctx.qk_l2norm = scale, qk_l2norm
        ctx.set_materialize_grads(False)
        return o, final_state

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_o: Tensor | None, d_final_state: Tensor | None) -> tuple[Tensor | None, ...]:
        inputs = ctx.saved_tensors
        gradients = [None if x is None else torch.empty_like(x) for x in inputs[:6]]
        present = [x for x in gradients if x is not None]
        chunked_backward(*inputs, ctx.scale, ctx.qk_l2norm, d_o, d_final_state, present)
        return *gradients, None, None, None


@opaque(mutates=("o", "final_state"))
def chunked_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    g: Tensor | None,
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
    scale: float,
    qk_l2norm: bool,
    o: Tensor,
    final_state: Tensor,
) -> None:
    """Fill the outputs."""
    with torch.no_grad():
        outputs = run_chunks(q, k, v, beta, g, initial_state, cu_seqlens, scale, qk_l2norm)
    for filled, output in zip((o, final_state), outputs, strict=True):
        filled.copy_(output)


@opaque(mutates=("gradients",))
def chunked_backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    g: Tensor | None,
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
    scale: float,
    qk_l2norm: bool,
    d_o: Tensor | None,
    d_final_state: Tensor | None,
    gradients: Sequence[Tensor],
) -> None:
    """Fill the gradients of those inputs that are there."""
    leaves = [x if x is None else x.detach().requires_grad_() for x in (q, k, v, beta, g, initial_state)]
    with torch.enable_grad():
        outputs = run_chunks(*leaves, cu_seqlens, scale, qk_l2norm)
    used = [pair for pair in zip(outputs, (d_o, d_final_state), strict=True) if pair[1] is not None]
    outputs, d_outputs = zip(*used, strict=True)
    found = torch.autograd.grad(outputs, [x for x in leaves if x is not None], d_outputs)
    for filled, gradient in zip(gradients, found, strict=True):
        filled.copy_(gradient)
