"""Helpers of the Triton chunk kernels: where a chunk lies, loads and stores of tiles, row factors, gates.

A chunk holds C = M // N tokens, that is at most M = 64 Householder steps: step r of a chunk belongs to its
token r // N, and k, v, beta are addressed by step as [B * T * N, H, ...]. Rows past the end of a sequence, or
past C * N where N does not divide M, load as zeros, which makes them neutral, and are never stored.

Scalars per row are kept with the heads leading, [H, n_total] and [H, n_total * N] in fp32, so that a chunk's
are contiguous; n_total is B * T or a little more. Gates are in units of log2 and cumulative inside the chunk:
g_cum_i = sum_{j <= i} log2 a_j.
"""

from fla_train.kernels.optional_triton import tl, triton

TINY = tl.constexpr(1e-30)  # rows and tiles are divided by factors beyond it, to fit in fp16
KEY_TILE = tl.constexpr(128)  # key channels of a tile of the state: tiles of 256 spill more registers


@triton.jit
def chunk_span(i_c, cu_seqlens, chunk_offsets, chunk_sequence, T, NT, C: tl.constexpr, PACKED: tl.constexpr):
    """Return first token and number of tokens of chunk `i_c`; none (<= 0) for a packed row's spare chunks."""
    if PACKED:
        i_s = tl.load(chunk_sequence + i_c)
        i_first = tl.load(chunk_offsets + i_s)
        i_start = tl.load(cu_seqlens + i_s).to(tl.int64) + (i_c - i_first).to(tl.int64) * C
        i_end = tl.load(cu_seqlens + i_s + 1).to(tl.int64)
    else:
        i_s = i_c // NT
        i_start = i_s.to(tl.int64) * T + (i_c - i_s * NT) * C
        i_end = (i_s + 1).to(tl.int64) * T
    return i_start, tl.minimum(i_end - i_start, C).to(tl.int32)


@triton.jit
def sequence_tokens(i_s, cu_seqlens, T):
    """Return first token and length of a sequence."""
    if cu_seqlens is not None:
        i_start = tl.load(cu_seqlens + i_s).to(tl.int64)
        length = (tl.load(cu_seqlens + i_s + 1).to(tl.int64) - i_start).to(tl.int32)
    else:
        i_start, length = i_s.to(tl.int64) * T, T
    return i_start, length


@triton.jit
def sequence_span(i_s, cu_seqlens, chunk_offsets, T, NT, PACKED: tl.constexpr):
    """Return first token, number of tokens and first chunk of sequence `i_s`."""
    i_start, length = sequence_tokens(i_s, cu_seqlens, T)
    if PACKED:
        i_chunk = tl.load(chunk_offsets + i_s).to(tl.int64)
    else:
        i_chunk = i_s.to(tl.int64) * NT
    return i_start, length, i_chunk


@triton.jit
def program_tile(H: tl.constexpr, TILES: tl.constexpr, WIDTH: tl.constexpr):
    """Return first column of the tile, head, and sequence or segment of a program of the serial kernels.

    Tiles are adjacent in the grid: those of V share q, k, T and P through the L2 cache.
    """
    i_v = (tl.program_id(0) % TILES) * WIDTH
    return i_v, (tl.program_id(0) // TILES) % H, tl.program_id(0) // (TILES * H)


@triton.jit
def state_tile(
    i_s, i_h, i_v, i_k,
    H: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
):  # fmt: skip
    """Return where S^T [BV, BK] lies in states [sequences, H, K, V] from (`i_v`, `i_k`) on; its mask."""
    o_k, o_v = tl.arange(0, BK) + i_k, tl.arange(0, BV) + i_v
    m_s = (o_v < V)[:, None] & (o_k < K)[None, :]
    return (i_s.to(tl.int64) * H + i_h) * K * V + o_k[None, :] * V + o_v[:, None], m_s


@triton.jit
def load_state_tile(
    p, i_s, i_h, i_v, i_k,
    H: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
):  # fmt: skip
    """Load S^T [BV, BK] in fp32, zeros without states."""
    b_s = tl.zeros((BV, BK), tl.float32)
    if p is not None:
        p_s, m_s = state_tile(i_s, i_h, i_v, i_k, H, K, V, BK, BV)
        b_s += tl.load(p + p_s, mask=m_s, other=0.0)
    return b_s


@triton.jit
def load_state(
    p, i_s, i_h, i_v, H: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr
):
    """Load a state's tiles of at most KEY_TILE key channels, a tuple of one or two; zeros if `p` is None."""
    WIDTH: tl.constexpr = min(BK, KEY_TILE)
    b_s = ()
    for i in tl.static_range(BK // WIDTH):
        b_s += (load_state_tile(p, i_s, i_h, i_v, i * WIDTH, H, K, V, WIDTH, BV),)
    return b_s


@triton.jit
def store_state(p, b_s, i_s, i_h, i_v, H: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BV: tl.constexpr):
    """Store what `load_state` loads; nothing where `p` is None."""
    if p is not None:
        for i in tl.static_range(len(b_s)):
            p_s, m_s = state_tile(i_s, i_h, i_v, i * KEY_TILE, H, K, V, b_s[i].shape[1], BV)
            tl.store(p + p_s, b_s[i], mask=m_s)


@triton.jit
def opaque_zero(count):
    """Return 0.0, made of any count below 2^30 so that the compiler does not know it.

    For the zeros of masked tiles that go to shared memory in 16 bits: ptxas 13.3 to 13.5 store registers of a
    literal zero there before it sets them (docs/dev/kernels.md, "Compilers").
    """
    return (count >> 30).to(tl.float32)


@triton.jit
def load_rows(p, n_rows, i_col, COLS: tl.constexpr, STRIDE: tl.constexpr, R: tl.constexpr, BC: tl.constexpr):
    """Load a tile [R, BC] from column `i_col` of a matrix of COLS columns and row stride STRIDE, else 0."""
    o_r = tl.arange(0, R)
    o_c = tl.arange(0, BC) + i_col
    mask = (o_r < n_rows)[:, None] & (o_c < COLS)[None, :]
    return tl.load(p + o_r[:, None] * STRIDE + o_c[None, :], mask=mask, other=0.0)


@triton.jit
def load_keys(
    p, i_row, n_rows, i_h, i_k, H: tl.constexpr, G: tl.constexpr, K: tl.constexpr,
    R: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """Load tile [R, BK] of q or k [rows, H / G, K] from row `i_row`, channel `i_k`, for value head `i_h`."""
    p += (i_row * (H // G) + i_h // G) * K
    return load_rows(p, n_rows, i_k, K, H // G * K, R, BK)


@triton.jit
def store_rows(
    p, b_x, n_rows, i_col, COLS: tl.constexpr, STRIDE: tl.constexpr, R: tl.constexpr, BC: tl.constexpr
):
    """Store what `load_rows` loads."""
    o_r = tl.arange(0, R)
    o_c = tl.arange(0, BC) + i_col
    mask = (o_r < n_rows)[:, None] & (o_c < COLS)[None, :]
    tl.store(p + o_r[:, None] * STRIDE + o_c[None, :], b_x.to(p.dtype.element_ty), mask=mask)


@triton.jit
def load_scalars(p, i_h, n_total, i_row, n_rows, R: tl.constexpr):
    """Load [R] fp32 scalars of head `i_h` from a [H, n_total] table, zeros past `n_rows`."""
    o_r = tl.arange(0, R)
    return tl.load(p + i_h.to(tl.int64) * n_total + i_row + o_r, mask=o_r < n_rows, other=0.0)


@triton.jit
def factored_times_inverse(b_r, b_wy, OPERAND: tl.constexpr, PRECISION: tl.constexpr):
    """Return R T as Y [R, M] and a factor of each row [R]; R [R, M] in fp32, T [M, M] as it was stored: T, or
    T^T, of `chunk_prepare_wy`, or a segment's Phi.

    Normalised keys leave T in fp16, whose three more bits are what keeps reflections from shrinking, and so
    do fp16 inputs. R then goes with it, each row divided by its largest element to fit fp16's range. For
    normalised keys Y also fits: as |A diag(beta)| <= 2, the largest element of a row that is not zero lies
    between 1 / 127 and 128.
    """
    if b_wy.dtype == tl.float16 and OPERAND != tl.float32:
        b_row = tl.max(tl.abs(b_r), 1)
        b_row = tl.where(b_row > TINY, b_row, 1.0)
        return tl.dot((b_r * (1.0 / b_row)[:, None]).to(tl.float16), b_wy), b_row
    b_row = tl.full((b_r.shape[0],), 1.0, tl.float32)
    return tl.dot(b_r.to(OPERAND), b_wy.to(OPERAND), input_precision=PRECISION), b_row


@triton.jit
def times_inverse(b_r, b_wy, OPERAND: tl.constexpr, PRECISION: tl.constexpr):
    """Return R T of R [R, M] in fp32 and T, as in `factored_times_inverse`."""
    b_y, b_row = factored_times_inverse(b_r, b_wy, OPERAND, PRECISION)
    return b_y * b_row[:, None]


@triton.jit
def corrected_values(b_ks, b_v, b_wy, b_read, OPERAND: tl.constexpr, PRECISION: tl.constexpr):
    """Return u^T [BV, M] without its row factors, and these: u = T (V - exp(g_cum) .* (K S)), of (K S)^T."""
    b_r = tl.trans(b_v) - b_ks * b_read[None, :]
    return factored_times_inverse(b_r, tl.trans(b_wy), OPERAND, PRECISION)


@triton.jit
def add_writes(b_s, b_written, b_k, OPERAND: tl.constexpr, PRECISION: tl.constexpr):
    """Return S^T + W^T K, in fp32, of S^T [BV, BK], W^T [BV, M] in fp32 and K [M, BK] in the operands' type.

    The rounding error of W is added as a second term: of correlated keys the sum is small and its terms are
    large, so that one term's rounding would be most of the state's error. In fp16 W must stay below 65504, as
    one term must, and the second helps from 1e-5 on.
    """
    b_s = tl.dot(b_written.to(OPERAND), b_k, b_s, input_precision=PRECISION)
    if OPERAND == tl.float32:
        return b_s
    return tl.dot((b_written - b_written.to(OPERAND).to(tl.float32)).to(OPERAND), b_k, b_s)
