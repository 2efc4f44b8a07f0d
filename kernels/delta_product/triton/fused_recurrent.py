"""`delta_product` step by step in Triton: forward and backward of sequences, and one token (decoding).

Sequences: for narrow heads in float32, where products of chunks do not pay. A word problem has thousands of
heads of 16 or 32 channels and short sequences. Chunks would be padded to tiles of 64 channels there, and
float32 goes through the matrix units in three products. Here a program of one warp runs one head of one
sequence with the state in registers, as the definition does. For the backward pass the forward keeps the
state before each step, after the gate: 4 K V bytes a step and head. `chunk_launch` launches these kernels in
place of the chunk kernels where `select` decides it.

One token: the state is read once and written once, whatever n_h. A decoding step moves the state and hardly
anything else: 8 K V bytes a head in fp32, against 2 (n_h + 1) (K + V) for its inputs. A program holds a
[K, BV] tile of a head's state in registers, one warp for each 128 rows, so that the sums over K stay inside a
warp or two, and applies the gate, all steps and the query to it.
"""

import torch
from torch import Tensor

from fla_train.kernels.cached_launch import run_kernel
from fla_train.kernels.custom_op import custom_op
from fla_train.kernels.delta_product.recurrent import L2NORM_EPS
from fla_train.kernels.delta_product.triton.common import sequence_tokens
from fla_train.kernels.optional_triton import tl, triton
from fla_train.kernels.sizes import ceil_div, next_power_of_2

TILE = 4096  # fp32 elements of the state that a warp holds in decoding: 128 registers of each of its threads


def launch_fused_recurrent(
    kernel: triton.JITFunction,
    cu_seqlens: Tensor | None,
    qk_l2norm: bool,
    *,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    **tensors: Tensor | float | None,
) -> None:
    """Run the forward or the backward kernel: a program of one warp for each value head of a sequence."""
    (batch, length, key_heads, key_dim), (heads, value_dim) = q.shape, v.shape[-2:]
    sequences = batch if cu_seqlens is None else cu_seqlens.numel() - 1
    run_kernel(
        kernel, (sequences * heads,), q=q, k=k, v=v, **tensors,
        cu_seqlens=cu_seqlens, T=length, H=heads, G=heads // key_heads, K=key_dim, V=value_dim, N=k.shape[2],
        BK=next_power_of_2(key_dim), BV=next_power_of_2(value_dim),
        L2NORM=qk_l2norm, EPS=L2NORM_EPS, num_warps=1,
    )  # fmt: skip


def triton_step(
    q: Tensor, k: Tensor, v: Tensor, beta: Tensor, g: Tensor | None, *,
    state: Tensor, scale: float, qk_l2norm: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return `delta_product_step` on validated inputs, without gradients; shapes and dtypes as there."""
    q, k, v, beta, state = (x.contiguous() for x in (q, k, v, beta, state))
    g = None if g is None else g.contiguous()
    o, new_state = v.new_empty(len(q), *v.shape[-2:]), torch.empty_like(state)
    fused_recurrent_step(q, k, v, beta, g, state, scale, qk_l2norm, o, new_state)
    return o, new_state


@custom_op(mutates=("o", "new_state"))
def fused_recurrent_step(
    q: Tensor, k: Tensor, v: Tensor, beta: Tensor, g: Tensor | None, state: Tensor, scale: float,
    qk_l2norm: bool, o: Tensor, new_state: Tensor,
) -> None:  # fmt: skip
    """Fill the output and the new state."""
    (batch, key_heads, key_dim), (heads, value_dim) = q.shape, v.shape[-2:]
    key_tile = next_power_of_2(key_dim)
    warps = max(1, key_tile // 128)
    value_tile = min(max(TILE * warps // key_tile, 16), next_power_of_2(value_dim))
    run_kernel(
        fused_recurrent_step_kernel, (batch * heads, ceil_div(value_dim, value_tile)),
        q=q, k=k, v=v, beta=beta, g=g, scale=scale, eps=L2NORM_EPS,
        state=state, o=o, new_state=new_state, H=heads, G=heads // key_heads,
        K=key_dim, V=value_dim, N=k.shape[1], BK=key_tile, BV=value_tile,
        L2NORM=qk_l2norm, num_warps=warps,
    )  # fmt: skip


@triton.jit
def load_key(p, o_k, K: tl.constexpr, L2NORM: tl.constexpr, eps):
    """Load a key or query [BK] as it is used, in fp32, and the factor that made it so."""
    b_x = tl.load(p + o_k, mask=o_k < K, other=0.0).to(tl.float32)
    b_r = 1.0
    if L2NORM:
        b_r = tl.rsqrt(tl.sum(b_x * b_x, 0) + eps)
    return b_x * b_r, b_r


@triton.jit
def store_key(p, b_dx, b_x, b_r, o_k, K: tl.constexpr, L2NORM: tl.constexpr):
    """Return the gradient of the vector that `load_key` read, from that of its result."""
    if L2NORM:
        b_dx = b_r * (b_dx - b_x * tl.sum(b_dx * b_x, 0))
    tl.store(p + o_k, b_dx, mask=o_k < K)


@triton.jit
def householder_step(
    b_s, k, v, beta, i_key, i_step, o_k, o_v, K: tl.constexpr, V: tl.constexpr, L2NORM: tl.constexpr, eps
):
    """Return S + beta k (v - S^T k)^T of S [BK, BV]; k is row `i_key`, v and beta are rows `i_step`."""
    b_k, _ = load_key(k + i_key * K, o_k, K, L2NORM, eps)
    b_v = tl.load(v + i_step * V + o_v, mask=o_v < V, other=0.0).to(tl.float32)
    b_u = tl.load(beta + i_step) * (b_v - tl.sum(b_s * b_k[:, None], 0))
    return b_s + b_k[:, None] * b_u[None, :]


@triton.jit(do_not_specialize=["T"])
def fused_recurrent_fwd_kernel(
    q, k, v, beta, g, initial_state,
    o, states, final_state, scale, cu_seqlens, T,
    H: tl.constexpr, G: tl.constexpr, K: tl.constexpr, V: tl.constexpr, N: tl.constexpr,
    BK: tl.constexpr, BV: tl.constexpr, L2NORM: tl.constexpr, EPS: tl.constexpr,
):  # fmt: skip
    """Compute per token S <- exp(g) S, then S <- S + beta_j k_j (v_j - S^T k_j)^T per j, o = scale S^T q."""
    i_s, i_h = tl.program_id(0) // H, tl.program_id(0) % H
    i_start, length = sequence_tokens(i_s, cu_seqlens, T)
    o_k, o_v = tl.arange(0, BK), tl.arange(0, BV)
    m_v, m_s = o_v < V, (o_k < K)[:, None] & (o_v < V)[None, :]
    o_s = o_k[:, None] * V + o_v[None, :]
    p_end = tl.program_id(0).to(tl.int64) * K * V
    b_s = tl.zeros([BK, BV], tl.float32)
    if initial_state is not None:
        b_s = tl.load(initial_state + p_end + o_s, mask=m_s, other=0.0)
    for i in range(length):
        i_row, i_query = (i_start + i) * H + i_h, (i_start + i) * (H // G) + i_h // G
        if g is not None:
            b_s *= tl.exp(tl.load(g + i_row))
        for j in range(N):
            i_step = ((i_start + i) * N + j) * H + i_h
            i_key = ((i_start + i) * N + j) * (H // G) + i_h // G
            if states is not None:
                tl.store(states + i_step * K * V + o_s, b_s, mask=m_s)
            b_s = householder_step(b_s, k, v, beta, i_key, i_step, o_k, o_v, K, V, L2NORM, EPS)
        b_q, _ = load_key(q + i_query * K, o_k, K, L2NORM, EPS)
        tl.store(o + i_row * V + o_v, scale * tl.sum(b_s * b_q[:, None], 0), mask=m_v)
    if final_state is not None:
        tl.store(final_state + p_end + o_s, b_s, mask=m_s)


@triton.jit(do_not_specialize=["T"])
def fused_recurrent_bwd_kernel(
    q, k, v, beta, g, states, do, dfinal_state,
    dq, dk, dv, dbeta, dg, dinitial_state, scale, cu_seqlens, T,
    H: tl.constexpr, G: tl.constexpr, K: tl.constexpr, V: tl.constexpr, N: tl.constexpr,
    BK: tl.constexpr, BV: tl.constexpr, L2NORM: tl.constexpr, EPS: tl.constexpr,
):  # fmt: skip
    """Run the steps backwards, with the gradient dS of the state: with u = v - S^T k and f = beta dS^T k a
    step has dv = f, dbeta = u^T dS^T k, dk = beta dS u - S f, and dS <- dS - k f^T. Each value head has its
    dq and dk."""
    i_s, i_h = tl.program_id(0) // H, tl.program_id(0) % H
    i_start, length = sequence_tokens(i_s, cu_seqlens, T)
    o_k, o_v = tl.arange(0, BK), tl.arange(0, BV)
    m_v, m_s = o_v < V, (o_k < K)[:, None] & (o_v < V)[None, :]
    o_s = o_k[:, None] * V + o_v[None, :]
    p_end = tl.program_id(0).to(tl.int64) * K * V
    b_ds = tl.zeros([BK, BV], tl.float32)
    if dfinal_state is not None:
        b_ds = tl.load(dfinal_state + p_end + o_s, mask=m_s, other=0.0)
    for i in range(length):
        i_t = i_start + length - 1 - i
        i_row = i_t * H + i_h
        b_q, r_q = load_key(q + (i_t * (H // G) + i_h // G) * K, o_k, K, L2NORM, EPS)
        b_do = scale * tl.load(do + i_row * V + o_v, mask=m_v, other=0.0)
        b_ds += b_q[:, None] * b_do[None, :]
        b_s = tl.zeros([BK, BV], tl.float32)
        for j in range(N):
            i_step = (i_t * N + N - 1 - j) * H + i_h
            b_s = tl.load(states + i_step * K * V + o_s, mask=m_s, other=0.0)
            i_key = (i_t * N + N - 1 - j) * (H // G) + i_h // G
            b_k, r_k = load_key(k + i_key * K, o_k, K, L2NORM, EPS)
            b_v = tl.load(v + i_step * V + o_v, mask=m_v, other=0.0)
            b_beta = tl.load(beta + i_step)
            b_u = b_v - tl.sum(b_s * b_k[:, None], 0)
            if j == 0:  # the query reads S after the last step
                b_dq = tl.sum(b_s * b_do[None, :], 1) + b_k * (b_beta * tl.sum(b_u * b_do, 0))
                store_key(dq + i_row * K, b_dq, b_q, r_q, o_k, K, L2NORM)
            b_w = tl.sum(b_ds * b_k[:, None], 0)
            b_f = b_beta * b_w
            b_dk = tl.sum(b_ds * (b_beta * b_u)[None, :] - b_s * b_f[None, :], 1)
            b_ds -= b_k[:, None] * b_f[None, :]
            tl.store(dv + i_step * V + o_v, b_f, mask=m_v)
            tl.store(dbeta + i_step, tl.sum(b_w * b_u, 0))
            store_key(dk + i_step * K, b_dk, b_k, r_k, o_k, K, L2NORM)
        if g is not None:
            tl.store(dg + i_row, tl.sum(tl.sum(b_s * b_ds, 1), 0))
            b_ds *= tl.exp(tl.load(g + i_row))
    if dinitial_state is not None:
        tl.store(dinitial_state + p_end + o_s, b_ds, mask=m_s)


@triton.jit
def fused_recurrent_step_kernel(
    q, k, v, beta, g,  # [B, H / G, K], [B, N, H / G, K], [B, N, H, V], [B, N, H], [B, H]
    state, o, new_state,  # [B, H, K, V], out [B, H, V], out [B, H, K, V]
    scale, eps,
    H: tl.constexpr, G: tl.constexpr, K: tl.constexpr, V: tl.constexpr, N: tl.constexpr,
    BK: tl.constexpr, BV: tl.constexpr, L2NORM: tl.constexpr,
):  # fmt: skip
    """Advance by one token per head and tile of V; state, q, k and v may have 16 bits."""
    i_bh = tl.program_id(0).to(tl.int64)
    i_b, i_h = i_bh // H, i_bh % H
    o_k, o_v = tl.arange(0, BK), tl.program_id(1) * BV + tl.arange(0, BV)
    m_v = o_v < V
    m_s = (o_k < K)[:, None] & m_v[None, :]
    p_s = i_bh * K * V + o_k[:, None] * V + o_v[None, :]
    b_s = tl.load(state + p_s, mask=m_s, other=0.0).to(tl.float32)
    if g is not None:
        b_s *= tl.exp(tl.load(g + i_bh))
    for j in tl.static_range(N):  # unrolled: the next loads and norms overlap the sums of this
        i_key, i_step = (i_b * N + j) * (H // G) + i_h // G, (i_b * N + j) * H + i_h
        b_s = householder_step(b_s, k, v, beta, i_key, i_step, o_k, o_v, K, V, L2NORM, eps)
    b_q, _ = load_key(q + i_bh // G * K, o_k, K, L2NORM, eps)
    b_o = tl.sum(b_s * (b_q * scale)[:, None], 0)
    tl.store(o + i_bh * V + o_v, b_o.to(o.dtype.element_ty), mask=m_v)
    tl.store(new_state + p_s, b_s.to(new_state.dtype.element_ty), mask=m_s)
