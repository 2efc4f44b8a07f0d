"""Kernels that find the state at the start of every piece of a cut sequence, and its gradient at every end.

A piece is a run of whole chunks. Its state obeys S_end = Phi S_start + L, with Phi [K, K] the product of its
tokens' transitions and L [K, V] the state it would reach from zero; the gradients obey
dS_start = Phi^T dS_end + dL. Both L and Phi come from the recurrence of `state_kernel`, Phi as the state that
starts from the identity and sees v = 0 (arXiv 2406.06484, section 3, applied to a run of chunks), and dL from
that of `adjoint_kernel`. All pieces run at once; what remains serial is one small product a piece.

A sequence's first piece starts from the given state, so it needs no Phi; its last piece ends the sequence, so
it needs neither L nor Phi (in the backward the other way round). With a gate and keys of norm one, a chunk is
left out where the gates after it (before it, in the backward) shrink what it wrote below fp32.

Tensors of a piece are kept transposed, in fp32: L^T [V, K], Phi^T [K, K].
"""

import triton
import triton.language as tl

from fla_train.kernels.delta_product.triton.common import (
    load_rows,
    load_scalars,
    load_scores,
    plus_writes,
    store_rows,
    times_inverse,
)

FORGOTTEN = tl.constexpr(-40.0)  # log2 of the decay below which a state's remainder is nothing in fp32
NO_DECAY = tl.constexpr(-1000.0)  # floor of one chunk's log2 decay, so that sums stay finite
WINDOW = tl.constexpr(64)  # chunks of a piece whose decays are looked at: its last, in the backward its first


@triton.jit(do_not_specialize=["T", "NT", "n_pieces", "piece_chunks"])
def cut_kernel(
    cu_seqlens, chunk_offsets,  # of the segments, or None
    bounds, piece_chunk, piece_segment,  # out [n_pieces + 1], [n_pieces], [n_pieces], int32
    piece_offsets,  # out [segments + 1], int32
    T, NT, n_pieces, piece_chunks,
    C: tl.constexpr, PACKED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Per segment: its pieces' first tokens and chunks. A segment has at least one piece, perhaps empty.

    Pieces past the last segment's (a packed row's number of pieces isn't known here) are empty, at the end.
    """
    i_s, n_s = tl.program_id(0), tl.num_programs(0)
    tokens = piece_chunks * C
    o_b = tl.arange(0, BLOCK)
    if PACKED:
        i_first = 0
        for i_b in range(0, i_s, BLOCK):
            mask = i_b + o_b < i_s
            b_length = tl.load(cu_seqlens + i_b + o_b + 1, mask=mask, other=0).to(tl.int32)
            b_length -= tl.load(cu_seqlens + i_b + o_b, mask=mask, other=0).to(tl.int32)
            i_first += tl.sum(tl.where(mask, tl.maximum(tl.cdiv(b_length, tokens), 1), 0), 0)
        i_start = tl.load(cu_seqlens + i_s).to(tl.int32)
        i_end = tl.load(cu_seqlens + i_s + 1).to(tl.int32)
        i_chunk = tl.load(chunk_offsets + i_s).to(tl.int32)
    else:
        i_first = i_s * tl.cdiv(T, tokens)
        i_start, i_end, i_chunk = i_s * T, i_s * T + T, i_s * NT
    i_next = i_first + tl.maximum(tl.cdiv(i_end - i_start, tokens), 1)
    tl.store(piece_offsets + i_s, i_first)
    stop = i_next
    if i_s == n_s - 1:
        tl.store(piece_offsets + n_s, i_next)
        stop = n_pieces + 1
    for i_b in range(i_first, stop, BLOCK):
        i_p = i_b + o_b
        tl.store(bounds + i_p, tl.minimum(i_start + (i_p - i_first) * tokens, i_end), mask=i_p < stop)
        mask = (i_p < stop) & (i_p < n_pieces)
        tl.store(piece_chunk + i_p, i_chunk + (i_p - i_first) * piece_chunks, mask=mask)
        tl.store(piece_segment + i_p, i_s + tl.zeros_like(i_p), mask=mask)


@triton.jit
def piece_span(i_p, bounds, piece_chunk, piece_segment, piece_offsets):
    """Segment, its first and last piece, and the piece's first token, tokens and first chunk."""
    i_s = tl.load(piece_segment + i_p)
    i_first, i_last = tl.load(piece_offsets + i_s), tl.load(piece_offsets + i_s + 1) - 1
    i_t = tl.load(bounds + i_p)
    length = tl.load(bounds + i_p + 1) - i_t
    return i_s, i_first, i_last, i_t.to(tl.int64), length, tl.load(piece_chunk + i_p).to(tl.int64)


@triton.jit
def load_log_decays(decay, i_chunk, n_chunks, i_h, H: tl.constexpr):
    """log2 of the decays of `n_chunks` chunks [WINDOW], 0 past the last."""
    o_c = tl.arange(0, WINDOW)
    b_decay = tl.load(decay + (i_chunk + o_c) * H + i_h, mask=o_c < n_chunks, other=1.0)
    return tl.maximum(tl.log2(b_decay), NO_DECAY)


@triton.jit(do_not_specialize=["piece_chunks"])
def piece_state_kernel(
    k, v,  # [tokens * N, H, K], [tokens * N, H, V]
    x, read, write, decay,  # from prepare_kernel
    initial_state,  # [segments, H, K, V] fp32
    local, transition,  # out [pieces, H, V, K] and [pieces, H, K, K] fp32
    bounds, piece_chunk, piece_segment, piece_offsets, n_total, piece_chunks,
    H: tl.constexpr, K: tl.constexpr, V: tl.constexpr, N: tl.constexpr, C: tl.constexpr,
    M: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    HAS_INITIAL: tl.constexpr, FORGETS: tl.constexpr, OPERAND: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Per piece, head and block of V: L; per block of K: Phi. A first piece's L holds the initial state."""
    NV: tl.constexpr = (V + BV - 1) // BV
    NY: tl.constexpr = NV + (K + BV - 1) // BV
    i_y = tl.program_id(0) % NY
    i_h = (tl.program_id(0) // NY) % H
    i_p = tl.program_id(0) // (NY * H)
    i_s, i_first, i_last, i_t, _, i_chunk = piece_span(i_p, bounds, piece_chunk, piece_segment, piece_offsets)
    transits = i_y >= NV
    if i_p >= i_last or (transits and i_p == i_first):
        return
    i_v = tl.where(transits, i_y - NV, i_y) * BV  # first column of the state, or of the identity

    o_k, o_v = tl.arange(0, BK), i_v + tl.arange(0, BV)
    b_s = tl.where(transits & (o_v[:, None] == o_k[None, :]), 1.0, 0.0)
    if HAS_INITIAL:
        mask = ((o_v < V) & (i_p == i_first))[:, None] & (o_k < K)[None, :]
        p_s = (i_s.to(tl.int64) * H + i_h) * K * V + o_k[None, :] * V + o_v[:, None]
        b_s += tl.load(initial_state + p_s, mask=mask, other=0.0)
    i_begin = 0
    if FORGETS:
        i_window = tl.maximum(piece_chunks - WINDOW, 0)
        b_decay = load_log_decays(decay, i_chunk + i_window, piece_chunks - i_window, i_h, H)
        b_after = tl.sum(b_decay, 0) - tl.cumsum(b_decay, 0)  # over the chunks that follow
        n_forgotten = tl.sum(tl.where(b_after < FORGOTTEN, 1, 0), 0)
        if n_forgotten > 0:
            b_s = tl.zeros_like(b_s)
            i_begin = tl.where(transits, piece_chunks, i_window + n_forgotten)

    n_v = tl.where(transits, 0, N * C)
    for i_c in range(i_begin, piece_chunks):
        i_m = (i_t + i_c * C) * N
        b_k = load_rows(k + (i_m * H + i_h) * K, N * C, 0, K, H * K, M, BK).to(OPERAND)
        b_v = load_rows(v + (i_m * H + i_h) * V, n_v, i_v, V, H * V, M, BV).to(tl.float32)
        b_x = load_rows(x + (i_m * H + i_h) * M, N * C, 0, M, H * M, M, M)
        b_read = load_scalars(read, i_h, n_total * N, i_m, N * C, M)
        b_write = load_scalars(write, i_h, n_total * N, i_m, N * C, M)
        b_w = tl.dot(b_s.to(OPERAND), tl.trans(b_k), input_precision=PRECISION)  # [BV, M]
        b_w = tl.trans(b_v) - b_w * b_read[None, :]
        b_e = times_inverse(b_w, tl.trans(b_x), OPERAND, PRECISION)
        b_s *= tl.load(decay + (i_chunk + i_c) * H + i_h)
        b_s = plus_writes(b_s, b_e * b_write[None, :], b_k, OPERAND, PRECISION)
    p_h = i_p.to(tl.int64) * H + i_h
    if transits:
        store_rows(transition + (p_h * K + i_v) * K, b_s, K - i_v, 0, K, K, BV, BK)
    else:
        store_rows(local + (p_h * V + i_v) * K, b_s, V - i_v, 0, K, K, BV, BK)


@triton.jit
def piece_adjoint_kernel(
    q, k, do,  # [tokens, H, K], [tokens * N, H, K], [tokens, H, V]
    x, p, read, write, query, decay, peak,  # from prepare_kernel
    dfinal_state,  # [segments, H, K, V] fp32
    local,  # out [pieces, H, V, K] fp32
    bounds, piece_chunk, piece_segment, piece_offsets, n_total,
    H: tl.constexpr, K: tl.constexpr, V: tl.constexpr, N: tl.constexpr, C: tl.constexpr,
    M: tl.constexpr, BC: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, L2NORM: tl.constexpr,
    HAS_FINAL: tl.constexpr, FORGETS: tl.constexpr, OPERAND: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Per piece, head and block of V: dL. A last piece's has the final state's gradient in it."""
    NV: tl.constexpr = (V + BV - 1) // BV
    i_v = (tl.program_id(0) % NV) * BV
    i_h = (tl.program_id(0) // NV) % H
    i_p = tl.program_id(0) // (NV * H)
    i_s, i_first, i_last, i_start, length, i_chunk = piece_span(
        i_p, bounds, piece_chunk, piece_segment, piece_offsets
    )
    if i_p > i_last or i_p == i_first:
        return

    o_k, o_v = tl.arange(0, BK), i_v + tl.arange(0, BV)
    b_ds = tl.zeros((BV, BK), tl.float32)
    if HAS_FINAL:
        mask = ((o_v < V) & (i_p == i_last))[:, None] & (o_k < K)[None, :]
        p_s = (i_s.to(tl.int64) * H + i_h) * K * V + o_k[None, :] * V + o_v[:, None]
        b_ds += tl.load(dfinal_state + p_s, mask=mask, other=0.0)
    n_chunks = tl.cdiv(length, C)
    if FORGETS:
        n_window = tl.minimum(n_chunks, WINDOW)
        b_decay = load_log_decays(decay, i_chunk, n_window, i_h, H)
        b_before = tl.cumsum(b_decay, 0) - b_decay  # over the chunks before
        n_alive = tl.sum(tl.where((b_before >= FORGOTTEN) & (tl.arange(0, WINDOW) < n_window), 1, 0), 0)
        if n_alive < n_window:
            b_ds = tl.zeros_like(b_ds)
            n_chunks = n_alive

    for i_reverse in range(0, n_chunks):
        i_c = n_chunks - 1 - i_reverse
        i_t, n_t = i_start + i_c * C, tl.minimum(length - i_c * C, C)
        i_m, n_m = i_t * N, n_t * N
        b_k = load_rows(k + (i_m * H + i_h) * K, n_m, 0, K, H * K, M, BK).to(OPERAND)
        b_q = load_rows(q + (i_t * H + i_h) * K, n_t, 0, K, H * K, BC, BK).to(OPERAND)
        b_do = load_rows(do + (i_t * H + i_h) * V, n_t, i_v, V, H * V, BC, BV).to(OPERAND)
        b_x = load_rows(x + (i_m * H + i_h) * M, n_m, 0, M, H * M, M, M)
        b_p = load_scores(p, peak, i_chunk + i_c, i_t, n_t, i_h, H, M, BC, L2NORM, OPERAND)
        b_read = load_scalars(read, i_h, n_total * N, i_m, n_m, M)
        b_write = load_scalars(write, i_h, n_total * N, i_m, n_m, M)
        b_query = load_scalars(query, i_h, n_total, i_t, n_t, BC)
        b_do = tl.trans(b_do)  # [BV, BC]
        b_de = tl.dot(b_ds.to(OPERAND), tl.trans(b_k), input_precision=PRECISION) * b_write[None, :]
        b_de = tl.dot(b_do, b_p, b_de, input_precision=PRECISION)
        b_dv = times_inverse(b_de, b_x, OPERAND, PRECISION)
        b_ds *= tl.load(decay + (i_chunk + i_c) * H + i_h)
        b_do = (b_do.to(tl.float32) * b_query[None, :]).to(OPERAND)
        b_ds = tl.dot(b_do, b_q, b_ds, input_precision=PRECISION)
        b_ds = tl.dot((b_dv * -b_read[None, :]).to(OPERAND), b_k, b_ds, input_precision=PRECISION)
    p_local = local + ((i_p.to(tl.int64) * H + i_h) * V + i_v) * K
    store_rows(p_local, b_ds, V - i_v, 0, K, K, BV, BK)


@triton.jit
def combine_kernel(
    local, transition,  # [pieces, H, V, K] fp32 and [pieces, H, K, K], from the kernels above
    edge,  # [segments, H, K, V] fp32: the initial state, or the gradient of the final one
    states,  # out [pieces, H, K, V] fp32: the state at each piece's start, or the gradient at its end
    piece_offsets,
    H: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    HAS_EDGE: tl.constexpr, REVERSE: tl.constexpr, OPERAND: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Per segment, head and block of V, piece after piece: S <- Phi S + L, backwards S <- Phi^T S + L.

    Nothing but the product waits for the piece before: Phi and L are copied meanwhile.
    """
    NV: tl.constexpr = (V + BV - 1) // BV
    i_v = (tl.program_id(0) % NV) * BV
    i_h = (tl.program_id(0) // NV) % H
    i_s = tl.program_id(0) // (NV * H)
    i_first, i_end = tl.load(piece_offsets + i_s), tl.load(piece_offsets + i_s + 1)
    n_pieces = i_end - i_first

    o_k, o_v = tl.arange(0, BK), i_v + tl.arange(0, BV)
    m_s = (o_v < V)[:, None] & (o_k < K)[None, :]
    p_s = o_k[None, :] * V + o_v[:, None]
    b_s = tl.zeros((BV, BK), tl.float32)  # S^T
    if HAS_EDGE:
        b_s += tl.load(edge + (i_s.to(tl.int64) * H + i_h) * K * V + p_s, mask=m_s, other=0.0)
    i_p = ((i_end - 1 if REVERSE else i_first).to(tl.int64)) * H + i_h  # piece and head
    tl.store(states + i_p * K * V + p_s, b_s, mask=m_s)
    if n_pieces > 1:  # the piece at the edge has the state before it in its L
        b_s = load_rows(local + (i_p * V + i_v) * K, V - i_v, 0, K, K, BV, BK)
        i_p += -H if REVERSE else H
        tl.store(states + i_p * K * V + p_s, b_s, mask=m_s)
    for _ in range(2, n_pieces):
        b_phi = load_rows(transition + i_p * K * K, K, 0, K, K, BK, BK)  # Phi^T
        b_local = load_rows(local + (i_p * V + i_v) * K, V - i_v, 0, K, K, BV, BK)
        b_s = times_inverse(b_s, tl.trans(b_phi) if REVERSE else b_phi, OPERAND, PRECISION) + b_local
        i_p += -H if REVERSE else H
        tl.store(states + i_p * K * V + p_s, b_s, mask=m_s)
