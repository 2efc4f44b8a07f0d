"""The definition of the operator, token by token in plain PyTorch; every other backend is tested against it.

Slow, and memory hungry under autograd, which keeps a state per sub-step. It uses elementwise operations and
sums only, so that autocast leaves it alone.
"""

import torch
from torch import Tensor

from fla_train.kernels.delta_product.interface import compute_dtype, l2norm


def recurrent_delta_product(
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
    """`delta_product` on validated inputs; shapes and dtypes as there. Autograd gives the gradients."""
    if cu_seqlens is None:
        o, state = _run(q, k, v, beta, g, initial_state, scale, qk_l2norm)
    else:
        lengths = cu_seqlens.diff().tolist()
        documents = [
            x.split(lengths, dim=1) if x is not None else [None] * len(lengths) for x in (q, k, v, beta, g)
        ]
        states = initial_state.split(1) if initial_state is not None else [None] * len(lengths)
        runs = [_run(*x, scale, qk_l2norm) for x in zip(*documents, states, strict=True)]
        o = torch.cat([o for o, _ in runs], dim=1)
        state = torch.cat([state for _, state in runs])
    return o, state if output_final_state else None


def recurrent_step(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    g: Tensor | None,
    *,
    state: Tensor,
    scale: float,
    qk_l2norm: bool,
) -> tuple[Tensor, Tensor]:
    """`delta_product_step` on validated inputs; shapes and dtypes as there."""
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


def _run(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    g: Tensor | None,
    state: Tensor | None,
    scale: float,
    qk_l2norm: bool,
) -> tuple[Tensor, Tensor]:
    """Every token of equally long sequences; returns o [B, T, H, V] and the state [B, H, K, V]."""
    (batch, tokens, heads, key_dim), value_dim = q.shape, v.shape[-1]
    if state is None:
        state = q.new_zeros(batch, heads, key_dim, value_dim, dtype=compute_dtype(q))
    outputs = []
    for t in range(tokens):
        gate = None if g is None else g[:, t]
        step = q[:, t], k[:, t], v[:, t], beta[:, t], gate
        o, state = recurrent_step(*step, state=state, scale=scale, qk_l2norm=qk_l2norm)
        outputs.append(o)
    return torch.stack(outputs, dim=1) if outputs else v.new_empty(batch, 0, heads, value_dim), state
