"""`delta_product` sub-step by sub-step, for narrow heads in float32, where products of chunks don't pay.

A word problem has thousands of heads of 16 or 32 channels and short sequences. Chunks would be padded to
tiles of 64 channels there, and float32 goes through the matrix units in three products. Here a program of one
warp walks one head of one sequence with the state in registers, as the definition does.

For the backward pass the forward keeps the state before each sub-step, after the gate: 4 K V bytes a sub-step
and head.
"""

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from fla_train.kernels.cached_launch import run_kernel
from fla_train.kernels.custom_op import custom_op as opaque
from fla_train.kernels.delta_product.interface import L2NORM_EPS
from fla_train.kernels.sizes import next_power_of_2

STATE = 1024  # elements of a state, K and V rounded up: 32 registers a thread
LONGEST = 4096  # sub-steps of a row that are walked; timed were up to 256


def suits(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Whether a call is walked, and not cut into chunks."""
    state = next_power_of_2(q.shape[-1]) * next_power_of_2(v.shape[-1])
    return q.dtype == torch.float32 and state <= STATE and q.shape[1] * k.shape[2] <= LONGEST


class Walk(torch.autograd.Function):
    """Arguments and results of `triton_delta_product`, all contiguous."""

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        beta: Tensor,
        g: Tensor | None,
        initial_state: Tensor | None,
        scale: float,
        qk_l2norm: bool,
        output_final_state: bool,
        keep: bool,
        *bounds: Tensor,
    ) -> tuple[Tensor, Tensor | None]:
        (batch, length, heads, key_dim), value_dim = q.shape, v.shape[-1]
        segments = bounds[0].numel() - 1 if bounds else batch
        o = v.new_empty(batch, length, heads, value_dim)
        states = v.new_empty(*k.shape, value_dim) if keep else None
        final_state = v.new_empty(segments, heads, key_dim, value_dim) if output_final_state else None
        walk_forward(q, k, v, beta, g, initial_state, bounds, scale, qk_l2norm, o, states, final_state)
        ctx.set_materialize_grads(False)
        ctx.scale, ctx.qk_l2norm = scale, qk_l2norm
        ctx.save_for_backward(q, k, v, beta, g, initial_state, states, *bounds)
        return o, final_state

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, do: Tensor | None, dfinal_state: Tensor | None) -> tuple[Tensor | None, ...]:
        q, k, v, beta, g, initial_state, states, *bounds = ctx.saved_tensors
        do = torch.zeros_like(v[:, :, 0]).contiguous() if do is None else do.contiguous()
        dfinal_state = None if dfinal_state is None else dfinal_state.contiguous()
        dq, dk, dv, dbeta = (torch.empty_like(x) for x in (q, k, v, beta))
        dg = None if g is None else torch.empty_like(g)
        dinitial_state = torch.empty_like(initial_state) if ctx.needs_input_grad[5] else None
        walk_backward(
            *(q, k, v, beta, g, states, do, dfinal_state, bounds, ctx.scale, ctx.qk_l2norm),
            *(dq, dk, dv, dbeta, dg, dinitial_state),
        )
        return dq, dk, dv, dbeta, dg, dinitial_state, *[None] * (4 + len(bounds))


@opaque(mutates=("o", "states", "final_state"))
def walk_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    g: Tensor | None,
    initial_state: Tensor | None,
    bounds: Sequence[Tensor],
    scale: float,
    qk_l2norm: bool,
    o: Tensor,
    states: Tensor | None,
    final_state: Tensor | None,
) -> None:
    """Fill the output and, where given, the states [B, T, N, H, K, V] and those at the ends."""
    programs, sizes = _sizes(q, k, v, bounds, qk_l2norm)
    arguments = {
        **{"q": q, "k": k, "v": v, "beta": beta, "g": g, "initial_state": initial_state, "scale": scale},
        **{"o": o, "states": states, "final_state": final_state},
        **sizes,
    }
    with torch.cuda.device_of(q):
        run_kernel(walk_kernel, (programs,), arguments, num_warps=1)


@opaque(mutates=("dq", "dk", "dv", "dbeta", "dg", "dinitial_state"))
def walk_backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    g: Tensor | None,
    states: Tensor,
    do: Tensor,
    dfinal_state: Tensor | None,
    bounds: Sequence[Tensor],
    scale: float,
    qk_l2norm: bool,
    dq: Tensor,
    dk: Tensor,
    dv: Tensor,
    dbeta: Tensor,
    dg: Tensor | None,
    dinitial_state: Tensor | None,
) -> None:
    """Fill the gradients."""
    programs, sizes = _sizes(q, k, v, bounds, qk_l2norm)
    arguments = {
        **{"q": q, "k": k, "v": v, "beta": beta, "g": g, "states": states, "scale": scale},
        **{"do": do, "dfinal_state": dfinal_state},
        **{"dq": dq, "dk": dk, "dv": dv, "dbeta": dbeta, "dg": dg, "dinitial_state": dinitial_state},
        **sizes,
    }
    with torch.cuda.device_of(q):
        run_kernel(walk_back_kernel, (programs,), arguments, num_warps=1)


def _sizes(
    q: Tensor, k: Tensor, v: Tensor, bounds: Sequence[Tensor], qk_l2norm: bool
) -> tuple[int, dict[str, Any]]:
    """Programs, one for each head of a sequence, and the arguments that both kernels take."""
    (batch, length, heads, key_dim), value_dim = q.shape, v.shape[-1]
    cu_seqlens = bounds[0] if bounds else None
    segments = batch if cu_seqlens is None else cu_seqlens.numel() - 1
    sizes = {"cu_seqlens": cu_seqlens, "T": length, "H": heads, "K": key_dim, "V": value_dim}
    sizes |= {"N": k.shape[2], "BK": next_power_of_2(key_dim), "BV": next_power_of_2(value_dim)}
    return segments * heads, sizes | {"L2NORM": qk_l2norm, "EPS": L2NORM_EPS}


@triton.jit
def segment(i_s, cu_seqlens, T):
    """First token and length of a sequence."""
    if cu_seqlens is not None:
        i_start = tl.load(cu_seqlens + i_s).to(tl.int64)
        length = (tl.load(cu_seqlens + i_s + 1).to(tl.int64) - i_start).to(tl.int32)
    else:
        i_start, length = i_s.to(tl.int64) * T, T
    return i_start, length


@triton.jit
def load_key(p, o_k, K: tl.constexpr, L2NORM: tl.constexpr, EPS: tl.constexpr):
    """A key or query [BK] as it is used, and the factor that made it so."""
    b_x = tl.load(p + o_k, mask=o_k < K, other=0.0)
    b_r = 1.0
    if L2NORM:
        b_r = tl.rsqrt(tl.sum(b_x * b_x, 0) + EPS)
    return b_x * b_r, b_r


@triton.jit
def store_key(p, b_dx, b_x, b_r, o_k, K: tl.constexpr, L2NORM: tl.constexpr):
    """The gradient of the vector that `load_key` read, from that of what it returned."""
    if L2NORM:
        b_dx = b_r * (b_dx - b_x * tl.sum(b_dx * b_x, 0))
    tl.store(p + o_k, b_dx, mask=o_k < K)


@triton.jit(do_not_specialize=["T"])
def walk_kernel(
    q, k, v, beta, g, initial_state,
    o, states, final_state, scale, cu_seqlens, T,
    H: tl.constexpr, K: tl.constexpr, V: tl.constexpr, N: tl.constexpr,
    BK: tl.constexpr, BV: tl.constexpr, L2NORM: tl.constexpr, EPS: tl.constexpr,
):  # fmt: skip
    """Per token S <- exp(g) S, then S <- S + beta_j k_j (v_j - S^T k_j)^T per j, o = scale S^T q."""
    i_s, i_h = tl.program_id(0) // H, tl.program_id(0) % H
    i_start, length = segment(i_s, cu_seqlens, T)
    o_k, o_v = tl.arange(0, BK), tl.arange(0, BV)
    m_v, m_s = o_v < V, (o_k < K)[:, None] & (o_v < V)[None, :]
    o_s = o_k[:, None] * V + o_v[None, :]
    p_end = tl.program_id(0).to(tl.int64) * K * V
    b_s = tl.zeros([BK, BV], tl.float32)
    if initial_state is not None:
        b_s = tl.load(initial_state + p_end + o_s, mask=m_s, other=0.0)
    for i in range(length):
        i_row = (i_start + i) * H + i_h
        if g is not None:
            b_s *= tl.exp(tl.load(g + i_row))
        for j in range(N):
            i_step = ((i_start + i) * N + j) * H + i_h
            if states is not None:
                tl.store(states + i_step * K * V + o_s, b_s, mask=m_s)
            b_k, _ = load_key(k + i_step * K, o_k, K, L2NORM, EPS)
            b_v = tl.load(v + i_step * V + o_v, mask=m_v, other=0.0)
            b_error = b_v - tl.sum(b_s * b_k[:, None], 0)
            b_s += b_k[:, None] * (tl.load(beta + i_step) * b_error)[None, :]
        b_q, _ = load_key(q + i_row * K, o_k, K, L2NORM, EPS)
        tl.store(o + i_row * V + o_v, scale * tl.sum(b_s * b_q[:, None], 0), mask=m_v)
    if final_state is not None:
        tl.store(final_state + p_end + o_s, b_s, mask=m_s)


@triton.jit(do_not_specialize=["T"])
def walk_back_kernel(
    q, k, v, beta, g, states, do, dfinal_state,
    dq, dk, dv, dbeta, dg, dinitial_state, scale, cu_seqlens, T,
    H: tl.constexpr, K: tl.constexpr, V: tl.constexpr, N: tl.constexpr,
    BK: tl.constexpr, BV: tl.constexpr, L2NORM: tl.constexpr, EPS: tl.constexpr,
):  # fmt: skip
    """The same walk backwards, with the gradient dS of the state: with e = v - S^T k and f = beta dS^T k a
    sub-step has dv = f, dbeta = e^T dS^T k, dk = beta dS e - S f, and dS <- dS - k f^T."""
    i_s, i_h = tl.program_id(0) // H, tl.program_id(0) % H
    i_start, length = segment(i_s, cu_seqlens, T)
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
        b_q, r_q = load_key(q + i_row * K, o_k, K, L2NORM, EPS)
        b_do = scale * tl.load(do + i_row * V + o_v, mask=m_v, other=0.0)
        b_ds += b_q[:, None] * b_do[None, :]
        b_s = tl.zeros([BK, BV], tl.float32)
        for j in range(N):
            i_step = (i_t * N + N - 1 - j) * H + i_h
            b_s = tl.load(states + i_step * K * V + o_s, mask=m_s, other=0.0)
            b_k, r_k = load_key(k + i_step * K, o_k, K, L2NORM, EPS)
            b_v = tl.load(v + i_step * V + o_v, mask=m_v, other=0.0)
            b_beta = tl.load(beta + i_step)
            b_error = b_v - tl.sum(b_s * b_k[:, None], 0)
            if j == 0:  # what the query reads: S after the last sub-step
                b_dq = tl.sum(b_s * b_do[None, :], 1) + b_k * (b_beta * tl.sum(b_error * b_do, 0))
                store_key(dq + i_row * K, b_dq, b_q, r_q, o_k, K, L2NORM)
            b_w = tl.sum(b_ds * b_k[:, None], 0)
            b_f = b_beta * b_w
            b_dk = tl.sum(b_ds * (b_beta * b_error)[None, :] - b_s * b_f[None, :], 1)
            b_ds -= b_k[:, None] * b_f[None, :]
            tl.store(dv + i_step * V + o_v, b_f, mask=m_v)
            tl.store(dbeta + i_step, tl.sum(b_w * b_error, 0))
            store_key(dk + i_step * K, b_dk, b_k, r_k, o_k, K, L2NORM)
        if g is not None:
            tl.store(dg + i_row, tl.sum(tl.sum(b_s * b_ds, 1), 0))
            b_ds *= tl.exp(tl.load(g + i_row))
    if dinitial_state is not None:
        tl.store(dinitial_state + p_end + o_s, b_ds, mask=m_s)
