"""Backward kernels of `delta_product`; notation of `triton_forward`, U = D E, d a gradient, tau(r) = r // N.

    dE = D (exp(G_C - G_tau) .* (K dS') + P^T dO)    dV = X^T dE                        serial: `adjoint_kernel`
    dS = exp(G_C) dS' + Q^T (scale * exp(G) .* dO) - K^T (exp(G_tau) .* dV)
    dP = dO U^T                                      dA = -tril(dV U^T, -1)             parallel: `gradient_kernel`
    dQ = scale * exp(G) .* (dO S^T) + (dP .* dP/d(QK^T)) K
    dK = exp(G_C - G_tau) .* (U dS'^T) - exp(G_tau) .* (dV S^T) + (dP ..)^T Q + (dA .. + (dA ..)^T) K

dA is the adjoint of the solve, so X^T dX X^T is never formed. dbeta sums what is linear in beta: the columns of
dP .* P and dA .* A (without their beta) and k . (E dS'^T). Each log gate gets the sum of the products it scales; rows
and columns take the same numbers, so that the terms which cancel do so to fp32 rounding.
"""

import triton
import triton.language as tl
from fla_train.kernels.delta_product.triton_common import (
    chunk_factors,
    chunk_span,
    load_gates,
    load_rows,
    load_scalars,
    segment_span,
    store_rows,
)


@triton.jit(do_not_specialize=["T", "NT"])
def adjoint_kernel(
    q, k, do,  # [tokens, H, K], [tokens * N, H, K], [tokens, H, V]
    x, p, gc, rq, rk, bh,  # from prepare_kernel
    dv, dstates,  # out [tokens * N, H, V]; out [chunks, H, V, K], the gradient of the state at each chunk's end
    dfinal_state, dinitial_state,  # [segments, H, K, V] fp32, in and out
    cu_seqlens, chunk_offsets, scale, n_total, T, NT,
    H: tl.constexpr, K: tl.constexpr, V: tl.constexpr, N: tl.constexpr, C: tl.constexpr,
    M: tl.constexpr, BC: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    GATED: tl.constexpr, L2NORM: tl.constexpr, PACKED: tl.constexpr,
    HAS_FINAL: tl.constexpr, STORE_INITIAL: tl.constexpr,
    OPERAND: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Per segment, head and block of V, from the last chunk to the first: the state's gradient and dv."""
    NV: tl.constexpr = (V + BV - 1) // BV
    i_v = (tl.program_id(0) % NV) * BV
    i_h = (tl.program_id(0) // NV) % H
    i_s = tl.program_id(0) // (NV * H)
    i_start, length, i_chunk = segment_span(i_s, cu_seqlens, chunk_offsets, T, NT, PACKED)

    o_k, o_v = tl.arange(0, BK), i_v + tl.arange(0, BV)
    m_s = (o_v < V)[:, None] & (o_k < K)[None, :]
    p_s = (i_s.to(tl.int64) * H + i_h) * K * V + o_k[None, :] * V + o_v[:, None]
    b_ds = tl.zeros((BV, BK), tl.float32)  # dS^T
    if HAS_FINAL:
        b_ds += tl.load(dfinal_state + p_s, mask=m_s, other=0.0)

    n_chunks = tl.cdiv(length, C)
    for i_reverse in range(0, n_chunks):
        i_c = n_chunks - 1 - i_reverse
        i_t, n_t = i_start + i_c * C, tl.minimum(length - i_c * C, C)
        i_m, n_m = i_t * N, n_t * N
        b_dsc = b_ds.to(OPERAND)
        store_rows(dstates + ((i_chunk + i_c) * H + i_h) * V * K + i_v * K, b_dsc, V - i_v, 0, K, K, BV, BK)
        b_k = load_rows(k + (i_m * H + i_h) * K, n_m, 0, K, H * K, M, BK).to(OPERAND)
        b_q = load_rows(q + (i_t * H + i_h) * K, n_t, 0, K, H * K, BC, BK).to(OPERAND)
        b_do = load_rows(do + (i_t * H + i_h) * V, n_t, i_v, V, H * V, BC, BV).to(OPERAND)
        b_x = load_rows(x + (i_m * H + i_h) * M, n_m, 0, M, H * M, M, M).to(OPERAND)
        b_p = load_rows(p + (i_t * H + i_h) * M, n_t, 0, M, H * M, BC, M).to(OPERAND)
        b_beta = load_scalars(bh, i_h, n_total * N, i_m, n_m, M)
        b_read, b_write, b_query, decay = chunk_factors(
            gc, rq, rk, scale, i_h, n_total, i_t, n_t, N, M, BC, GATED, L2NORM
        )

        b_do = tl.trans(b_do)  # [BV, BC]
        b_de = tl.dot(b_dsc, tl.trans(b_k), input_precision=PRECISION) * b_write[None, :]  # [BV, M]
        b_de = tl.dot(b_do, b_p, b_de, input_precision=PRECISION) * b_beta[None, :]
        b_dv = tl.dot(b_de.to(OPERAND), b_x, input_precision=PRECISION)
        b_ds *= decay
        b_ds = tl.dot(
            (b_do.to(tl.float32) * b_query[None, :]).to(OPERAND), b_q, b_ds, input_precision=PRECISION
        )
        b_ds = tl.dot((b_dv * -b_read[None, :]).to(OPERAND), b_k, b_ds, input_precision=PRECISION)
        store_rows(dv + (i_m * H + i_h) * V, tl.trans(b_dv), n_m, i_v, V, H * V, M, BV)
    if STORE_INITIAL:
        tl.store(dinitial_state + p_s, b_ds, mask=m_s)


@triton.jit(do_not_specialize=["T", "NT"])
def gradient_kernel(
    q, k, v, do, dv,  # [tokens, H, K], [tokens * N, H, K], [tokens * N, H, V], [tokens, H, V], [tokens * N, H, V]
    x, p, gc, rq, rk, bh,  # from prepare_kernel
    states, dstates,  # [chunks, H, V, K], from state_kernel and adjoint_kernel
    g, dq, dk, dbeta, dg,  # in [tokens, H]; out [tokens, H, K], [tokens * N, H, K], [tokens * N, H], [tokens, H]
    cu_seqlens, chunk_offsets, chunk_segment, scale, n_total, T, NT,
    H: tl.constexpr, K: tl.constexpr, V: tl.constexpr, N: tl.constexpr, C: tl.constexpr,
    M: tl.constexpr, BC: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    GATED: tl.constexpr, L2NORM: tl.constexpr, PACKED: tl.constexpr, MIN_LOG_DECAY: tl.constexpr,
    OPERAND: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Per chunk and head: dq, dk, dbeta and dg. E is computed again from the stored state."""
    i_c, i_h = tl.program_id(0), tl.program_id(1)
    i_t, n_t = chunk_span(i_c, cu_seqlens, chunk_offsets, chunk_segment, T, NT, C, PACKED)
    if n_t <= 0:
        return
    i_m, n_m = i_t * N, n_t * N
    o_t, o_m = tl.arange(0, BC), tl.arange(0, M)
    o_tau = o_m // N
    p_state = (i_c.to(tl.int64) * H + i_h) * V * K

    b_k = load_rows(k + (i_m * H + i_h) * K, n_m, 0, K, H * K, M, BK).to(OPERAND)
    b_x = load_rows(x + (i_m * H + i_h) * M, n_m, 0, M, H * M, M, M).to(OPERAND)
    b_beta = load_scalars(bh, i_h, n_total * N, i_m, n_m, M)
    b_read, b_write, b_query, decay = chunk_factors(
        gc, rq, rk, scale, i_h, n_total, i_t, n_t, N, M, BC, GATED, L2NORM
    )

    b_dk_write = tl.zeros((M, BK), tl.float32)  # E dS'^T
    b_dk_read = tl.zeros((M, BK), tl.float32)  # dV S^T
    b_dq = tl.zeros((BK, BC), tl.float32)  # S dO^T
    b_da = tl.zeros((M, M), tl.float32)  # dV E^T
    b_dp = tl.zeros((M, BC), tl.float32)  # E dO^T
    b_ss = tl.zeros((BV,), tl.float32)  # rows of S^T .* dS'^T
    for i_v in range(0, V, BV):
        b_s = load_rows(states + p_state + i_v * K, V - i_v, 0, K, K, BV, BK).to(OPERAND)
        b_ds = load_rows(dstates + p_state + i_v * K, V - i_v, 0, K, K, BV, BK).to(OPERAND)
        b_v = load_rows(v + (i_m * H + i_h) * V, n_m, i_v, V, H * V, M, BV).to(tl.float32)
        b_dv = load_rows(dv + (i_m * H + i_h) * V, n_m, i_v, V, H * V, M, BV).to(OPERAND)
        b_do = load_rows(do + (i_t * H + i_h) * V, n_t, i_v, V, H * V, BC, BV).to(OPERAND)
        b_w = b_v - tl.dot(b_k, tl.trans(b_s), input_precision=PRECISION) * b_read[:, None]
        b_e = tl.dot(b_x, b_w.to(OPERAND), input_precision=PRECISION).to(OPERAND)  # [M, BV]
        b_dk_write = tl.dot(b_e, b_ds, b_dk_write, input_precision=PRECISION)
        b_dk_read = tl.dot(b_dv, b_s, b_dk_read, input_precision=PRECISION)
        b_dq = tl.dot(tl.trans(b_s), tl.trans(b_do), b_dq, input_precision=PRECISION)
        b_da = tl.dot(b_dv, tl.trans(b_e), b_da, input_precision=PRECISION)
        b_dp = tl.dot(b_e, tl.trans(b_do), b_dp, input_precision=PRECISION)
        if GATED:
            b_ss += tl.sum(b_s.to(tl.float32) * b_ds.to(tl.float32), 1)

    # The terms that pass through the state; per sub-step and token, their inner products with k and q.
    b_q = load_rows(q + (i_t * H + i_h) * K, n_t, 0, K, H * K, BC, BK).to(OPERAND)
    b_kf = b_k.to(tl.float32)
    b_dbeta = tl.sum(b_kf * b_dk_write, 1) * b_write
    b_dk = b_dk_write * (b_beta * b_write)[:, None] - b_dk_read * b_read[:, None]
    b_dq *= b_query[None, :]
    if GATED:
        b_dgm = -b_dbeta * b_beta - tl.sum(b_kf * b_dk_read, 1) * b_read  # by sub-step
        b_dgt = tl.sum(tl.trans(b_q).to(tl.float32) * b_dq, 0)  # by token
        dg_last = tl.sum(b_dbeta * b_beta) + tl.sum(b_ss) * decay

    # The terms inside the chunk.
    lower = o_m[:, None] > o_m[None, :]
    seen = o_tau[:, None] <= o_t[None, :]
    b_fa = tl.full((M, M), 1.0, tl.float32)
    b_fp = tl.full((M, BC), 1.0, tl.float32) * scale
    if GATED:
        b_gm, b_gt, _ = load_gates(gc, i_h, n_total, i_t, n_t, N, M, BC)
        b_fa = tl.exp2(tl.where(lower, b_gm[:, None] - b_gm[None, :], 0.0))
        b_fp *= tl.exp2(tl.where(seen, b_gt[None, :] - b_gm[:, None], 0.0))
    if L2NORM:
        b_rk = load_scalars(rk, i_h, n_total * N, i_m, n_m, M)
        b_rq = load_scalars(rq, i_h, n_total, i_t, n_t, BC)
        b_fa *= b_rk[:, None] * b_rk[None, :]
        b_fp *= b_rk[:, None] * b_rq[None, :]
    b_da = tl.where(lower, -b_da * b_fa, 0.0)
    b_dp = tl.where(seen, b_dp * b_fp, 0.0)
    b_da_a = b_da * tl.dot(b_k, tl.trans(b_k), input_precision=PRECISION)
    b_dp_p = b_dp * tl.dot(b_k, tl.trans(b_q), input_precision=PRECISION)
    b_dbeta_inner = tl.sum(b_da_a, 0) + tl.sum(b_dp_p, 1)
    b_dbeta += b_dbeta_inner
    tl.store(dbeta + (i_m + o_m) * H + i_h, b_dbeta, mask=o_m < n_m)
    if GATED:
        b_dgm += tl.sum(b_da_a * b_beta[None, :], 1) - b_dbeta_inner * b_beta
        b_dgt += tl.sum(b_dp_p * b_beta[:, None], 0)
        b_dg = tl.sum(tl.where(o_t[:, None] >= o_t[None, :], b_dgt[:, None], 0.0), 0)
        b_dg += tl.sum(tl.where(o_tau[:, None] >= o_t[None, :], b_dgm[:, None], 0.0), 0)
        b_g = tl.load(g + (i_t + o_t) * H + i_h, mask=o_t < n_t, other=0.0)
        tl.store(
            dg + (i_t + o_t) * H + i_h,
            tl.where(b_g > MIN_LOG_DECAY, b_dg + dg_last, 0.0),
            mask=o_t < n_t,
        )
    b_da = (b_da * b_beta[None, :]).to(OPERAND)
    b_dp = (b_dp * b_beta[:, None]).to(OPERAND)
    b_dk = tl.dot(b_da, b_k, b_dk, input_precision=PRECISION)
    b_dk = tl.dot(tl.trans(b_da), b_k, b_dk, input_precision=PRECISION)
    b_dk = tl.dot(b_dp, b_q, b_dk, input_precision=PRECISION)
    b_dq = tl.trans(tl.dot(tl.trans(b_k), b_dp, b_dq, input_precision=PRECISION))  # [BC, BK]
    if L2NORM:
        # These are r * d(normalised x): d(x) = d - r^2 x (x . d).
        b_qf = b_q.to(tl.float32)
        b_dk -= b_kf * (b_rk * b_rk * tl.sum(b_kf * b_dk, 1))[:, None]
        b_dq -= b_qf * (b_rq * b_rq * tl.sum(b_qf * b_dq, 1))[:, None]
    store_rows(dk + (i_m * H + i_h) * K, b_dk, n_m, 0, K, H * K, M, BK)
    store_rows(dq + (i_t * H + i_h) * K, b_dq, n_t, 0, K, H * K, BC, BK)
