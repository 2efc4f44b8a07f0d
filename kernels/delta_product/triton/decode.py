"""One token of `delta_product` in Triton: the state is read once and written once, whatever the sub-steps.

A decoding step moves the state and hardly anything else: 8 K V bytes a head in fp32, against
2 (n_h + 1) (K + V) for its inputs. A program holds a [K, BV] tile of a head's state in registers, one warp
for each 128 rows, so that the sums over K stay inside a warp or two, and applies the gate, all sub-steps and
the query to it.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from fla_train.kernels.cached_launch import run_kernel
from fla_train.kernels.custom_op import custom_op as opaque
from fla_train.kernels.delta_product.interface import L2NORM_EPS
from fla_train.kernels.sizes import ceil_div, next_power_of_2

# fp32 elements of the state that a warp holds: 128 registers of each of its threads.
TILE = 4096


def triton_step(
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
    """`delta_product_step` on validated inputs, without gradients; shapes and dtypes as there."""
    q, k, v, beta, state = (x.contiguous() for x in (q, k, v, beta, state))
    g = None if g is None else g.contiguous()
    o, new_state = v.new_empty(*q.shape[:2], v.shape[-1]), torch.empty_like(state)
    delta_product_one_step(q, k, v, beta, g, state, scale, qk_l2norm, o, new_state)
    return o, new_state


@opaque(mutates=("o", "new_state"))
def delta_product_one_step(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    g: Tensor | None,
    state: Tensor,
    scale: float,
    qk_l2norm: bool,
    o: Tensor,
    new_state: Tensor,
) -> None:
    """Fill the output and the new state."""
    (batch, heads, key_dim), value_dim = q.shape, v.shape[-1]
    key_tile = next_power_of_2(key_dim)
    warps = max(1, key_tile // 128)
    value_tile = min(max(TILE * warps // key_tile, 16), next_power_of_2(value_dim))
    arguments = {
        **{"q": q, "k": k, "v": v, "beta": beta, "g": g, "scale": scale, "eps": L2NORM_EPS},
        **{"state": state, "o": o, "new_state": new_state},
        **{"H": heads, "K": key_dim, "V": value_dim, "N": k.shape[1]},
        **{"BK": key_tile, "BV": value_tile, "L2NORM": qk_l2norm},
    }
    with torch.cuda.device_of(q):
        run_kernel(step_kernel, (batch * heads, ceil_div(value_dim, value_tile)), arguments, num_warps=warps)


@triton.jit
def load_vector(p, o_k, K: tl.constexpr, L2NORM: tl.constexpr, eps):
    """[BK] in fp32, normalised if asked."""
    b_x = tl.load(p + o_k, mask=o_k < K, other=0.0).to(tl.float32)
    if L2NORM:
        b_x *= tl.rsqrt(tl.sum(b_x * b_x, 0) + eps)
    return b_x


@triton.jit
def step_kernel(
    q, k, v, beta, g,  # [B, H, K], [B, N, H, K], [B, N, H, V], [B, N, H], [B, H]
    state, o, new_state,  # [B, H, K, V], out [B, H, V], out [B, H, K, V]
    scale, eps,
    H: tl.constexpr, K: tl.constexpr, V: tl.constexpr, N: tl.constexpr,
    BK: tl.constexpr, BV: tl.constexpr, L2NORM: tl.constexpr,
):  # fmt: skip
    """Per head and block of V: S <- exp(g) S, then S <- S + beta_j k_j (v_j - S^T k_j)^T per j, o = S^T q."""
    i_bh = tl.program_id(0).to(tl.int64)
    i_b, i_h = i_bh // H, i_bh % H
    o_k, o_v = tl.arange(0, BK), tl.program_id(1) * BV + tl.arange(0, BV)
    m_v = o_v < V
    m_s = (o_k < K)[:, None] & m_v[None, :]
    p_s = i_bh * K * V + o_k[:, None] * V + o_v[None, :]
    b_s = tl.load(state + p_s, mask=m_s, other=0.0).to(tl.float32)
    if g is not None:
        b_s *= tl.exp(tl.load(g + i_bh))
    for j in tl.static_range(N):  # unrolled: the next loads and norms go on beside the sums of this
        i_row = (i_b * N + j) * H + i_h
        b_k = load_vector(k + i_row * K, o_k, K, L2NORM, eps)
        b_v = tl.load(v + i_row * V + o_v, mask=m_v, other=0.0).to(tl.float32)
        b_error = tl.load(beta + i_row) * (b_v - tl.sum(b_s * b_k[:, None], 0))
        b_s += b_k[:, None] * b_error[None, :]
    b_q = load_vector(q + i_bh * K, o_k, K, L2NORM, eps) * scale
    b_o = tl.sum(b_s * b_q[:, None], 0)
    tl.store(o + i_bh * V + o_v, b_o.to(o.dtype.element_ty), mask=m_v)
    tl.store(new_state + p_s, b_s.to(new_state.dtype.element_ty), mask=m_s)
