"""`chunk_bwd_fused_kernel`: the whole backward pass for Hopper as one kernel in Gluon.

It computes what `chunk_bwd_state_kernel` and `chunk_bwd_qkg_kernel` compute, by the same formulas. A program
of eight warps fills an SM and goes through one head of one sequence from its last chunk to the first. The
state's gradient stays in registers and is never written, and each tile is read once. Meanwhile the copy
engine (TMA) fills shared memory for the next chunk: k has two buffers, the tiles of the values and of the
state are refilled as soon as the products that read them are done, that of q at the end.

du, dV and dS are a chain of products, each waiting for the one before, and the next chunk's first one begins
before this chunk ends. Everything that needs none of them is computed while they run: <S, dS'> and the scores
of q. All threads meet six to nine times a chunk: exchanged values, mostly sums of rows, wait in shared memory
for one of these barriers.

For 16-bit inputs. K and a tile of V have 64 or 128 columns in shared memory; a narrower head leaves zeros
there, of which sums skip a last quarter (`common.products`). Wider values are split: each program takes one
of TILES tiles of V, as if it were a separate head, and writes its share of dq, dk, dbeta and dg, which are
sums over the columns of V (`triton/shared_heads.py`). Where two programs share a dq and a dk, both add their
shares to zeros. Or V is taken as 128 columns and the rest, by two launches: the first stores the shared
gradients, the second adds to them.
"""

from collections.abc import Iterator
from typing import Any

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from fla_train.kernels.cached_launch import run_kernel
from fla_train.kernels.delta_product.hopper.common import (
    BETA,
    FLAT,
    GM,
    GT,
    LEAST,
    LEAST_GATE,
    LINES,
    PAIR,
    QUERY,
    RAW,
    READ,
    RK,
    ROWS,
    RQ,
    SLICED,
    TILE,
    WRITE,
    accumulator,
    add,
    barrier,
    copy_state,
    copy_tile,
    fetch_scalars,
    keep_scalars,
    make_bar,
    make_lines,
    opaque_zero,
    products,
    rebuild,
    reinterpret,
    sequence_span,
    store,
    store_tile,
    with_tma_descriptors,
)
from fla_train.kernels.delta_product.triton.chunk_arguments import pick
from fla_train.kernels.delta_product.triton.launch_table import HOPPER_TILE, value_tiles

WARPS = 8
PARTS = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))  # layout of several times 64 scalars


@gluon.jit
def copy_rows(matrix, tile, bar, i_row, i_head, pred, BYTES: gl.constexpr):
    """Copy a tile of k or q, with which `bar` completes."""
    mbarrier.expect(bar, BYTES, pred=pred)
    copy_tile(matrix, tile, bar, i_row, i_head, pred)


@gluon.jit
def expect_values(bar_do, bar_u, bar_s, pred, BK: gl.constexpr, BV: gl.constexpr):
    """Announce the bytes of `copy_values` to its barriers.

    Call it before a barrier of all threads: the compiler puts one between this and the copies in any case.
    """
    mbarrier.expect(bar_do, 2 * ROWS * BV, pred=pred)
    mbarrier.expect(bar_u, 2 * ROWS * BV, pred=pred)
    mbarrier.expect(bar_s, 2 * BV * BK, pred=pred)


@gluon.jit
def copy_values(do, u, states, s_do, s_u, s_s, bar_do, bar_u, bar_s, i_m, i_t, i_s, i_head, pred):
    """Copy dO, u and the state of a chunk and head, or tile of V; a barrier completes with each."""
    copy_tile(do, s_do, bar_do, i_t, i_head, pred)
    copy_tile(u, s_u, bar_u, i_m, i_head, pred)
    copy_state(states, s_s, bar_s, i_s, pred)


@gluon.jit
def expect_wy(bar_wy, bar_p, pred):
    """Announce the bytes of `copy_wy` to its barriers."""
    mbarrier.expect(bar_wy, 2 * ROWS * ROWS, pred=pred)
    mbarrier.expect(bar_p, 2 * ROWS * ROWS, pred=pred)


@gluon.jit
def copy_wy(wy, p, s_wy, s_p, bar_wy, bar_p, i_m, i_t, i_head, pred):
    """Copy T and P diag(beta) of a chunk and head; a barrier completes with each."""
    copy_tile(p, s_p, bar_p, i_t, i_head, pred)
    copy_tile(wy, s_wy, bar_wy, i_m, i_head, pred)


@gluon.jit
def make_operand(s_kept, s_p, n_rows, peak, DTYPE: gl.constexpr, LAYOUT: gl.constexpr):
    """Return P diag(beta) from the kept tensor, which may be at the same place; zeros past the chunk."""
    o_r = gl.arange(0, ROWS, gl.SliceLayout(1, LAYOUT))
    b_p = s_kept.load(LAYOUT).to(gl.float32) * peak
    s_p.store(gl.where((o_r < n_rows)[:, None], b_p, 0.0).to(DTYPE))
    fence_async_shared()
    barrier()


@gluon.jit
def suffix_sums(x):
    """Return suffix sums: each number plus all after it."""
    return gl.sum(x, 0) - gl.associative_scan(x, 0, add) + x


@gluon.jit
def widened(x):
    """Convert to fp32; from bf16 with one instruction per number, where the compiler emits two."""
    if x.dtype == gl.bfloat16:
        halves: gl.constexpr = "shl.b32 $0, $2, 16;\nand.b32 $1, $2, 0xffff0000;"
        return gl.inline_asm_elementwise(halves, "=r,=r,r", [x], gl.float32, is_pure=True, pack=2)
    else:
        return x.to(gl.float32)


@gluon.jit
def make_sums(parts: gl.constexpr):
    """Allocate shared memory for 64 sums, each in several parts."""
    return gl.allocate_shared_memory(gl.float32, [1, parts * ROWS], FLAT)


@gluon.jit
def in_parts(x):
    """Return [rows, parts, columns / parts] of x [64 or 128, columns], so that a warp has whole parts."""
    parts: gl.constexpr = 2 * ROWS // x.shape[0]
    return gl.reshape(x, [x.shape[0], parts, x.shape[1] // parts])


@gluon.jit
def row_sums(x):
    """Return sums [rows, parts] of the rows of a product of eight warps: of 64 rows two parts, else one.

    Sums across warps go through shared memory, by `keep_row_sums` and `load_sums`, with a barrier in between
    that other code needs as well.
    """
    return gl.sum(in_parts(x), 2)


@gluon.jit
def keep_row_sums(sums, parts, zero):
    """Write the result of `row_sums`; `zero` is that of `rebuild`, since stores also keep addresses."""
    columns = reinterpret(sums.index(zero), gl.float32, [parts.shape[1], parts.shape[0]], PARTS)
    columns.permute((1, 0)).store(parts)


@gluon.jit
def keep_column_sums(sums, x, zero):
    """Write sums of the columns of x [64, 64], of each warp's 16 rows."""
    reinterpret(sums.index(zero), gl.float32, [4, ROWS], PARTS).store(gl.sum(gl.reshape(x, [4, 16, ROWS]), 1))


@gluon.jit
def load_sums(sums, layout: gl.constexpr):
    """Load [64] sums of all parts."""
    LENGTH: gl.constexpr = sums.shape[1]
    parts = sums.index(0)
    total = parts.slice(0, ROWS).load(layout)
    for i in gl.static_range(ROWS, LENGTH, ROWS):
        total += parts.slice(i, ROWS).load(layout)
    return total


@gluon.jit(do_not_specialize=["T", "NT"])
def chunk_bwd_fused_kernel(
    q, k, do, u, states, wy, p,  # descriptors of [rows, columns]
    peak, beta, g, g_cum, q_rnorm, k_rnorm,
    dv, dq, dk, dbeta, dg, dfinal_state, dinitial_state,
    cu_seqlens, chunk_offsets, scale, n_total, T, NT,
    H: gl.constexpr, G: gl.constexpr, K: gl.constexpr, V: gl.constexpr, TILES: gl.constexpr,
    N: gl.constexpr, C: gl.constexpr, GATED: gl.constexpr, L2NORM: gl.constexpr, PACKED: gl.constexpr,
    WIDTH: gl.constexpr, ADD_KEYS: gl.constexpr, ADD_SCALARS: gl.constexpr, num_warps: gl.constexpr,
):  # fmt: skip
    """Take the arguments of the two Triton kernels, and those of `parts`.

    Tiles of q, dO and P diag(beta) also have 64 rows: those past the chunk belong to later
    tokens and count as zero.
    """
    DTYPE: gl.constexpr = k.dtype
    BK: gl.constexpr = 64 if K <= 64 else 128
    BV: gl.constexpr = 64 if WIDTH <= 64 else 128
    P: gl.constexpr = H * TILES  # programs of a sequence
    TOGETHER: gl.constexpr = PAIR if G * TILES == PAIR else 1  # programs of one dq and dk
    # Products that a sum over K, and over a tile of V, is made of, issued by `products`.
    OF_K: gl.constexpr = 2 if K > ROWS and K <= SLICED else 1
    OF_V: gl.constexpr = 2 if WIDTH > ROWS and WIDTH <= SLICED else 1
    INVERSE: gl.constexpr = wy.dtype
    SQUARE: gl.constexpr = accumulator(ROWS, num_warps)
    WIDE: gl.constexpr = accumulator(BK, num_warps)
    # Layout of [V, ...]: each warp has 16 rows where there are enough.
    DOWN: gl.constexpr = BV // 16
    TALL: gl.constexpr = accumulator(ROWS, num_warps, DOWN)
    STATE: gl.constexpr = accumulator(BK, num_warps, DOWN)
    ROW: gl.constexpr = gl.SliceLayout(1, SQUARE)
    COLUMN: gl.constexpr = gl.SliceLayout(0, SQUARE)
    WROW: gl.constexpr = gl.SliceLayout(1, WIDE)
    DIM: gl.constexpr = gl.SliceLayout(1, TALL)
    STEP: gl.constexpr = gl.SliceLayout(0, TALL)
    LINE: gl.constexpr = gl.BlockedLayout([2], [32], [num_warps], [0])  # 64 scalars in each warp
    STORE_K: gl.constexpr = gl.BlockedLayout([1, 8], [256 // BK, BK // 8], [num_warps, 1], [1, 0])
    STORE_V: gl.constexpr = gl.BlockedLayout([1, 8], [256 // BV, BV // 8], [num_warps, 1], [1, 0])
    MASK: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [num_warps, 1], [1, 0])
    TOKENS: gl.constexpr = (C + 15) // 16 * 16  # rows of q and dO that a sum over tokens takes
    TILE_BYTES: gl.constexpr = 2 * ROWS * BK

    i_seq, i_p = gl.program_id(0) // P, gl.program_id(0) % P  # heads side by side: their rows are adjacent
    i_h = i_p // TILES
    i_start, length, i_chunk = sequence_span(i_seq, cu_seqlens, chunk_offsets, T, NT, PACKED)
    n_chunks = (length + C - 1) // C
    o_v, o_k = gl.arange(0, BV, gl.SliceLayout(1, STATE)), gl.arange(0, BK, gl.SliceLayout(0, STATE))
    p_s = (i_seq.to(gl.int64) * H + i_h) * K * V + o_k[None, :] * V + (i_p % TILES) * WIDTH + o_v[:, None]
    m_tile = (o_v < WIDTH)[:, None] & (o_k < K)[None, :]
    b_ds = gl.zeros([BV, BK], gl.float32, STATE) + opaque_zero(T)  # dS^T
    if dfinal_state is not None:
        b_ds = gl.load(dfinal_state + p_s, mask=m_tile, other=0.0)
    if n_chunks == 0:
        if dinitial_state is not None:
            gl.store(dinitial_state + p_s, b_ds, mask=m_tile)
        return

    m_u = gl.allocate_shared_memory(DTYPE, [1, ROWS, BV], TILE)
    m_do = gl.allocate_shared_memory(DTYPE, [1, ROWS, BV], TILE)
    m_s = gl.allocate_shared_memory(DTYPE, [1, BV, BK], TILE)
    m_ds = gl.allocate_shared_memory(DTYPE, [1, BV, BK], TILE)
    m_k = gl.allocate_shared_memory(DTYPE, [2, ROWS, BK], TILE)
    m_q = gl.allocate_shared_memory(DTYPE, [1, ROWS, BK], TILE)
    m_wy = gl.allocate_shared_memory(INVERSE, [1, ROWS, ROWS], wy.layout)
    m_kept = gl.allocate_shared_memory(p.dtype, [1, ROWS, ROWS], p.layout)  # P diag(beta) as stored
    m_p = m_kept if p.dtype == DTYPE else reinterpret(m_kept, DTYPE, [1, ROWS, ROWS], TILE)
    m_w = gl.allocate_shared_memory(INVERSE, [1, BV, ROWS], TILE)
    m_dv = gl.allocate_shared_memory(DTYPE, [1, ROWS, BV], TILE)
    m_dp = gl.allocate_shared_memory(DTYPE, [1, ROWS, ROWS], TILE)
    m_out = gl.allocate_shared_memory(DTYPE, [1, ROWS, BK], TILE)
    m_r = m_w if INVERSE == DTYPE else reinterpret(m_w, DTYPE, [1, BV, ROWS], TILE)
    m_da = reinterpret(m_out, DTYPE, [BK // ROWS, ROWS, ROWS], TILE)
    if BK == BV:
        m_dk = m_dv
    elif BK < BV:
        m_dk = reinterpret(m_dv, DTYPE, [BV // BK, ROWS, BK], TILE)
    else:
        m_dk = gl.allocate_shared_memory(DTYPE, [1, ROWS, BK], TILE)
    table = make_lines(LINES)
    state_sums, maxima = make_sums(2), make_sums(2)
    written, inner, keys, queries = make_sums(2), make_sums(2), make_sums(2), make_sums(2)
    # Rounding error of the scores: by row, by column of k, by column of q.
    lost, lost_k, lost_q = make_sums(2), make_sums(4), make_sums(4)
    bar_do, bar_u, bar_s = make_bar(), make_bar(), make_bar()
    bar_wy, bar_p, bar_q = make_bar(), make_bar(), make_bar()
    bars_k = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(2):
        mbarrier.init(bars_k.index(i), count=1)

    i_c = n_chunks - 1
    i_t, n_t = i_start + i_c * C, length - i_c * C
    rows = beta, g, g_cum, q_rnorm, k_rnorm
    scalars = fetch_scalars(rows, i_t.to(gl.int64), n_t, i_h, n_total, H, N, GATED, L2NORM, num_warps)
    keep_scalars(table, scalars, scale, GATED)
    g_last, b_peak = scalars[5], gl.load(peak + (i_chunk + i_c) * H + i_h)
    m_ds.index(0).store(b_ds.to(DTYPE))
    fence_async_shared()
    barrier()
    copy_rows(k, m_k.index(0), bars_k.index(0), i_t * N, i_h // G, True, TILE_BYTES)
    expect_wy(bar_wy, bar_p, True)
    copy_wy(wy, p, m_wy.index(0), m_kept.index(0), bar_wy, bar_p, i_t * N, i_t, i_h, True)
    expect_values(bar_do, bar_u, bar_s, True, BK, BV)
    copy_values(
        *(do, u, states, m_do.index(0), m_u.index(0), m_s.index(0), bar_do, bar_u, bar_s),
        *(i_t * N, i_t, (i_chunk + i_c) * P + i_p, i_p, True),
    )
    copy_rows(q, m_q.index(0), bar_q, i_t, i_h // G, True, TILE_BYTES)
    mbarrier.wait(bars_k.index(0), 0)
    tall = gl.zeros([BV, ROWS], gl.float32, TALL)
    b_du = products(m_ds.index(0), m_k.index(0).permute((1, 0)), tall, K)  # dS'^T K^T
    b_du = warpgroup_mma_wait(0, deps=[b_du])
    for step in range(0, n_chunks):
        zero, i_p = rebuild(step, 0, P)
        buffer = step & 1
        s_ds, s_p, s_do = m_ds.index(zero), m_p.index(zero), m_do.index(zero)
        s_u, s_s, s_w = m_u.index(zero), m_s.index(zero), m_w.index(zero)
        p_t, n_m = i_t.to(gl.int64), n_t * N
        p_m = p_t * N
        i_c = n_chunks - 2 - step  # the chunk before this one, which follows
        pred = i_c >= 0
        f_t, f_n = i_start + gl.maximum(i_c, 0) * C, gl.minimum(length, C)
        o_r, o_c = gl.arange(0, ROWS, ROW), gl.arange(0, ROWS, COLUMN)
        square, wide = gl.zeros([ROWS, ROWS], gl.float32, SQUARE), gl.zeros([ROWS, BK], gl.float32, WIDE)
        tall = gl.zeros([BV, ROWS], gl.float32, TALL)

        # du^T = (dS'^T K^T) .* write + dO^T P diag(beta); in parallel with the reads of u, dO and S
        mbarrier.wait(bar_p, step & 1)
        if L2NORM:
            make_operand(m_kept.index(zero), s_p, n_t, b_peak, DTYPE, MASK)
        elif n_t < TOKENS:
            make_operand(s_p, s_p, n_t, 1.0, DTYPE, MASK)
        b_du *= (table[WRITE].load(STEP) * table[BETA].load(STEP))[None, :]
        mbarrier.wait(bar_do, step & 1)
        b_du = warpgroup_mma(s_do.slice(0, TOKENS).permute((1, 0)), s_p.slice(0, TOKENS), b_du, is_async=True)
        mbarrier.wait(bar_u, step & 1)
        b_dp = products(s_u, s_do.permute((1, 0)), square, WIDTH)  # u dO^T
        b_dk = products(s_u, s_ds, wide, WIDTH)
        mbarrier.wait(bar_s, step & 1)
        b_dq = products(s_do, s_s, wide, WIDTH)
        if GATED:
            keep_row_sums(state_sums, row_sums(widened(s_s.load(STATE)) * widened(s_ds.load(STATE))), zero)
        b_du = warpgroup_mma_wait(3 * OF_V, deps=[b_du])
        if INVERSE == gl.float16:
            if BV == ROWS:
                keep_row_sums(maxima, gl.max(in_parts(gl.abs(b_du)), 2), zero)
                barrier()
                halves = maxima.index(0)
                b_max = gl.maximum(halves.slice(0, ROWS).load(DIM), halves.slice(ROWS, ROWS).load(DIM))
            else:
                b_max = gl.max(gl.abs(b_du), 1)
            b_max = gl.where(b_max > LEAST, b_max, 1.0)
            b_du *= (1.0 / b_max)[:, None]
        s_w.store(b_du.to(INVERSE))
        fence_async_shared()
        barrier()

        # dV^T = du^T T, in parallel with the scores of q
        zero, i_p = rebuild(step, 1, P)
        s_w, s_wy, s_do, s_dp = m_w.index(zero), m_wy.index(zero), m_do.index(zero), m_dp.index(zero)
        s_k, s_q = m_k.index(buffer + zero), m_q.index(zero)
        mbarrier.wait(bar_wy, step & 1)
        b_dv = warpgroup_mma(s_w, s_wy, tall, is_async=True)
        mbarrier.wait(bar_q, step & 1)
        b_kq = products(s_k, s_q.permute((1, 0)), square, K)
        b_dp = warpgroup_mma_wait(2 * OF_V + 1 + OF_K, deps=[b_dp])
        beta_r, rk_r = table[BETA].load(ROW), table[RK].load(ROW)
        b_dp *= rk_r[:, None] * (table[RQ].load(COLUMN) * scale)[None, :]
        if GATED:
            b_dp *= gl.exp2(table[GT].load(COLUMN)[None, :] - table[GM].load(ROW)[:, None])
        b_dp = gl.where((o_r // N)[:, None] <= o_c[None, :], b_dp, 0.0)
        r_dp = (b_dp * beta_r[:, None]).to(DTYPE)
        s_dp.store(r_dp)
        query_s = table[QUERY].load(gl.SliceLayout(1, STORE_V))
        b_do = (widened(s_do.load(STORE_V)) * query_s[:, None]).to(DTYPE)
        if GATED:
            b_ds *= gl.exp2(g_last)
        mbarrier.expect(bars_k.index(1 - buffer), TILE_BYTES, pred=pred)
        b_dk, b_dq, b_dv = warpgroup_mma_wait(OF_K, deps=[b_dk, b_dq, b_dv])
        barrier()  # du, dO, dS', T and P are read

        # dV, and what reads and writes the state with its factors
        zero, i_p = rebuild(step, 2, P)
        i_h = i_p // TILES
        s_dv, s_r, s_do, s_u = m_dv.index(zero), m_r.index(zero), m_do.index(zero), m_u.index(zero)
        s_k, s_q, s_s = m_k.index(buffer + zero), m_q.index(zero), m_s.index(zero)
        s_dp = m_dp.index(zero)
        copy_tile(k, m_k.index(1 - buffer), bars_k.index(1 - buffer), f_t * N, i_h // G, pred)
        expect_wy(bar_wy, bar_p, pred)
        if INVERSE == gl.float16:
            b_dv *= b_max[:, None]
        s_dv.permute((1, 0)).store(b_dv.to(DTYPE))
        s_r.store((b_dv * -table[READ].load(STEP)[None, :]).to(DTYPE))
        s_do.store(b_do)
        fence_async_shared()
        barrier()
        copy_wy(wy, p, m_wy.index(zero), m_kept.index(zero), bar_wy, bar_p, f_t * N, f_t, i_h, pred)
        b_da = products(s_u, s_dv.permute((1, 0)), square, WIDTH)  # dA^T = u dV^T
        b_ds = warpgroup_mma(s_do.slice(0, TOKENS).permute((1, 0)), s_q.slice(0, TOKENS), b_ds, is_async=True)
        b_ds = warpgroup_mma(s_r, s_k, b_ds, is_async=True)
        b_kk = products(s_k, s_k.permute((1, 0)), square, K)
        p_dv = dv + (p_m * H + i_h) * V + i_p % TILES * WIDTH
        store_tile(p_dv, s_dv, n_m, zero, H * V, WIDTH, STORE_V)

        # Gradients through the state, and the inner products of k with the writes to it.
        keep_row_sums(written, row_sums(widened(s_k.load(WIDE)) * b_dk), zero)
        b_dk *= (table[WRITE].load(WROW) * table[BETA].load(WROW))[:, None]
        b_dq *= table[QUERY].load(WROW)[:, None]
        b_dk = products(s_r.permute((1, 0)), s_s, b_dk, WIDTH)
        b_dk = warpgroup_mma(s_dp, s_q, b_dk, is_async=True)
        b_dq = warpgroup_mma(s_dp.permute((1, 0)), s_k, b_dq, is_async=True)
        b_kq = warpgroup_mma_wait(2 * OF_V + OF_K + 4, deps=[b_kq])
        pairs = row_sums(b_dp * b_kq)  # dP .* P
        if GATED:
            b_dp = (b_dp * beta_r[:, None] - widened(r_dp)) * b_kq  # what rounding took from that

        # Inside the chunk; and the state's gradient for the next one.
        zero, i_p = rebuild(step, 3, P)
        s_da, s_ds = m_da.index(zero), m_ds.index(zero)
        b_da = warpgroup_mma_wait(OF_V + OF_K + 4, deps=[b_da])
        b_da *= -rk_r[:, None] * table[RK].load(COLUMN)[None, :]
        if GATED:
            b_da *= gl.exp2(table[GM].load(COLUMN)[None, :] - table[GM].load(ROW)[:, None])
        b_da = gl.where(o_r[:, None] < o_c[None, :], b_da, 0.0)
        r_da = (b_da * beta_r[:, None]).to(DTYPE)
        s_da.store(r_da)
        b_ds = warpgroup_mma_wait(OF_V + OF_K + 2, deps=[b_ds])
        s_ds.store(b_ds.to(DTYPE))
        expect_values(bar_do, bar_u, bar_s, pred, BK, BV)
        b_kk = warpgroup_mma_wait(2, deps=[b_kk])
        fence_async_shared()
        barrier()  # dO, u and S are read
        zero, i_p = rebuild(step, 4, P)
        i_h = i_p // TILES
        s_do, s_u, s_s, s_da = m_do.index(zero), m_u.index(zero), m_s.index(zero), m_da.index(zero)
        s_k, s_q, s_ds = m_k.index(buffer + zero), m_q.index(zero), m_ds.index(zero)
        copy_values(
            *(do, u, states, s_do, s_u, s_s, bar_do, bar_u, bar_s),
            *(f_t * N, f_t, (i_chunk + i_c) * P + i_p, i_p, pred),
        )
        b_dk = warpgroup_mma(s_da.permute((1, 0)), s_k, b_dk, is_async=True)
        b_dk = warpgroup_mma(s_da, s_k, b_dk, is_async=True)
        # Already the next chunk's dS'^T K^T; after the last one this chunk's again, for nothing.
        ahead = gl.minimum(step + 1, n_chunks - 1)
        mbarrier.wait(bars_k.index(ahead & 1), (ahead >> 1) & 1)
        b_du = products(s_ds, m_k.index((ahead & 1) + zero).permute((1, 0)), tall, K)
        scalars = fetch_scalars(rows, f_t.to(gl.int64), f_n, i_h, n_total, H, N, GATED, L2NORM, num_warps)
        f_peak = gl.load(peak + (i_chunk + gl.maximum(i_c, 0)) * H + i_h)
        keep_row_sums(inner, pairs + row_sums(b_da * b_kk), zero)  # dA .* A
        if GATED:
            b_da = (b_da * beta_r[:, None] - widened(r_da)) * b_kk
            keep_row_sums(lost, row_sums(b_da + b_dp), zero)
            if N == 1:
                keep_column_sums(lost_k, b_da + b_dp, zero)
            else:
                keep_column_sums(lost_k, b_da, zero)
                keep_column_sums(lost_q, b_dp, zero)
        b_dq = warpgroup_mma_wait(2 + OF_K, deps=[b_dq])
        if GATED or L2NORM:
            keep_row_sums(queries, row_sums(widened(s_q.load(WIDE)) * b_dq), zero)
        b_dk = warpgroup_mma_wait(OF_K, deps=[b_dk])
        if GATED or L2NORM:
            keep_row_sums(keys, row_sums(widened(s_k.load(WIDE)) * b_dk), zero)
        o_m = gl.arange(0, ROWS, LINE)
        beta_m, write_m = table[BETA].load(LINE), table[WRITE].load(LINE)
        if GATED:
            raw, b_ss = table[RAW].load(LINE), load_sums(state_sums, LINE)
        rk_w, rq_w = table[RK].load(WROW), table[RQ].load(WROW)
        mbarrier.expect(bar_q, TILE_BYTES, pred=pred)
        barrier()  # the scores and this chunk's scalars are read

        zero, i_p = rebuild(step, 5, P)
        i_h = i_p // TILES
        s_k, s_q, s_dk, s_out = m_k.index(buffer + zero), m_q.index(zero), m_dk.index(zero), m_out.index(zero)
        if L2NORM:
            # The sums are r * d(x r): with r = rsqrt(x . x + eps), dx = that - r^2 x (x . that).
            b_dk += widened(s_k.load(WIDE)) * (-rk_w * rk_w * load_sums(keys, WROW))[:, None]
            b_dq += widened(s_q.load(WIDE)) * (-rq_w * rq_w * load_sums(queries, WROW))[:, None]
        # Through shared memory into rows of whole sectors.
        s_dk.store(b_dk.to(DTYPE))
        s_out.store(b_dq.to(DTYPE))
        keep_scalars(table, scalars, scale, GATED)
        barrier()  # q and k are read
        copy_tile(q, s_q, bar_q, f_t, i_h // G, pred)
        p_dk, p_dq = dk + (p_m * P + i_p) // TOGETHER * K, dq + (p_t * P + i_p) // TOGETHER * K
        store_tile(p_dk, s_dk, n_m, zero, P // TOGETHER * K, K, STORE_K, ADD_KEYS)
        store_tile(p_dq, s_out, n_t, zero, P // TOGETHER * K, K, STORE_K, ADD_KEYS)
        kw = load_sums(written, LINE) * write_m
        store(dbeta + (p_m + o_m) * P + i_p, kw + load_sums(inner, LINE), o_m < n_m, ADD_SCALARS)
        if GATED:
            # k that reads the state raises the gates up to its token, a write those after it. dk and
            # dq are of rounded scores: with what that took, as much is added here as is subtracted there.
            kw *= beta_m
            rises = load_sums(keys, LINE) - 2.0 * (kw + load_sums(inner, LINE) * beta_m)
            rises += load_sums(lost, LINE) + load_sums(lost_k, LINE)
            tokens = load_sums(queries, LINE)
            if N == 1:
                b_dg = suffix_sums(rises + tokens)
            else:
                tokens += load_sums(lost_q, LINE)
                b_dg = gl.gather(suffix_sums(rises), gl.minimum(o_m * N, ROWS - 1), 0) + suffix_sums(tokens)
            b_dg += gl.sum(kw + b_ss * gl.exp2(g_last), 0)
            b_dg = gl.where(raw > LEAST_GATE, b_dg, 0.0)
            store(dg + (p_t + o_m) * P + i_p, b_dg, o_m < n_t, ADD_SCALARS)
        b_du = warpgroup_mma_wait(0, deps=[b_du])
        i_t, n_t, g_last, b_peak = f_t, f_n, scalars[5], f_peak
    if dinitial_state is not None:
        gl.store(dinitial_state + p_s, b_ds, mask=m_tile)


def parts(arguments: dict[str, Any], launches: int) -> Iterator[dict[str, Any]]:
    """Make the arguments of each launch from those of a call.

    One launch takes V in equal tiles. The first of two launches computes 128 columns of V, the second the
    rest. Two launches are for at most 256 columns, and for one value head per key head.
    """
    heads, value_dim = arguments["dv"].shape[-2:]
    if launches == 1:
        tiles = value_tiles(value_dim)
        zeros = heads // arguments["q"].shape[2] * tiles == PAIR.value
        yield arguments | dict(TILES=tiles, WIDTH=value_dim // tiles, ADD_KEYS=zeros, ADD_SCALARS=False)
        return
    for columns in (slice(0, HOPPER_TILE), slice(HOPPER_TILE, value_dim)):
        by_column = pick(arguments, "do", "u", "dv", "dfinal_state", "dinitial_state")
        tile = {name: None if x is None else x[..., columns] for name, x in by_column.items()}
        tile |= dict(states=arguments["states"][..., columns, :], WIDTH=columns.stop - columns.start)
        second = columns.start > 0
        yield arguments | tile | dict(TILES=1, ADD_KEYS=second, ADD_SCALARS=second)


def launch(programs: int, **arguments: Any) -> None:
    """Run `programs` = sequences x heads x TILES; arguments as the kernel's, tensors for descriptors."""
    tiled = with_tma_descriptors(arguments, rows=("q", "k", "do", "u", "wy", "p"), states=("states",))
    run_kernel(chunk_bwd_fused_kernel, (programs,), **tiled, num_warps=WARPS)
