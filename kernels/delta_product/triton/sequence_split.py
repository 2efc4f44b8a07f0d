"""Long sequences of few heads split into segments that run at once: kernels and their launches.

The serial kernels have one program per sequence, head and tile of V. Where that leaves most of the device
idle, `select` splits sequences into segments of whole chunks. Here the true state at each segment's start is
found (backwards, the gradient at its end). The serial kernels then treat the segments as documents of a
packed row.

A segment's state obeys S_end = Phi S_start + L, with Phi [K, K] the product of its tokens' transitions and
L [K, V] the state it would reach from zero; the gradients obey dS_start = Phi^T dS_end + dL. Both L and Phi
come from the recurrence of `chunk_fwd_kernel`, Phi as the state that starts from the identity and sees v = 0
(arXiv 2406.06484, section 3, applied to a run of chunks), and dL from that of `chunk_bwd_state_kernel`. All
segments run at once; what remains serial is one small product a segment.

A sequence's first segment starts from the given state, so it needs no Phi. Its last segment ends the
sequence, so it needs neither L nor Phi (in the backward the other way round). If there is a gate and keys
have norm one, a chunk is left out where the gates after it (before it, in the backward) shrink its writes
below fp32. Tensors of a segment are kept transposed, in fp32: L^T [V, K], Phi^T [K, K].

The split is as stable as the whole recurrence: an error in a segment's start is carried on by the same
transitions that carry on the rounding of the state itself. With 16-bit inputs state and transition are
rounded to fp16 once more for each segment, which shows only where beta is so small that the chunks add less.
"""

import torch
from torch import Tensor

from fla_train.kernels.cached_launch import run_kernel
from fla_train.kernels.delta_product.select import Selection
from fla_train.kernels.delta_product.triton.chunk_arguments import Call, pick
from fla_train.kernels.delta_product.triton.chunk_bwd import bwd_state_step
from fla_train.kernels.delta_product.triton.common import (
    add_writes,
    corrected_values,
    load_keys,
    load_rows,
    load_scalars,
    program_tile,
    store_rows,
    times_inverse,
)
from fla_train.kernels.delta_product.triton.launch_table import MIN_TILE, Options
from fla_train.kernels.optional_triton import tl, triton
from fla_train.kernels.sizes import ceil_div

FORGOTTEN = tl.constexpr(-40.0)  # log2 of the decay below which a state's remainder is nothing in fp32
NO_DECAY = tl.constexpr(-1000.0)  # floor of one chunk's log2 decay, so that sums stay finite
# Chunks of a segment whose decays are looked at: its last, in the backward its first.
WINDOW = tl.constexpr(64)


@triton.jit(do_not_specialize=["T", "NT", "n_segments", "segment_chunks"])
def segment_split_kernel(
    cu_seqlens, chunk_offsets,  # of the sequences, or None
    bounds, first_chunk, segment_sequence,  # out [n_segments + 1], [n_segments], [n_segments], int32
    offsets,  # out [sequences + 1], int32
    T, NT, n_segments, segment_chunks,
    C: tl.constexpr, PACKED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Write per sequence its segments' first tokens and chunks. It has at least one segment, perhaps empty.

    Segments past the last sequence's (a packed row's number is an upper bound) are empty, at the end.
    """
    i_s, n_s = tl.program_id(0), tl.num_programs(0)
    tokens = segment_chunks * C
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
    tl.store(offsets + i_s, i_first)
    stop = i_next
    if i_s == n_s - 1:
        tl.store(offsets + n_s, i_next)
        stop = n_segments + 1
    for i_b in range(i_first, stop, BLOCK):
        i_p = i_b + o_b
        tl.store(bounds + i_p, tl.minimum(i_start + (i_p - i_first) * tokens, i_end), mask=i_p < stop)
        mask = (i_p < stop) & (i_p < n_segments)
        tl.store(first_chunk + i_p, i_chunk + (i_p - i_first) * segment_chunks, mask=mask)
        tl.store(segment_sequence + i_p, i_s + tl.zeros_like(i_p), mask=mask)


@triton.jit
def segment_span(i_p, bounds, first_chunk, segment_sequence, offsets):
    """Return sequence, its first and last segment, and the segment's first token, tokens and first chunk."""
    i_s = tl.load(segment_sequence + i_p)
    i_first, i_last = tl.load(offsets + i_s), tl.load(offsets + i_s + 1) - 1
    i_t = tl.load(bounds + i_p)
    length = tl.load(bounds + i_p + 1) - i_t
    return i_s, i_first, i_last, i_t.to(tl.int64), length, tl.load(first_chunk + i_p).to(tl.int64)


@triton.jit
def load_log_decays(decay, i_chunk, n_chunks, i_h, H: tl.constexpr):
    """Load log2 of the decays of `n_chunks` chunks [WINDOW], 0 past the last."""
    o_c = tl.arange(0, WINDOW)
    b_decay = tl.load(decay + (i_chunk + o_c) * H + i_h, mask=o_c < n_chunks, other=1.0)
    return tl.maximum(tl.log2(b_decay), NO_DECAY)


@triton.jit(do_not_specialize=["segment_chunks"])
def segment_fwd_kernel(
    k, v,  # [tokens * N, H / G, K], [tokens * N, H, V]
    wy, read, write, decay,  # from chunk_prepare_wy_kernel
    initial_state,  # [sequences, H, K, V] fp32
    local, transition,  # out [segments, H, V, K] and [segments, H, K, K] fp32
    bounds, first_chunk, segment_sequence, offsets, n_total, segment_chunks,
    H: tl.constexpr, G: tl.constexpr, K: tl.constexpr, V: tl.constexpr, N: tl.constexpr, C: tl.constexpr,
    M: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    FORGETS: tl.constexpr, OPERAND: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute L per segment, head and tile of V, and Phi per tile of K. A first L holds the initial state."""
    NV: tl.constexpr = (V + BV - 1) // BV
    i_y, i_h, i_p = program_tile(H, NV + (K + BV - 1) // BV, 1)
    i_s, i_first, i_last, i_t, _, i_chunk = segment_span(i_p, bounds, first_chunk, segment_sequence, offsets)
    transits = i_y >= NV
    if i_p >= i_last or (transits and i_p == i_first):
        return
    i_v = tl.where(transits, i_y - NV, i_y) * BV  # first column of the state, or of the identity

    o_k, o_v = tl.arange(0, BK), i_v + tl.arange(0, BV)
    b_s = tl.where(transits & (o_v[:, None] == o_k[None, :]), 1.0, 0.0)
    if initial_state is not None:
        first = i_p + tl.zeros_like(o_v) == i_first  # triton 3.9 does not interpret a scalar here
        mask = ((o_v < V) & first)[:, None] & (o_k < K)[None, :]
        p_s = (i_s.to(tl.int64) * H + i_h) * K * V + o_k[None, :] * V + o_v[:, None]
        b_s += tl.load(initial_state + p_s, mask=mask, other=0.0)
    i_begin = 0
    if FORGETS:
        i_window = tl.maximum(segment_chunks - WINDOW, 0)
        b_decay = load_log_decays(decay, i_chunk + i_window, segment_chunks - i_window, i_h, H)
        b_after = tl.sum(b_decay, 0) - tl.cumsum(b_decay, 0)  # over the chunks that follow
        n_forgotten = tl.sum(tl.where(b_after < FORGOTTEN, 1, 0), 0)
        if n_forgotten > 0:
            b_s = tl.zeros_like(b_s)
            i_begin = tl.where(transits, segment_chunks, i_window + n_forgotten)

    n_v = tl.where(transits, 0, N * C)
    for i_c in range(i_begin, segment_chunks):
        i_m = (i_t + i_c * C) * N
        b_k = load_keys(k, i_m, N * C, i_h, 0, H, G, K, M, BK).to(OPERAND)
        b_v = load_rows(v + (i_m * H + i_h) * V, n_v, i_v, V, H * V, M, BV).to(tl.float32)
        b_wy = load_rows(wy + (i_m * H + i_h) * M, N * C, 0, M, H * M, M, M)
        b_read = load_scalars(read, i_h, n_total * N, i_m, N * C, M)
        b_write = load_scalars(write, i_h, n_total * N, i_m, N * C, M)
        b_ks = tl.dot(b_s.to(OPERAND), tl.trans(b_k), input_precision=PRECISION)
        b_u, b_row = corrected_values(b_ks, b_v, b_wy, b_read, OPERAND, PRECISION)
        b_u *= b_row[:, None]
        b_s *= tl.load(decay + (i_chunk + i_c) * H + i_h)
        b_s = add_writes(b_s, b_u * b_write[None, :], b_k, OPERAND, PRECISION)
    p_h = i_p.to(tl.int64) * H + i_h
    if transits:
        store_rows(transition + (p_h * K + i_v) * K, b_s, K - i_v, 0, K, K, BV, BK)
    else:
        store_rows(local + (p_h * V + i_v) * K, b_s, V - i_v, 0, K, K, BV, BK)


@triton.jit
def segment_bwd_kernel(
    q, k, do,  # [tokens, H / G, K], [tokens * N, H / G, K], [tokens, H, V]
    wy, p, read, write, query, decay, peak,  # from chunk_prepare_wy_kernel
    dfinal_state,  # [sequences, H, K, V] fp32
    local,  # out [segments, H, V, K] fp32
    bounds, first_chunk, segment_sequence, offsets, n_total,
    H: tl.constexpr, G: tl.constexpr, K: tl.constexpr, V: tl.constexpr, N: tl.constexpr, C: tl.constexpr,
    M: tl.constexpr, BC: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, L2NORM: tl.constexpr,
    FORGETS: tl.constexpr, OPERAND: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute per segment, head and tile of V: dL. A last segment's has the final state's gradient in it."""
    i_v, i_h, i_p = program_tile(H, (V + BV - 1) // BV, BV)
    i_s, i_first, i_last, i_start, length, i_chunk = segment_span(
        i_p, bounds, first_chunk, segment_sequence, offsets
    )
    if i_p > i_last or i_p == i_first:
        return

    b_ds = tl.zeros((BV, BK), tl.float32)
    if dfinal_state is not None:
        o_k, o_v = tl.arange(0, BK), i_v + tl.arange(0, BV)
        last = i_p + tl.zeros_like(o_v) == i_last
        mask = ((o_v < V) & last)[:, None] & (o_k < K)[None, :]
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
        b_k = load_keys(k, i_m, n_m, i_h, 0, H, G, K, M, BK).to(OPERAND)
        b_q = load_keys(q, i_t, n_t, i_h, 0, H, G, K, BC, BK).to(OPERAND)
        b_states, _ = bwd_state_step(
            (b_ds,), (b_q,), (b_k,), do, wy, p, read, write, query, decay, peak,
            i_chunk, i_c, i_t, n_t, i_m, n_m, i_v, i_h, n_total,
            H, V, N, M, BC, BV, L2NORM, OPERAND, PRECISION,
        )  # fmt: skip
        b_ds = b_states[0]
    p_local = local + ((i_p.to(tl.int64) * H + i_h) * V + i_v) * K
    store_rows(p_local, b_ds, V - i_v, 0, K, K, BV, BK)


@triton.jit
def segment_combine_kernel(
    local, transition,  # [segments, H, V, K] fp32 and [segments, H, K, K], from the kernels above
    edge,  # [sequences, H, K, V] fp32: the initial state, or the gradient of the final one
    states,  # out [segments, H, K, V] fp32: the state at each segment's start, or the gradient at its end
    offsets,
    H: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    REVERSE: tl.constexpr, OPERAND: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute per sequence, head and tile of V, in order: S <- Phi S + L, backwards S <- Phi^T S + L.

    Nothing but the product waits for the segment before: Phi and L are copied meanwhile.
    """
    i_v, i_h, i_s = program_tile(H, (V + BV - 1) // BV, BV)
    i_first, i_end = tl.load(offsets + i_s), tl.load(offsets + i_s + 1)
    n_segments = i_end - i_first

    o_k, o_v = tl.arange(0, BK), i_v + tl.arange(0, BV)
    m_s = (o_v < V)[:, None] & (o_k < K)[None, :]
    p_s = o_k[None, :] * V + o_v[:, None]
    b_s = tl.zeros((BV, BK), tl.float32)  # S^T
    if edge is not None:
        b_s += tl.load(edge + (i_s.to(tl.int64) * H + i_h) * K * V + p_s, mask=m_s, other=0.0)
    i_p = ((i_end - 1 if REVERSE else i_first).to(tl.int64)) * H + i_h  # segment and head
    tl.store(states + i_p * K * V + p_s, b_s, mask=m_s)
    if n_segments > 1:  # the segment at the edge has the state before it in its L
        b_s = load_rows(local + (i_p * V + i_v) * K, V - i_v, 0, K, K, BV, BK)
        i_p += -H if REVERSE else H
        tl.store(states + i_p * K * V + p_s, b_s, mask=m_s)
    for _ in range(2, n_segments):
        b_phi = load_rows(transition + i_p * K * K, K, 0, K, K, BK, BK)  # Phi^T
        b_local = load_rows(local + (i_p * V + i_v) * K, V - i_v, 0, K, K, BV, BK)
        b_s = times_inverse(b_s, tl.trans(b_phi) if REVERSE else b_phi, OPERAND, PRECISION) + b_local
        i_p += -H if REVERSE else H
        tl.store(states + i_p * K * V + p_s, b_s, mask=m_s)


class Segments:
    """The segments of one call: where they lie, their first states, and their last states' gradients (fp32).

    Args:
        selection: of a call whose sequences are split.
        call: what its kernels share.
    """

    def __init__(self, selection: Selection, call: Call, device: torch.device) -> None:
        self.count, self.chunks, self.call = selection.num_segments, selection.segment_chunks, call
        # Rows of a multiple of 16 bytes: a pointer's alignment decides which variant of a kernel is compiled.
        # The longest also has the end of the last segment; there are never fewer segments than sequences.
        table = torch.empty(4, ceil_div(self.count + 1, 4) * 4, dtype=torch.int32, device=device)
        bounds, first_chunk, segment_sequence, self.offsets = table.unbind()
        self.places = dict(
            bounds=bounds, first_chunk=first_chunk, segment_sequence=segment_sequence, offsets=self.offsets
        )
        run_kernel(
            segment_split_kernel, (call.num_sequences,), **self.places,
            **pick(call.sequences, "cu_seqlens", "chunk_offsets", "T", "NT", "PACKED"),
            n_segments=self.count, segment_chunks=self.chunks, C=call.sizes["C"], BLOCK=128,
        )  # fmt: skip
        # Bounds for a kernel that treats the segments as documents of a packed row.
        self.sequences = call.sequences | dict(cu_seqlens=bounds, chunk_offsets=first_chunk, PACKED=True)
        # Whether the gates bound every transition: there are some, and keys have norm one.
        self.forgets = call.rows["g_cum"] is not None and call.tiles["L2NORM"]

    def start_states(
        self, k: Tensor, v: Tensor, initial_state: Tensor | None, transitions: Tensor, options: Options
    ) -> Tensor:
        """Return segments' first states [segments, H, K, V]; fill `transitions` [segments, H, K, K]."""
        call, (_, heads, key_dim, _), value_dim = self.call, transitions.shape, v.shape[-1]
        local = v.new_empty(self.count, heads, value_dim, key_dim, dtype=torch.float32)
        tiles = ceil_div(value_dim, options["BV"]) + ceil_div(key_dim, options["BV"])
        run_kernel(
            segment_fwd_kernel, (self.count * heads * tiles,),
            k=k, v=v, **pick(call.factors, "wy", "read", "write", "decay"), initial_state=initial_state,
            local=local, transition=transitions, **self.places, **pick(call.sequences, "n_total"),
            segment_chunks=self.chunks, **call.sizes, V=value_dim, FORGETS=self.forgets,
            **pick(call.tiles, "M", "BK", "OPERAND", "PRECISION"), **options,
        )  # fmt: skip
        return self._combine(local, transitions, initial_state, reverse=False)

    def end_gradients(
        self,
        q: Tensor,
        k: Tensor,
        do: Tensor,
        dfinal_state: Tensor | None,
        transitions: Tensor,
        options: Options,
    ) -> Tensor:
        """Return the gradient of the state at each segment's end [segments, H, K, V]."""
        call, (_, heads, key_dim, _), value_dim = self.call, transitions.shape, do.shape[-1]
        local = do.new_empty(self.count, heads, value_dim, key_dim, dtype=torch.float32)
        run_kernel(
            segment_bwd_kernel, (self.count * heads * ceil_div(value_dim, options["BV"]),),
            q=q, k=k, do=do, **call.factors, dfinal_state=dfinal_state, local=local, **self.places,
            **pick(call.sequences, "n_total"), **call.sizes, V=value_dim, FORGETS=self.forgets,
            **call.tiles, **options,
        )  # fmt: skip
        return self._combine(local, transitions, dfinal_state, reverse=True)

    def select_first(self, states: Tensor, out: Tensor) -> None:
        """Select from `states` [segments, ...] those of each sequence's first segment."""
        self._select(states, self.offsets[: self.call.num_sequences], out)

    def select_last(self, states: Tensor, out: Tensor) -> None:
        """Select from `states` [segments, ...] those of each sequence's last segment."""
        self._select(states, self.offsets[1 : self.call.num_sequences + 1] - 1, out)

    def _select(self, states: Tensor, segments: Tensor, out: Tensor) -> None:
        # A kernel has written the segments. Where it is only compiled (`precompile`) they may be any numbers.
        torch.index_select(states, 0, segments.clamp(0, self.count - 1), out=out)

    def _combine(self, local: Tensor, transitions: Tensor, edge: Tensor | None, reverse: bool) -> Tensor:
        _, heads, value_dim, key_dim = local.shape
        states = local.new_empty(self.count, heads, key_dim, value_dim)
        # For K = 256, and in float32, one Phi fills the shared memory; else the next one is on its way.
        large = key_dim > 2 * MIN_TILE or transitions.dtype == torch.float32
        run_kernel(
            segment_combine_kernel, (self.call.num_sequences * heads * ceil_div(value_dim, MIN_TILE),),
            local=local, transition=transitions, edge=edge, states=states, offsets=self.offsets,
            H=heads, K=key_dim, V=value_dim, BV=MIN_TILE, REVERSE=reverse,
            **pick(self.call.tiles, "BK", "OPERAND", "PRECISION"),
            num_warps=8 if large else 4, num_stages=1 if large else 2,
        )  # fmt: skip
        return states
