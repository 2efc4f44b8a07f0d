"""Forward kernels of `delta_product`.

With G the chunk's cumulative gates, tau(r) = r // N the token of sub-step r, S the state at the chunk's start
and D = diag(beta), one chunk of the recurrence is (WY form, arXiv 2406.06484 and 2412.06464, for N sub-steps
per token)

    A  = tril(K K^T .* exp(G_tau(r) - G_tau(s)), -1)     X = (I + A D)^-1        independent of the state
    P  = scale * (Q K^T) .* exp(G_i - G_tau(s)), tau(s) <= i
    E  = X (V - exp(G_tau) .* (K S))                     the prediction errors
    O  = scale * exp(G_i) .* (Q S) + (P D) E
    S' = exp(G_C) S + K^T (exp(G_C - G_tau) .* D E)

Taking E instead of D E as the unknown keeps every formula of the backward free of a division by beta.
`prepare_kernel` computes X, P D and the row factors for all chunks at once; `state_kernel` walks each
sequence and holds the state transposed, [V, K], so that each product's left operand is the accumulator of the
one before.
"""

import triton
import triton.language as tl

from fla_train.kernels.delta_product.triton.common import (
    TINY,
    chunk_span,
    factored_times_inverse,
    load_rows,
    load_scalars,
    nothing,
    plus_writes,
    segment_span,
    store_rows,
)

LOG2E = tl.constexpr(1.4426950408889634)
# Floor of one token's log2 decay: 2^-50 forgets more than fp32 resolves, and G - G' never becomes inf - inf.
MIN_LOG2_DECAY = tl.constexpr(-50.0)


@triton.jit
def unit_lower_inverse(b_l, zero, M: tl.constexpr, OPERAND: tl.constexpr):
    """(I + L)^-1 of a strictly lower triangular L [M, M], M a power of two; in fp32. `zero` is `nothing`.

    Masked doubling: with X the inverse of the diagonal blocks of width w and L_w the blocks below them,
    X - X L_w X is that of the blocks of width 2 w. It equals substitution and never forms a power of L (those
    overflow for correlated keys and beta near 2). With fp16 operands one Newton step on the rounded X,
    X + X (I - (I + L) X), removes what their rounding did; there L enters in two terms.
    """
    o_r, o_c = tl.arange(0, M)[:, None], tl.arange(0, M)[None, :]
    unit = tl.where(o_r == o_c, 1.0, zero)
    b_x = unit - tl.where((o_r == o_c + 1) & (o_c % 2 == 0), b_l, 0.0)
    for level in tl.static_range(1, M.bit_length() - 1):
        below = ((o_r >> level) == (o_c >> level) + 1) & ((o_c >> level) % 2 == 0)
        b_w = tl.where(below, b_l, zero).to(OPERAND)
        b_y = b_x.to(OPERAND)
        b_w = tl.dot(b_y, b_w, input_precision="tf32x3").to(OPERAND)
        b_x -= tl.dot(b_w, b_y, input_precision="tf32x3")
    if OPERAND == tl.float16:
        b_y = b_x.to(OPERAND)
        b_w = b_l.to(OPERAND)
        b_rest = tl.dot(b_w, b_y, b_y.to(tl.float32))
        b_rest = tl.dot((b_l - b_w.to(tl.float32)).to(OPERAND), b_y, b_rest)
        b_x = tl.dot(b_y, (unit - b_rest).to(OPERAND), b_y.to(tl.float32))
    return b_x


@triton.jit(do_not_specialize=["T", "NT"])
def prepare_kernel(
    q, k, beta, g,  # [tokens, H, K], [tokens * N, H, K], [tokens * N, H], [tokens, H]
    x, p,  # out [tokens * N, H, M] and [tokens, H, M], 16 bits or as q
    read, write, query, decay, peak,  # out [H, n_total * N], the same, [H, n_total], [chunks, H] twice, fp32
    gc, rq, rk,  # out [H, n_total], the same, [H, n_total * N], fp32
    cu_seqlens, chunk_offsets, chunk_segment, scale, eps, n_total, T, NT,
    H: tl.constexpr, K: tl.constexpr, N: tl.constexpr, C: tl.constexpr,
    M: tl.constexpr, BC: tl.constexpr, BK: tl.constexpr,
    GATED: tl.constexpr, L2NORM: tl.constexpr, PACKED: tl.constexpr,
    OPERAND: tl.constexpr, PRECISION: tl.constexpr, INVERSE: tl.constexpr,
):  # fmt: skip
    """Per chunk and head: X, P D, the cumulative gates, the reciprocal norms, and the factors made of them.

    `read`, `write` and `query` are the factors (norm, gate, beta, scale) of raw k where it reads the state,
    of raw k where it writes it and of raw q; `decay` is that of the state over the chunk. Of normalised keys
    P D is divided by `peak`, so that it fits in fp16 whatever scale and beta are: no element is beyond 1.
    """
    i_c, i_h = tl.program_id(0) // H, tl.program_id(0) % H  # heads side by side: their rows are neighbours
    i_t, n_t = chunk_span(i_c, cu_seqlens, chunk_offsets, chunk_segment, T, NT, C, PACKED)
    if n_t <= 0:
        return
    i_m, n_m = i_t * N, n_t * N
    o_t, o_m = tl.arange(0, BC), tl.arange(0, M)
    o_tau = o_m // N
    m_t, m_m = o_t < n_t, o_m < n_m
    p_t = i_h.to(tl.int64) * n_total + i_t + o_t
    p_m = i_h.to(tl.int64) * n_total * N + i_m + o_m

    b_k = load_rows(k + (i_m * H + i_h) * K, n_m, 0, K, H * K, M, BK).to(OPERAND)
    b_q = load_rows(q + (i_t * H + i_h) * K, n_t, 0, K, H * K, BC, BK).to(OPERAND)
    b_beta = tl.load(beta + (i_m + o_m) * H + i_h, mask=m_m, other=0.0)
    b_read = tl.full((M,), 1.0, tl.float32)
    b_query = tl.full((BC,), 1.0, tl.float32) * scale
    if L2NORM:
        b_read = tl.rsqrt(tl.sum(b_k.to(tl.float32) * b_k.to(tl.float32), 1) + eps)
        b_rq = tl.rsqrt(tl.sum(b_q.to(tl.float32) * b_q.to(tl.float32), 1) + eps)
        b_query *= b_rq
        tl.store(rk + p_m, b_read, mask=m_m)
        tl.store(rq + p_t, b_rq, mask=m_t)
    b_write = b_read * b_beta
    b_row = b_query  # of P D
    if L2NORM:
        b_peak = tl.abs(scale) * tl.max(tl.abs(b_beta), 0)
        b_peak = tl.where(b_peak > TINY, b_peak, 1.0)  # without writes P D is 0, whatever divides it
        tl.store(peak + i_c.to(tl.int64) * H + i_h, b_peak)
        b_row *= 1.0 / b_peak
    b_p = tl.dot(b_k, tl.trans(b_q), input_precision=PRECISION)  # [M, BC]
    b_p = b_p * b_write[:, None] * b_row[None, :]
    b_a = tl.dot(b_k, tl.trans(b_k), input_precision=PRECISION)  # [M, M]
    b_a = b_a * b_read[:, None] * b_write[None, :]
    lower = o_m[:, None] > o_m[None, :]
    seen = o_tau[:, None] <= o_t[None, :]
    zero, chunk_decay = nothing(T), 1.0
    if GATED:
        b_g = tl.load(g + (i_t + o_t) * H + i_h, mask=m_t, other=0.0) * LOG2E
        b_g = tl.where(b_g < MIN_LOG2_DECAY, MIN_LOG2_DECAY, b_g)  # `maximum` would make a NaN a closed gate
        b_gt = tl.cumsum(b_g, 0)
        b_gm = tl.gather(b_gt, o_tau, 0)  # sub-steps of one token get bit-identical values
        g_last = tl.sum(b_g, 0)
        tl.store(gc + p_t, b_gt, mask=m_t)
        b_p *= tl.exp2(tl.where(seen, b_gt[None, :] - b_gm[:, None], 0.0))
        b_a *= tl.exp2(tl.where(lower, b_gm[:, None] - b_gm[None, :], 0.0))
        b_read *= tl.exp2(b_gm)
        b_write *= tl.exp2(g_last - b_gm)
        b_query *= tl.exp2(b_gt)
        chunk_decay = tl.exp2(g_last)
    tl.store(read + p_m, b_read, mask=m_m)
    tl.store(write + p_m, b_write, mask=m_m)
    tl.store(query + p_t, b_query, mask=m_t)
    tl.store(decay + i_c.to(tl.int64) * H + i_h, chunk_decay)
    store_rows(p + (i_t * H + i_h) * M, tl.trans(tl.where(seen, b_p, zero)), n_t, 0, M, H * M, BC, M)
    b_x = unit_lower_inverse(tl.where(lower, b_a, zero), zero, M, INVERSE)
    store_rows(x + (i_m * H + i_h) * M, b_x, n_m, 0, M, H * M, M, M)


@triton.jit(do_not_specialize=["T", "NT"])
def state_kernel(
    q, k, v,  # [tokens, H, K], [tokens * N, H, K], [tokens * N, H, V]
    x, p, read, write, query, decay, peak,  # from prepare_kernel
    o,  # out [tokens, H, V]
    errors, states,  # out [tokens * N, H, V], E; out [chunks, H, V, K], the state at each chunk's start
    initial_state, final_state,  # [segments, H, K, V] fp32, in and out
    cu_seqlens, chunk_offsets, n_total, T, NT,
    H: tl.constexpr, K: tl.constexpr, V: tl.constexpr, N: tl.constexpr, C: tl.constexpr,
    M: tl.constexpr, BC: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    L2NORM: tl.constexpr, PACKED: tl.constexpr,
    HAS_INITIAL: tl.constexpr, STORE_FINAL: tl.constexpr, KEEP: tl.constexpr,
    OPERAND: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Per segment, head and block of V: the state and the output, chunk after chunk.

    Blocks of V are neighbours in the grid: they share q, k, X and P through the L2 cache.
    """
    NV: tl.constexpr = (V + BV - 1) // BV
    i_v = (tl.program_id(0) % NV) * BV
    i_h = (tl.program_id(0) // NV) % H
    i_s = tl.program_id(0) // (NV * H)
    i_start, length, i_chunk = segment_span(i_s, cu_seqlens, chunk_offsets, T, NT, PACKED)

    o_k, o_v = tl.arange(0, BK), i_v + tl.arange(0, BV)
    m_s = (o_v < V)[:, None] & (o_k < K)[None, :]
    p_s = (i_s.to(tl.int64) * H + i_h) * K * V + o_k[None, :] * V + o_v[:, None]
    b_s = tl.zeros((BV, BK), tl.float32)  # S^T
    if HAS_INITIAL:
        b_s += tl.load(initial_state + p_s, mask=m_s, other=0.0)

    for i_c in range(0, tl.cdiv(length, C)):
        i_t, n_t = i_start + i_c * C, tl.minimum(length - i_c * C, C)
        i_m, n_m = i_t * N, n_t * N
        b_sc = b_s.to(OPERAND)
        if KEEP:
            store_rows(states + ((i_chunk + i_c) * H + i_h) * V * K + i_v * K, b_sc, V - i_v, 0, K, K, BV, BK)
        b_k = load_rows(k + (i_m * H + i_h) * K, n_m, 0, K, H * K, M, BK).to(OPERAND)
        b_q = load_rows(q + (i_t * H + i_h) * K, n_t, 0, K, H * K, BC, BK).to(OPERAND)
        b_v = load_rows(v + (i_m * H + i_h) * V, n_m, i_v, V, H * V, M, BV).to(tl.float32)
        b_x = load_rows(x + (i_m * H + i_h) * M, n_m, 0, M, H * M, M, M)
        b_p = load_rows(p + (i_t * H + i_h) * M, n_t, 0, M, H * M, BC, M)
        if OPERAND == tl.float32:
            b_p = b_p.to(OPERAND)
        b_read = load_scalars(read, i_h, n_total * N, i_m, n_m, M)
        b_write = load_scalars(write, i_h, n_total * N, i_m, n_m, M)
        b_query = load_scalars(query, i_h, n_total, i_t, n_t, BC)

        b_w = tl.dot(b_sc, tl.trans(b_k), input_precision=PRECISION)  # [BV, M]
        b_w = tl.trans(b_v) - b_w * b_read[None, :]
        b_e, b_row = factored_times_inverse(b_w, tl.trans(b_x), OPERAND, PRECISION)
        b_o = tl.dot(b_sc, tl.trans(b_q), input_precision=PRECISION) * b_query[None, :]  # [BV, BC]
        # E without its rows' factors, and P D without its own: both in fp16, or of correlated keys, whose
        # output is a small sum of large terms, rounding takes more than of all else together.
        b_factor = b_row
        if L2NORM:
            b_factor *= tl.load(peak + (i_chunk + i_c) * H + i_h)
        b_factor = tl.maximum(b_factor, TINY)  # their product may be less than either
        b_o *= (1.0 / b_factor)[:, None]
        b_o = tl.dot(b_e.to(b_p.dtype), tl.trans(b_p), b_o, input_precision=PRECISION) * b_factor[:, None]
        b_e *= b_row[:, None]
        b_s *= tl.load(decay + (i_chunk + i_c) * H + i_h)
        b_s = plus_writes(b_s, b_e * b_write[None, :], b_k, OPERAND, PRECISION)
        if KEEP:
            store_rows(errors + (i_m * H + i_h) * V, tl.trans(b_e), n_m, i_v, V, H * V, M, BV)
        store_rows(o + (i_t * H + i_h) * V, tl.trans(b_o), n_t, i_v, V, H * V, BC, BV)
    if STORE_FINAL:
        tl.store(final_state + p_s, b_s, mask=m_s)
