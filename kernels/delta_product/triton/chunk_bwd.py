"""Backward kernels of `delta_product`; notation of `chunk_fwd`, d a gradient, tau(r) = r // N.

Serial, `chunk_bwd_state_kernel`:

    du = diag(beta) (exp(g_cum_C - g_cum_tau) .* (K dS') + P^T dO)
    dV = T^T du
    dS = exp(g_cum_C) dS' + Q^T (scale * exp(g_cum) .* dO) - K^T (exp(g_cum_tau) .* dV)

All chunks at once, `chunk_bwd_qkg_kernel`, with W = diag(beta) u, the writes:

    dP = dO W^T
    dA = -tril(dV W^T, -1)
    dQ = scale * exp(g_cum) .* (dO S^T) + dP' K
    dK = exp(g_cum_C - g_cum_tau) .* (W dS'^T) - exp(g_cum_tau) .* (dV S^T) + dP'^T Q + (dA' + dA'^T) K

dS' is the gradient of the state after the chunk; dP' and dA' are dP and dA times the factors that lie between
Q K^T and P, and between K K^T and A. dA is that of the solve, so T^T dT T^T is never formed. dbeta sums the
terms linear in beta: the columns of dP .* P and dA .* A (without their beta) and k . (u dS'^T). Each log gate
gets the sum of the products it scales; rows and columns sum the same numbers, so that the terms which cancel
do so to fp32 rounding.
"""

from fla_train.kernels.delta_product.triton.chunk_fwd import MIN_LOG_DECAY
from fla_train.kernels.delta_product.triton.common import (
    KEY_TILE,
    chunk_span,
    load_keys,
    load_rows,
    load_scalars,
    load_state,
    program_tile,
    sequence_span,
    store_rows,
    store_state,
    times_inverse,
)
from fla_train.kernels.optional_triton import tl, triton


@triton.jit
def load_key_tiles(
    p, i_row, n_rows, i_h, H: tl.constexpr, G: tl.constexpr, K: tl.constexpr, R: tl.constexpr,
    BK: tl.constexpr, OPERAND: tl.constexpr,
):  # fmt: skip
    """Load all channels of rows of q or k as operands, in tiles that match those of `load_state`."""
    WIDTH: tl.constexpr = min(BK, KEY_TILE)
    b_k = ()
    for i in tl.static_range(BK // WIDTH):
        b_k += (load_keys(p, i_row, n_rows, i_h, i * WIDTH, H, G, K, R, WIDTH).to(OPERAND),)
    return b_k


@triton.jit
def times_keys(b_s, b_k, OPERAND: tl.constexpr, PRECISION: tl.constexpr):
    """Return S^T K^T [BV, M] of a state and keys, each a tuple of tiles."""
    b_y = tl.dot(b_s[0].to(OPERAND), tl.trans(b_k[0]), input_precision=PRECISION)
    for i in tl.static_range(1, len(b_s)):
        b_y = tl.dot(b_s[i].to(OPERAND), tl.trans(b_k[i]), b_y, input_precision=PRECISION)
    return b_y


@triton.jit
def load_scores(
    p, peak, i_c, i_t, n_t, i_h,
    H: tl.constexpr, M: tl.constexpr, BC: tl.constexpr, L2NORM: tl.constexpr, OPERAND: tl.constexpr,
):  # fmt: skip
    """Load P diag(beta) [BC, M] of a chunk, as an operand."""
    b_p = load_rows(p + (i_t * H + i_h) * M, n_t, 0, M, H * M, BC, M)
    if L2NORM:
        b_p = b_p.to(tl.float32) * tl.load(peak + i_c.to(tl.int64) * H + i_h)
    return b_p.to(OPERAND)


@triton.jit
def load_gates(g_cum, i_h, n_total, i_t, n_t, N: tl.constexpr, M: tl.constexpr, BC: tl.constexpr):
    """Load cumulative log2 gates of a chunk: by Householder step [M], by token [BC], and of its last token.

    Rows past the end repeat the last token, so that no difference of gates is positive (0 * 2^large is NaN).
    """
    p_g = g_cum + i_h.to(tl.int64) * n_total + i_t
    b_gm = tl.load(p_g + tl.minimum(tl.arange(0, M) // N, n_t - 1))
    b_gt = tl.load(p_g + tl.minimum(tl.arange(0, BC), n_t - 1))
    return b_gm, b_gt, tl.load(p_g + n_t - 1)


@triton.jit
def bwd_state_step(
    b_ds, b_q, b_k, do, wy, p, read, write, query, decay, peak,
    i_chunk, i_c, i_t, n_t, i_m, n_m, i_v, i_h, n_total,
    H: tl.constexpr, V: tl.constexpr, N: tl.constexpr, M: tl.constexpr, BC: tl.constexpr, BV: tl.constexpr,
    L2NORM: tl.constexpr, OPERAND: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Return dS^T before chunk `i_c` from that after it, tiles as Q and K are, and dV^T [BV, M]."""
    b_do = load_rows(do + (i_t * H + i_h) * V, n_t, i_v, V, H * V, BC, BV).to(OPERAND)
    b_wy = load_rows(wy + (i_m * H + i_h) * M, n_m, 0, M, H * M, M, M)
    b_p = load_scores(p, peak, i_chunk + i_c, i_t, n_t, i_h, H, M, BC, L2NORM, OPERAND)
    b_read = load_scalars(read, i_h, n_total * N, i_m, n_m, M)
    b_write = load_scalars(write, i_h, n_total * N, i_m, n_m, M)
    b_query = load_scalars(query, i_h, n_total, i_t, n_t, BC)

    b_do = tl.trans(b_do)  # [BV, BC]
    b_du = times_keys(b_ds, b_k, OPERAND, PRECISION) * b_write[None, :]  # [BV, M]
    b_du = tl.dot(b_do, b_p, b_du, input_precision=PRECISION)
    b_dv = times_inverse(b_du, b_wy, OPERAND, PRECISION)
    b_decay = tl.load(decay + (i_chunk + i_c) * H + i_h)
    b_do = (b_do.to(tl.float32) * b_query[None, :]).to(OPERAND)
    b_dr = (b_dv * -b_read[None, :]).to(OPERAND)
    b_before = ()
    for i in tl.static_range(len(b_ds)):
        b_dsi = tl.dot(b_do, b_q[i], b_ds[i] * b_decay, input_precision=PRECISION)
        b_before += (tl.dot(b_dr, b_k[i], b_dsi, input_precision=PRECISION),)
    return b_before, b_dv


@triton.jit(do_not_specialize=["T", "NT"])
def chunk_bwd_state_kernel(
    q, k, do,  # [tokens, H / G, K], [tokens * N, H / G, K], [tokens, H, V]
    wy, p, read, write, query, decay, peak,  # from chunk_prepare_wy_kernel
    dv, dstates,  # out [tokens * N, H, V]; [chunks, H, V, K], the gradient of the state at each chunk's end
    dfinal_state, dinitial_state,  # [sequences, H, K, V] fp32, in and out
    cu_seqlens, chunk_offsets, n_total, T, NT,
    H: tl.constexpr, G: tl.constexpr, K: tl.constexpr, V: tl.constexpr, N: tl.constexpr, C: tl.constexpr,
    M: tl.constexpr, BC: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    L2NORM: tl.constexpr, PACKED: tl.constexpr, OPERAND: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute the state's gradient and dv per sequence, head and tile of V, the last chunk first."""
    i_v, i_h, i_s = program_tile(H, (V + BV - 1) // BV, BV)
    i_start, length, i_chunk = sequence_span(i_s, cu_seqlens, chunk_offsets, T, NT, PACKED)
    b_ds = load_state(dfinal_state, i_s, i_h, i_v, H, K, V, BK, BV)  # dS^T

    n_chunks = tl.cdiv(length, C)
    for i_reverse in range(0, n_chunks):
        i_c = n_chunks - 1 - i_reverse
        i_t, n_t = i_start + i_c * C, tl.minimum(length - i_c * C, C)
        i_m, n_m = i_t * N, n_t * N
        p_ds = dstates + ((i_chunk + i_c) * H + i_h) * V * K + i_v * K
        for i in tl.static_range(len(b_ds)):
            b_dsi = b_ds[i].to(OPERAND)
            store_rows(p_ds, b_dsi, V - i_v, i * KEY_TILE, K, K, BV, b_dsi.shape[1])
        b_k = load_key_tiles(k, i_m, n_m, i_h, H, G, K, M, BK, OPERAND)
        b_q = load_key_tiles(q, i_t, n_t, i_h, H, G, K, BC, BK, OPERAND)
        b_ds, b_dv = bwd_state_step(
            b_ds, b_q, b_k, do, wy, p, read, write, query, decay, peak,
            i_chunk, i_c, i_t, n_t, i_m, n_m, i_v, i_h, n_total,
            H, V, N, M, BC, BV, L2NORM, OPERAND, PRECISION,
        )  # fmt: skip
        store_rows(dv + (i_m * H + i_h) * V, tl.trans(b_dv), n_m, i_v, V, H * V, M, BV)
    store_state(dinitial_state, b_ds, i_s, i_h, i_v, H, K, V, BV)


@triton.jit
def sum_over_values(
    p_rows, n_rows, p_state, i_k, K: tl.constexpr, V: tl.constexpr, H: tl.constexpr,
    R: tl.constexpr, BKO: tl.constexpr, BV: tl.constexpr, OPERAND: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Return rows [R, V] times a transposed state [V, K], BKO columns of it from `i_k`, in fp32."""
    b_y = tl.zeros((R, BKO), tl.float32)
    for i_v in range(0, V, BV):
        b_rows = load_rows(p_rows, n_rows, i_v, V, H * V, R, BV).to(OPERAND)
        b_s = load_rows(p_state + i_v * K, V - i_v, i_k, K, K, BV, BKO).to(OPERAND)
        b_y = tl.dot(b_rows, b_s, b_y, input_precision=PRECISION)
    return b_y


@triton.jit(do_not_specialize=["T", "NT"])
def chunk_bwd_qkg_kernel(
    q, k, beta, g,  # [tokens, H / G, K], [tokens * N, H / G, K], [tokens * N, H], [tokens, H]
    do, dv, u,  # [tokens, H, V], [tokens * N, H, V], the same
    g_cum, q_rnorm, k_rnorm,  # from chunk_prepare_wy_kernel
    states, dstates,  # [chunks, H, V, K], from the serial kernels
    dq, dk, dbeta, dg,  # out, as q, k, beta, g, but with a dq and a dk for each of H heads
    cu_seqlens, chunk_offsets, chunk_sequence, scale, n_total, T, NT,
    H: tl.constexpr, G: tl.constexpr, K: tl.constexpr, V: tl.constexpr, N: tl.constexpr, C: tl.constexpr,
    M: tl.constexpr, BC: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, BKO: tl.constexpr,
    GATED: tl.constexpr, L2NORM: tl.constexpr, PACKED: tl.constexpr,
    OPERAND: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute per chunk and head: dq, dk, dbeta and dg.

    One product after the other, each over all of V, so that few accumulators are alive at a time: that is
    worth reading tiles again, from the L2 cache. The inner products k . dk and q . dq (and their parts),
    which dbeta, dg and the norms take, are row sums of those products; where K spans several blocks a first
    pass collects them.
    """
    i_c, i_h = tl.program_id(0) // H, tl.program_id(0) % H  # heads side by side: their rows are adjacent
    i_t, n_t = chunk_span(i_c, cu_seqlens, chunk_offsets, chunk_sequence, T, NT, C, PACKED)
    if n_t <= 0:
        return
    i_m, n_m = i_t * N, n_t * N
    o_t, o_m = tl.arange(0, BC), tl.arange(0, M)
    o_tau = o_m // N
    p_s = (i_c.to(tl.int64) * H + i_h) * V * K
    p_ds, p_s = dstates + p_s, states + p_s
    p_u, p_dv, p_do = u + (i_m * H + i_h) * V, dv + (i_m * H + i_h) * V, do + (i_t * H + i_h) * V

    b_beta = tl.load(beta + (i_m + o_m) * H + i_h, mask=o_m < n_m, other=0.0)
    b_rk = tl.full((M,), 1.0, tl.float32)
    b_rq = tl.full((BC,), 1.0, tl.float32)
    if L2NORM:
        b_rk = load_scalars(k_rnorm, i_h, n_total * N, i_m, n_m, M)
        b_rq = load_scalars(q_rnorm, i_h, n_total, i_t, n_t, BC)
    b_read, b_write, b_query = b_rk, b_rk, b_rq * scale  # the factors of k and q, here without beta
    if GATED:
        b_gm, b_gt, g_last = load_gates(g_cum, i_h, n_total, i_t, n_t, N, M, BC)
        b_read *= tl.exp2(b_gm)
        b_write *= tl.exp2(g_last - b_gm)
        b_query *= tl.exp2(b_gt)

    b_da = tl.zeros((M, M), tl.float32)  # dV u^T
    b_dp = tl.zeros((M, BC), tl.float32)  # u dO^T
    for i_v in range(0, V, BV):
        b_u = load_rows(p_u, n_m, i_v, V, H * V, M, BV).to(OPERAND)
        b_dv = load_rows(p_dv, n_m, i_v, V, H * V, M, BV).to(OPERAND)
        b_do = load_rows(p_do, n_t, i_v, V, H * V, BC, BV).to(OPERAND)
        b_da = tl.dot(b_dv, tl.trans(b_u), b_da, input_precision=PRECISION)
        b_dp = tl.dot(b_u, tl.trans(b_do), b_dp, input_precision=PRECISION)

    b_k = load_keys(k, i_m, n_m, i_h, 0, H, G, K, M, BK).to(OPERAND)
    b_q = load_keys(q, i_t, n_t, i_h, 0, H, G, K, BC, BK).to(OPERAND)
    lower = o_m[:, None] > o_m[None, :]
    seen = o_tau[:, None] <= o_t[None, :]
    b_dp *= b_rk[:, None] * (b_rq * scale)[None, :]
    b_da *= -b_rk[:, None] * b_rk[None, :]
    if GATED:
        b_dp *= tl.exp2(tl.where(seen, b_gt[None, :] - b_gm[:, None], 0.0))
        b_da *= tl.exp2(tl.where(lower, b_gm[:, None] - b_gm[None, :], 0.0))
    b_dp = tl.where(seen, b_dp, 0.0)
    b_da = tl.where(lower, b_da, 0.0)
    b_x = b_dp * tl.dot(b_k, tl.trans(b_q), input_precision=PRECISION)  # dP .* P
    b_inner = tl.sum(b_x, 1)
    b_qp = tl.sum(b_x * b_beta[:, None], 0)
    b_x = b_da * tl.dot(b_k, tl.trans(b_k), input_precision=PRECISION)  # dA .* A
    b_inner += tl.sum(b_x, 0)
    b_kp = tl.sum(b_x * b_beta[None, :], 1) + b_inner * b_beta
    b_da = (b_da * b_beta[None, :]).to(OPERAND)
    b_dp = (b_dp * b_beta[:, None]).to(OPERAND)

    # Inner products by way of the state: k . dk where k writes it and where k reads it, and q . dq.
    SPLIT: tl.constexpr = BKO < BK
    b_kw = tl.zeros((M,), tl.float32)
    b_kr = tl.zeros((M,), tl.float32)
    b_qr = tl.zeros((BC,), tl.float32)
    if SPLIT:
        for i_k in range(0, K, BKO):
            b_ko = load_keys(k, i_m, n_m, i_h, i_k, H, G, K, M, BKO).to(tl.float32)
            b_qo = load_keys(q, i_t, n_t, i_h, i_k, H, G, K, BC, BKO).to(tl.float32)
            b_y = sum_over_values(p_u, n_m, p_ds, i_k, K, V, H, M, BKO, BV, OPERAND, PRECISION)
            b_kw += tl.sum(b_ko * b_y, 1) * b_write
            b_y = sum_over_values(p_dv, n_m, p_s, i_k, K, V, H, M, BKO, BV, OPERAND, PRECISION)
            b_kr -= tl.sum(b_ko * b_y, 1) * b_read
            b_y = sum_over_values(p_do, n_t, p_s, i_k, K, V, H, BC, BKO, BV, OPERAND, PRECISION)
            b_qr += tl.sum(b_qo * b_y, 1) * b_query

    for i_k in range(0, K, BKO):
        b_ko = load_keys(k, i_m, n_m, i_h, i_k, H, G, K, M, BKO).to(OPERAND)
        b_qo = load_keys(q, i_t, n_t, i_h, i_k, H, G, K, BC, BKO).to(OPERAND)
        b_dk = sum_over_values(p_u, n_m, p_ds, i_k, K, V, H, M, BKO, BV, OPERAND, PRECISION)
        b_dk *= b_write[:, None]
        if not SPLIT:
            b_kw = tl.sum(b_ko.to(tl.float32) * b_dk, 1)
        b_dk *= b_beta[:, None]
        b_y = sum_over_values(p_dv, n_m, p_s, i_k, K, V, H, M, BKO, BV, OPERAND, PRECISION)
        b_y *= b_read[:, None]
        if not SPLIT:
            b_kr = -tl.sum(b_ko.to(tl.float32) * b_y, 1)
        b_dk -= b_y
        b_dk = tl.dot(b_da, b_ko, b_dk, input_precision=PRECISION)
        b_dk = tl.dot(tl.trans(b_da), b_ko, b_dk, input_precision=PRECISION)
        b_dk = tl.dot(b_dp, b_qo, b_dk, input_precision=PRECISION)
        if L2NORM:
            # The sums above are r * d(x r): with r = rsqrt(x . x + eps), dx = that - r^2 x (x . that).
            b_dk -= b_ko.to(tl.float32) * (b_rk * b_rk * (b_kr + b_kw * b_beta + b_kp))[:, None]
        store_rows(dk + (i_m * H + i_h) * K, b_dk, n_m, i_k, K, H * K, M, BKO)
        b_dq = sum_over_values(p_do, n_t, p_s, i_k, K, V, H, BC, BKO, BV, OPERAND, PRECISION)
        b_dq *= b_query[:, None]
        if not SPLIT:
            b_qr = tl.sum(b_qo.to(tl.float32) * b_dq, 1)
        b_dq = tl.dot(tl.trans(b_dp), b_ko, b_dq, input_precision=PRECISION)
        if L2NORM:
            b_dq -= b_qo.to(tl.float32) * (b_rq * b_rq * (b_qr + b_qp))[:, None]
        store_rows(dq + (i_t * H + i_h) * K, b_dq, n_t, i_k, K, H * K, BC, BKO)

    tl.store(dbeta + (i_m + o_m) * H + i_h, b_kw + b_inner, mask=o_m < n_m)
    if GATED:
        # k that reads the state raises the gates up to its token, its write lowers them again. Sums are
        # of matrices: triton 3.6 and 3.7 do not compile that of a vector here for sm_100 (K = 64).
        b_row = b_kr + b_kp - b_inner * b_beta - (b_kw + b_inner) * b_beta
        b_row = tl.where(o_tau[None, :] >= o_t[:, None], b_row[None, :], 0.0) + (b_kw * b_beta)[None, :]
        b_dg = tl.sum(b_row, 1)
        b_dg += tl.sum(tl.where(o_t[None, :] >= o_t[:, None], (b_qr + b_qp)[None, :], 0.0), 1)
        b_ss = tl.zeros((BV,), tl.float32)  # rows of S^T .* dS'^T
        for i_v in range(0, V, BV):
            for i_k in range(0, K, BKO):
                b_s = load_rows(p_s + i_v * K, V - i_v, i_k, K, K, BV, BKO).to(tl.float32)
                b_ds = load_rows(p_ds + i_v * K, V - i_v, i_k, K, K, BV, BKO).to(tl.float32)
                b_ss += tl.sum(b_s * b_ds, 1)
        b_dg += tl.sum(b_ss, 0) * tl.exp2(g_last)
        p_g = (i_t + o_t) * H + i_h
        b_g = tl.load(g + p_g, mask=o_t < n_t, other=0.0)
        tl.store(dg + p_g, tl.where(b_g > MIN_LOG_DECAY, b_dg, 0.0), mask=o_t < n_t)
