"""The `recurrent` backend: the operator's definition, token by token in PyTorch, and the reference in tests.

It is slow, and autograd keeps a state per Householder step. It has elementwise operations and sums only,
which autocast does not change.
"""

from functools import partial
from itertools import pairwise

import torch
from torch import Tensor

L2NORM_EPS = 1e-6


def compute_dtype(q: Tensor) -> torch.dtype:
    """Return dtype of beta, gates, states and all arithmetic: float64 for float64 queries, else float32."""
    return torch.float64 if q.dtype == torch.float64 else torch.float32


def l2norm(x: Tensor) -> Tensor:
    """Return x / sqrt(|x|^2 + 1e-6) over the last axis in the dtype of `x`: first cast to `compute_dtype`."""
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + L2NORM_EPS)


def recurrent_delta_product(
    q: Tensor, k: Tensor, v: Tensor, beta: Tensor, g: Tensor | None, *, scale: float,
    initial_state: Tensor | None, output_final_state: bool, cu_seqlens: Tensor | None, qk_l2norm: bool,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """Run `delta_product` on validated inputs; shapes and dtypes as there. Autograd gives the gradients."""
    if initial_state is None:
        sequences = q.shape[0] if cu_seqlens is None else cu_seqlens.numel() - 1
        initial_state = beta.new_zeros(sequences, *q.shape[2:], v.shape[-1])
    step = partial(recurrent_step, scale=scale, qk_l2norm=qk_l2norm)
    bounds, states = [0, q.shape[1]], [initial_state]
    if cu_seqlens is not None:
        bounds, states = cu_seqlens.tolist(), list(initial_state.split(1))
    outputs = []
    for s, (start, end) in enumerate(pairwise(bounds)):
        for t in range(start, end):
            gate = None if g is None else g[:, t]
            o, states[s] = step(q[:, t], k[:, t], v[:, t], beta[:, t], gate, state=states[s])
            outputs.append(o)
    return torch.stack(outputs, dim=1), torch.cat(states) if output_final_state else None


def recurrent_step(
    q: Tensor, k: Tensor, v: Tensor, beta: Tensor, g: Tensor | None, *,
    state: Tensor, scale: float, qk_l2norm: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return `delta_product_step` on validated inputs; shapes and dtypes as there."""
    dtype, kept = q.dtype, state.dtype
    q, k, v, state = (x.to(compute_dtype(q)) for x in (q, k, v, state))
    if qk_l2norm:
        q, k = l2norm(q), l2norm(k)
    if g is not None:
        state = g.exp()[..., None, None] * state
    for j in range(k.shape[1]):
        key, value = k[:, j].unsqueeze(-1), v[:, j]  # [B, H, K, 1], [B, H, V]
        error = beta[:, j].unsqueeze(-1) * (value - (key * state).sum(-2))
        state = state + key * error.unsqueeze(-2)
    o = scale * (q.unsqueeze(-1) * state).sum(-2)
    return o.to(dtype), state.to(kept)
