"""Rotary position embedding of queries and keys in one launch: PyTorch definition and Triton kernel."""

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from fla_train.kernels.custom_op import custom_op
from fla_train.kernels.fused_ops.backend import resolve_backend
from fla_train.kernels.fused_ops.side_by_side import as_rows, row_stride
from fla_train.kernels.optional_triton import tl, triton
from fla_train.kernels.sizes import ceil_div, next_power_of_2

ROTARY_TILE = 2048  # pairs of channels per program of the Triton kernel


def rotary(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *, backend: str = "auto") -> tuple[Tensor, Tensor]:
    """Rotate channels (i, i + D/2) of each head by the angles of its position (arXiv 2104.09864).

    Differentiable in q and k; cos and sin get no gradient.

    Args:
        q: [B, T, H, D]; k: [B, T, H_kv, D], of one dtype.
        cos, sin: [T, D/2] of the angles, float32 (float64 for float64 q and k).
        backend: "torch", "triton" or "auto" (see `resolve_backend`).

    Returns:
        q and k rotated, in their shapes and dtype; computed in the dtype of `cos`.

    Raises:
        ValueError: a backend that is unknown or cannot run.
    """
    length, size = q.shape[1], q.shape[-1]
    assert (*k.shape[:2], k.shape[-1], k.dtype) == (*q.shape[:2], size, q.dtype)
    assert cos.shape == sin.shape == (length, size / 2)
    if resolve_backend(backend, q) == "triton":
        return _Rotary.apply(q, k, cos, sin)
    cos, sin = cos.detach(), sin.detach()
    return _rotate(q, cos, sin), _rotate(k, cos, sin)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    left, right = x.chunk(2, dim=-1)
    cos, sin = cos[:, None], sin[:, None]  # [T, 1, D/2]
    return torch.cat([left * cos - right * sin, right * cos + left * sin], dim=-1).to(x.dtype)


class _Rotary(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, cos, sin):
        cos, sin = cos.contiguous(), sin.contiguous()
        ctx.save_for_backward(cos, sin)
        return _rotary_launch(q, k, cos, sin, False)

    @staticmethod
    @once_differentiable
    def backward(ctx, dq, dk):
        return *_rotary_launch(dq, dk, *ctx.saved_tensors, True), None, None


def _rotary_launch(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, inverse: bool) -> tuple[Tensor, Tensor]:
    # A list: torch.compile of torch 2.15 cannot trace a generator that runs another one, here in `as_rows`.
    q, k = [as_rows(x.flatten(-2)).view(x.shape) for x in (q, k)]
    rotated = q.new_empty(q.shape), k.new_empty(k.shape)
    rotary_rotate(q, k, cos, sin, inverse, *rotated)
    return rotated


@custom_op(mutates=("rotated_q", "rotated_k"))
def rotary_rotate(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, inverse: bool, rotated_q: Tensor, rotated_k: Tensor
) -> None:
    """Fill the rotated q and k, turned the other way if `inverse`."""
    batch, length, heads, size = q.shape
    block_heads, block_pairs = next_power_of_2(heads), next_power_of_2(size // 2)
    tokens = max(1, ROTARY_TILE // (block_heads * block_pairs))
    rotate_kernel[(ceil_div(batch * length, tokens),)](
        q, k, cos, sin, rotated_q, rotated_k, batch * length, length,
        **dict(H=heads, HK=k.shape[2], P=size // 2, INVERSE=inverse),
        **dict(S_q=row_stride(q.flatten(-2)), S_k=row_stride(k.flatten(-2))),
        **dict(BT=tokens, BH=block_heads, BHK=next_power_of_2(k.shape[2]), BP=block_pairs),
    )  # fmt: skip


@triton.jit
def rotate_heads(
    x, y, o_t, n_tokens, b_cos, b_sin, H: tl.constexpr, P: tl.constexpr, S: tl.constexpr, BH: tl.constexpr
):
    """Rotate the heads of tokens `o_t` [BT] by angles [BT, 1, BP]: x, y [n_tokens, H, 2 P].

    Tokens of x are S elements apart.
    """
    o_h, o_p = tl.arange(0, BH), tl.arange(0, b_cos.shape[2])
    p_head = o_h[None, :, None] * (2 * P) + o_p[None, None, :]
    p_left, p_y = o_t[:, None, None] * S + p_head, o_t[:, None, None] * (2 * P * H) + p_head
    mask = (o_t < n_tokens)[:, None, None] & (o_h < H)[None, :, None] & (o_p < P)[None, None, :]
    b_left = tl.load(x + p_left, mask=mask, other=0.0).to(tl.float32)
    b_right = tl.load(x + p_left + P, mask=mask, other=0.0).to(tl.float32)
    tl.store(y + p_y, (b_left * b_cos - b_right * b_sin).to(y.dtype.element_ty), mask=mask)
    tl.store(y + p_y + P, (b_right * b_cos + b_left * b_sin).to(y.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["n_tokens"])
def rotate_kernel(
    q, k, cos, sin,  # [n_tokens, H, 2 P], [n_tokens, HK, 2 P], [length, P], [length, P]
    rotated_q, rotated_k,  # out, as q and k
    n_tokens, length,  # B T, T
    H: tl.constexpr, HK: tl.constexpr, P: tl.constexpr, S_q: tl.constexpr, S_k: tl.constexpr,
    INVERSE: tl.constexpr,
    BT: tl.constexpr, BH: tl.constexpr, BHK: tl.constexpr, BP: tl.constexpr,
):  # fmt: skip
    o_t = tl.program_id(0).to(tl.int64) * BT + tl.arange(0, BT)
    o_p = tl.arange(0, BP)
    p_angle = (o_t % length)[:, None] * P + o_p[None, :]
    m_angle = (o_t < n_tokens)[:, None] & (o_p < P)[None, :]
    b_cos = tl.load(cos + p_angle, mask=m_angle, other=0.0)[:, None, :]
    b_sin = tl.load(sin + p_angle, mask=m_angle, other=0.0)[:, None, :]
    if INVERSE:
        b_sin = -b_sin
    rotate_heads(q, rotated_q, o_t, n_tokens, b_cos, b_sin, H, P, S_q, BH)
    rotate_heads(k, rotated_k, o_t, n_tokens, b_cos, b_sin, HK, P, S_k, BHK)
