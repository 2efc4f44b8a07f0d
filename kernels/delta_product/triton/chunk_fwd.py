"""Forward kernels of `delta_product`: `chunk_prepare_wy_kernel` and `chunk_fwd_kernel`.

Let g_cum be the chunk's cumulative log gates, tau(r) = r // N the token of Householder step r and S the state
at the chunk's start, one chunk of the recurrence is (WY form, arXiv 2406.06484 and 2412.06464, for N steps
per token)

    A  = tril(K K^T .* exp(g_cum_tau(r) - g_cum_tau(s)), -1)     T = (I + A diag(beta))^-1
    P  = scale * (Q K^T) .* exp(g_cum_i - g_cum_tau(s)), tau(s) <= i
    u  = T (V - exp(g_cum_tau) .* (K S))                         corrected values
    O  = scale * exp(g_cum_i) .* (Q S) + P diag(beta) u
    S' = exp(g_cum_C) S + K^T (exp(g_cum_C - g_cum_tau) .* diag(beta) u)

Taking u without beta as the unknown keeps every formula of the backward free of a division by beta.
`chunk_prepare_wy_kernel` computes T, P diag(beta) and the row factors, which do not depend on the state, for
all chunks at once. `chunk_fwd_kernel` goes through each sequence and holds the state transposed, [V, K], so
that each product's left operand is the accumulator of the one before.
"""

from fla_train.kernels.delta_product.triton.common import (
    KEY_TILE,
    TINY,
    add_writes,
    chunk_span,
    corrected_values,
    load_keys,
    load_rows,
    load_scalars,
    load_state,
    opaque_zero,
    program_tile,
    sequence_span,
    store_rows,
    store_state,
)
from fla_train.kernels.optional_triton import tl, triton

LOG2E = tl.constexpr(1.4426950408889634)
# Floor of one token's log2 decay: 2^-50 forgets more than fp32 resolves, and g - g' never becomes inf - inf.
MIN_LOG2_DECAY = tl.constexpr(-50.0)
MIN_LOG_DECAY = tl.constexpr(-34.657359027997266)  # the same for natural logarithms


@triton.jit
def unit_lower_inverse(b_l, zero, M: tl.constexpr, OPERAND: tl.constexpr):
    """Return (I + L)^-1 in fp32 for strictly lower triangular L [M, M], M = 2^i. `zero` is `opaque_zero`.

    Here L = A diag(beta), and the inverse is T. Masked doubling: with T the inverse of the diagonal blocks of
    width w and L_w the blocks below them, T - T L_w T is that of the blocks of width 2 w. It equals
    substitution and never forms a power of L (those overflow for correlated keys and beta near 2). For fp16
    operands one Newton step on the rounded T, T + T (I - (I + L) T), removes what their rounding did; there L
    enters in two terms.
    """
    o_r, o_c = tl.arange(0, M)[:, None], tl.arange(0, M)[None, :]
    unit = tl.where(o_r == o_c, 1.0, zero)
    b_wy = unit - tl.where((o_r == o_c + 1) & (o_c % 2 == 0), b_l, 0.0)
    for level in tl.static_range(1, M.bit_length() - 1):
        below = ((o_r >> level) == (o_c >> level) + 1) & ((o_c >> level) % 2 == 0)
        b_w = tl.where(below, b_l, zero).to(OPERAND)
        b_y = b_wy.to(OPERAND)
        b_w = tl.dot(b_y, b_w, input_precision="tf32x3").to(OPERAND)
        b_wy -= tl.dot(b_w, b_y, input_precision="tf32x3")
    if OPERAND == tl.float16:
        b_y = b_wy.to(OPERAND)
        b_w = b_l.to(OPERAND)
        b_rest = tl.dot(b_w, b_y, b_y.to(tl.float32))
        b_rest = tl.dot((b_l - b_w.to(tl.float32)).to(OPERAND), b_y, b_rest)
        b_wy = tl.dot(b_y, (unit - b_rest).to(OPERAND), b_y.to(tl.float32))
    return b_wy


@triton.jit(do_not_specialize=["T", "NT"])
def chunk_prepare_wy_kernel(
    q, k, beta, g,  # [tokens, H / G, K], [tokens * N, H / G, K], [tokens * N, H], [tokens, H]
    wy, p,  # out: T [tokens * N, H, M] and P diag(beta) [tokens, H, M], 16 bits or as q
    read, write, query, decay, peak,  # out [H, n_total * N], the same, [H, n_total], [chunks, H] twice, fp32
    g_cum, q_rnorm, k_rnorm,  # out [H, n_total], the same, [H, n_total * N], fp32
    cu_seqlens, chunk_offsets, chunk_sequence, scale, eps, n_total, T, NT,
    H: tl.constexpr, G: tl.constexpr, K: tl.constexpr, N: tl.constexpr, C: tl.constexpr,
    M: tl.constexpr, BC: tl.constexpr, BK: tl.constexpr,
    GATED: tl.constexpr, L2NORM: tl.constexpr, PACKED: tl.constexpr,
    OPERAND: tl.constexpr, PRECISION: tl.constexpr, INVERSE: tl.constexpr,
):  # fmt: skip
    """Compute per chunk and head T, P diag(beta), cumulative gates, reciprocal norms, and factors of them.

    `read`, `write` and `query` are the factors (norm, gate, beta, scale) of raw k where it reads the state,
    of raw k where it writes it and of raw q; `decay` is that of the state over the chunk. For normalised keys
    P diag(beta) is divided by `peak`, so that it fits in fp16 whatever scale and beta are: no element is
    beyond 1.
    """
    i_c, i_h = tl.program_id(0) // H, tl.program_id(0) % H  # heads side by side: their rows are adjacent
    i_t, n_t = chunk_span(i_c, cu_seqlens, chunk_offsets, chunk_sequence, T, NT, C, PACKED)
    if n_t <= 0:
        return
    i_m, n_m = i_t * N, n_t * N
    o_t, o_m = tl.arange(0, BC), tl.arange(0, M)
    o_tau = o_m // N
    m_t, m_m = o_t < n_t, o_m < n_m
    p_t = i_h.to(tl.int64) * n_total + i_t + o_t
    p_m = i_h.to(tl.int64) * n_total * N + i_m + o_m

    b_k = load_keys(k, i_m, n_m, i_h, 0, H, G, K, M, BK).to(OPERAND)
    b_q = load_keys(q, i_t, n_t, i_h, 0, H, G, K, BC, BK).to(OPERAND)
    b_beta = tl.load(beta + (i_m + o_m) * H + i_h, mask=m_m, other=0.0)
    b_read = tl.full((M,), 1.0, tl.float32)
    b_query = tl.full((BC,), 1.0, tl.float32) * scale
    if L2NORM:
        b_read = tl.rsqrt(tl.sum(b_k.to(tl.float32) * b_k.to(tl.float32), 1) + eps)
        b_rq = tl.rsqrt(tl.sum(b_q.to(tl.float32) * b_q.to(tl.float32), 1) + eps)
        b_query *= b_rq
        tl.store(k_rnorm + p_m, b_read, mask=m_m)
        tl.store(q_rnorm + p_t, b_rq, mask=m_t)
    b_write = b_read * b_beta
    b_row = b_query  # of P diag(beta)
    if L2NORM:
        b_peak = tl.abs(scale) * tl.max(tl.abs(b_beta), 0)
        b_peak = tl.where(b_peak > TINY, b_peak, 1.0)  # without writes that is 0, whatever divides it
        tl.store(peak + i_c.to(tl.int64) * H + i_h, b_peak)
        b_row *= 1.0 / b_peak
    b_p = tl.dot(b_k, tl.trans(b_q), input_precision=PRECISION)  # [M, BC]
    b_p = b_p * b_write[:, None] * b_row[None, :]
    b_a = tl.dot(b_k, tl.trans(b_k), input_precision=PRECISION)  # [M, M]
    b_a = b_a * b_read[:, None] * b_write[None, :]
    lower = o_m[:, None] > o_m[None, :]
    seen = o_tau[:, None] <= o_t[None, :]
    zero, chunk_decay = opaque_zero(T), 1.0
    if GATED:
        b_g = tl.load(g + (i_t + o_t) * H + i_h, mask=m_t, other=0.0) * LOG2E
        b_g = tl.where(b_g < MIN_LOG2_DECAY, MIN_LOG2_DECAY, b_g)  # `maximum` would make a NaN a closed gate
        b_gt = tl.cumsum(b_g, 0)
        b_gm = tl.gather(b_gt, o_tau, 0)  # steps of one token get bit-identical values
        g_last = tl.sum(b_g, 0)
        tl.store(g_cum + p_t, b_gt, mask=m_t)
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
    b_wy = unit_lower_inverse(tl.where(lower, b_a, zero), zero, M, INVERSE)
    store_rows(wy + (i_m * H + i_h) * M, b_wy, n_m, 0, M, H * M, M, M)


@triton.jit
def next_state(b_s, b_decay, b_written, b_k, OPERAND: tl.constexpr, PRECISION: tl.constexpr):
    """Return the tiles of S^T after a chunk."""
    b_next = ()
    for i in tl.static_range(len(b_s)):
        b_next += (add_writes(b_s[i] * b_decay, b_written, b_k[i], OPERAND, PRECISION),)
    return b_next


@triton.jit(do_not_specialize=["T", "NT"])
def chunk_fwd_kernel(
    q, k, v,  # [tokens, H / G, K], [tokens * N, H / G, K], [tokens * N, H, V]
    wy, p, read, write, query, decay, peak,  # from chunk_prepare_wy_kernel
    o,  # out [tokens, H, V]
    u, states,  # out [tokens * N, H, V]; out [chunks, H, V, K], the state at each chunk's start
    initial_state, final_state,  # [sequences, H, K, V] fp32, in and out
    cu_seqlens, chunk_offsets, n_total, T, NT,
    H: tl.constexpr, G: tl.constexpr, K: tl.constexpr, V: tl.constexpr, N: tl.constexpr, C: tl.constexpr,
    M: tl.constexpr, BC: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    L2NORM: tl.constexpr, PACKED: tl.constexpr, OPERAND: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute per sequence, head and tile of V: the state and the output, chunk after chunk."""
    i_v, i_h, i_s = program_tile(H, (V + BV - 1) // BV, BV)
    i_start, length, i_chunk = sequence_span(i_s, cu_seqlens, chunk_offsets, T, NT, PACKED)
    b_s = load_state(initial_state, i_s, i_h, i_v, H, K, V, BK, BV)  # S^T

    for i_c in range(0, tl.cdiv(length, C)):
        i_t, n_t = i_start + i_c * C, tl.minimum(length - i_c * C, C)
        i_m, n_m = i_t * N, n_t * N
        # Each tile is stored before its keys are loaded, or a single tile of 128 channels spills registers.
        b_k, b_q = (), ()
        b_ks, b_o = tl.zeros((BV, M), tl.float32), tl.zeros((BV, BC), tl.float32)
        for i in tl.static_range(len(b_s)):
            b_si = b_s[i].to(OPERAND)
            if states is not None:
                p_s = states + ((i_chunk + i_c) * H + i_h) * V * K + i_v * K
                store_rows(p_s, b_si, V - i_v, i * KEY_TILE, K, K, BV, b_si.shape[1])
            b_k += (load_keys(k, i_m, n_m, i_h, i * KEY_TILE, H, G, K, M, b_si.shape[1]).to(OPERAND),)
            b_q += (load_keys(q, i_t, n_t, i_h, i * KEY_TILE, H, G, K, BC, b_si.shape[1]).to(OPERAND),)
            b_ks = tl.dot(b_si, tl.trans(b_k[i]), b_ks, input_precision=PRECISION)
            # The queries' product of two tiles is faster here, while the rounded tile is in registers. Of one
            # tile it is faster below (docs/dev/log.md, 2026-11-27).
            if len(b_s) > 1:
                b_o = tl.dot(b_si, tl.trans(b_q[i]), b_o, input_precision=PRECISION)
        b_v = load_rows(v + (i_m * H + i_h) * V, n_m, i_v, V, H * V, M, BV).to(tl.float32)
        b_wy = load_rows(wy + (i_m * H + i_h) * M, n_m, 0, M, H * M, M, M)
        b_p = load_rows(p + (i_t * H + i_h) * M, n_t, 0, M, H * M, BC, M)
        if OPERAND == tl.float32:
            b_p = b_p.to(OPERAND)
        b_read = load_scalars(read, i_h, n_total * N, i_m, n_m, M)
        b_write = load_scalars(write, i_h, n_total * N, i_m, n_m, M)
        b_query = load_scalars(query, i_h, n_total, i_t, n_t, BC)

        b_u, b_row = corrected_values(b_ks, b_v, b_wy, b_read, OPERAND, PRECISION)
        if len(b_s) == 1:
            b_o = tl.dot(b_si, tl.trans(b_q[0]), b_o, input_precision=PRECISION)
        b_o *= b_query[None, :]
        # u without its rows' factors, and P diag(beta) without its own: both in fp16, or of correlated keys,
        # whose output is a small sum of large terms, rounding takes more than of all else together.
        b_factor = b_row
        if L2NORM:
            b_factor *= tl.load(peak + (i_chunk + i_c) * H + i_h)
        b_factor = tl.maximum(b_factor, TINY)  # their product may be less than either
        b_o *= (1.0 / b_factor)[:, None]
        b_o = tl.dot(b_u.to(b_p.dtype), tl.trans(b_p), b_o, input_precision=PRECISION) * b_factor[:, None]
        b_u *= b_row[:, None]
        b_decay = tl.load(decay + (i_chunk + i_c) * H + i_h)
        b_s = next_state(b_s, b_decay, b_u * b_write[None, :], b_k, OPERAND, PRECISION)
        if u is not None:
            store_rows(u + (i_m * H + i_h) * V, tl.trans(b_u), n_m, i_v, V, H * V, M, BV)
        store_rows(o + (i_t * H + i_h) * V, tl.trans(b_o), n_t, i_v, V, H * V, BC, BV)
    store_state(final_state, b_s, i_s, i_h, i_v, H, K, V, BV)
