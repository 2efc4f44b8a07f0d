"""`chunk_bwd_qkg_kernel` for Hopper in Gluon, K = V = 256: states go through shared memory in slices.

The formulas are those of the Triton kernel. A program of eight warps fills an SM and goes through chunks and
heads. u, dV, dO, k and q of a chunk rest in shared memory, while slices of 64 x 128 of its two states go
through three slots; so every tile is read once. Registers hold dk and dq of one half of the key channels: in
between, the first half waits in fp32 in the rows that are to hold both halves in 16 bits.
"""

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
    LINES,
    QUERY,
    READ,
    ROWS,
    WRITE,
    accumulator,
    async_load,
    barrier,
    fetch_scalars,
    keep_scalars,
    make_lines,
    persistent_programs,
    with_tma_descriptors,
)
from fla_train.kernels.delta_product.hopper.inside_chunk import (
    by_state,
    norm_parts,
    score_gradients,
    score_sums,
    store_scalar_gradients,
    work_span,
)

WARPS = 8
WIDTH, HALF = gl.constexpr(64), gl.constexpr(128)  # columns of a tile of V, and of half the key channels
TILES = gl.constexpr(4)  # number of tiles of V
PARTS = gl.constexpr(8)  # slices of a state: the tiles of V for one half, then for the other
SLOTS = gl.constexpr(3)
SCORES = gl.constexpr(2)  # tiles of u whose place dA' and dP' take
# Numbers of barriers. 0 to 2: the slots. VALUES: dV, dO and tiles 2 and 3 of u. FIRST: tiles 0 and 1 of u.
# KEYS: k and q.
VALUES, FIRST, KEYS = gl.constexpr(3), gl.constexpr(4), gl.constexpr(5)
# Columns of the tiles that the copy engine reads, all of 64 rows.
SLICES = {"q": 128, "k": 128, "do": 64, "dv": 64, "u": 64, "states": 128, "dstates": 128}


@gluon.jit
def copy_tiles(matrix, tiles, bar, i_row, i_head, pred, START: gl.constexpr, END: gl.constexpr):
    """Copy tiles START to END of 64 rows of a head."""
    COUNT: gl.constexpr = tiles.shape[0]
    COLUMNS: gl.constexpr = tiles.shape[2]
    for i in gl.static_range(START, END):
        async_load(matrix, [i_row, (i_head * COUNT + i) * COLUMNS], bar, tiles.index(i), pred=pred)


@gluon.jit
def copy_chunk_values(u, dv, do, m_u, m_dv, m_do, bar, i_m, i_t, i_head, pred):
    """Copy dV, dO and u of a chunk, the latter without the tiles whose place scores take."""
    mbarrier.expect(bar, (3 * TILES - SCORES) * ROWS * WIDTH * 2, pred=pred)
    copy_tiles(u, m_u, bar, i_m, i_head, pred, SCORES, TILES)
    copy_tiles(dv, m_dv, bar, i_m, i_head, pred, 0, TILES)
    copy_tiles(do, m_do, bar, i_t, i_head, pred, 0, TILES)


@gluon.jit
def copy_first(u, m_u, bar, i_m, i_head, pred):
    """Copy the tiles of u that `copy_chunk_values` leaves out."""
    mbarrier.expect(bar, SCORES * ROWS * WIDTH * 2, pred=pred)
    copy_tiles(u, m_u, bar, i_m, i_head, pred, 0, SCORES)


@gluon.jit
def copy_keys(k, q, m_k, m_q, bar, i_m, i_t, i_head, pred):
    """Copy k and q of a chunk."""
    mbarrier.expect(bar, 4 * ROWS * HALF * 2, pred=pred)
    copy_tiles(k, m_k, bar, i_m, i_head, pred, 0, 2)
    copy_tiles(q, m_q, bar, i_t, i_head, pred, 0, 2)


@gluon.jit
def copy_slice(matrix, ring, bars, count, work, part, n_work):
    """Copy this program's slice number `count` into its slot.

    It is `part` 0 to 7 of state `work`; from 8 on, of the state that the program takes next.
    """
    slot, i_state = count % SLOTS, work + part // PARTS * gl.num_programs(0)
    bar, pred = bars.index(slot), i_state < n_work
    mbarrier.expect(bar, WIDTH * HALF * 2, pred=pred)
    i_row, i_column = (i_state * TILES + part % TILES) * WIDTH, part // TILES % 2 * HALF
    async_load(matrix, [i_row, i_column], bar, ring.index(slot), pred=pred)


@gluon.jit
def load_quarters(tile, LAYOUT: gl.constexpr):
    """Load a slice as a tuple of four tiles of 16 rows."""
    parts = ()
    for i in gl.static_range(0, WIDTH, WIDTH // 4):
        parts += (tile.slice(i, WIDTH // 4).load(LAYOUT),)
    return parts


@gluon.jit
def add_products(total, a, b):
    """Return total + a .* b in fp32 of tuples of tiles."""
    for i in gl.static_range(len(a)):
        total += a[i].to(gl.float32) * b[i].to(gl.float32)
    return total


@gluon.jit(do_not_specialize=["T", "NT", "n_work"])
def chunk_bwd_qkg_wide_kernel(
    q, k, do, dv, u, states, dstates,  # descriptors of [rows, columns]
    beta, g, g_cum, q_rnorm, k_rnorm,
    dq, dk, dbeta, dg,
    cu_seqlens, chunk_offsets, chunk_sequence, scale, n_total, T, NT, n_work,
    H: gl.constexpr, G: gl.constexpr, K: gl.constexpr, V: gl.constexpr, N: gl.constexpr, C: gl.constexpr,
    GATED: gl.constexpr, L2NORM: gl.constexpr, PACKED: gl.constexpr, num_warps: gl.constexpr,
):  # fmt: skip
    """Take the arguments of the Triton `chunk_bwd_qkg_kernel`; `n_work` is chunks x heads.

    Tiles of q and dO have 64 rows, too: those past the chunk belong to later tokens and count as zero.
    """
    DTYPE: gl.constexpr = k.dtype
    SQUARE: gl.constexpr = accumulator(ROWS, num_warps)
    WIDE: gl.constexpr = accumulator(HALF, num_warps)
    ROW: gl.constexpr = gl.SliceLayout(1, SQUARE)
    WROW: gl.constexpr = gl.SliceLayout(1, WIDE)
    STORE: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [num_warps, 1], [1, 0])

    m_u = gl.allocate_shared_memory(DTYPE, [TILES, ROWS, WIDTH], u.layout)
    m_dv = gl.allocate_shared_memory(DTYPE, [TILES, ROWS, WIDTH], dv.layout)
    m_do = gl.allocate_shared_memory(DTYPE, [TILES, ROWS, WIDTH], do.layout)
    m_k = gl.allocate_shared_memory(DTYPE, [2, ROWS, HALF], k.layout)
    m_q = gl.allocate_shared_memory(DTYPE, [2, ROWS, HALF], q.layout)
    ring = gl.allocate_shared_memory(DTYPE, [SLOTS, WIDTH, HALF], states.layout)
    table = make_lines(LINES)
    bars = gl.allocate_shared_memory(gl.int64, [KEYS + 1, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(KEYS + 1):
        mbarrier.init(bars.index(i), count=1)
    fence_async_shared()
    barrier()

    where, rows = (cu_seqlens, chunk_offsets, chunk_sequence, T, NT), (beta, g, g_cum, q_rnorm, k_rnorm)
    work = gl.program_id(0)
    i_h, i_t, n_t, r_m, r_t = work_span(work, where, H, N, C, PACKED)
    copy_first(u, m_u, bars.index(FIRST), r_m, i_h, True)
    copy_chunk_values(u, dv, do, m_u, m_dv, m_do, bars.index(VALUES), r_m, r_t, i_h, True)
    copy_slice(dstates, ring, bars, 0, work, 0, n_work)
    copy_slice(states, ring, bars, 1, work, 0, n_work)
    copy_slice(dstates, ring, bars, 2, work, 1, n_work)
    copy_keys(k, q, m_k, m_q, bars.index(KEYS), r_m, r_t, i_h // G, True)

    scalars = fetch_scalars(rows, i_t, n_t, i_h, n_total, H, N, GATED, L2NORM, num_warps)
    g_last = keep_scalars(table, scalars, scale, GATED)
    barrier()
    step = 0
    while work < n_work:
        # 0, but the compiler can't know: it would keep all tiles' addresses over the loop, and spill them.
        zero = step >> 30
        i_m, n_m = i_t * N, n_t * N
        following = work + gl.num_programs(0)
        pred = following < n_work
        ahead = gl.minimum(following, n_work - 1)
        f_h, f_t, f_n, r_m, r_t = work_span(ahead, where, H, N, C, PACKED)
        # Where the first half of dk and dq waits: a row's 256 numbers of 16 bits have room for 128 of 32.
        o_r, o_k = gl.arange(0, ROWS, WROW), gl.arange(0, HALF, gl.SliceLayout(0, WIDE))
        place = o_r[:, None] * (H * K // 2) + o_k[None, :]
        k_rows, q_rows = (o_r < n_m)[:, None], (o_r < n_t)[:, None]
        p_dk, p_dq = dk + (i_m * H + i_h) * K, dq + (i_t * H + i_h) * K
        p_dk0 = p_dk.to(gl.pointer_type(gl.float32), bitcast=True)
        p_dq0 = p_dq.to(gl.pointer_type(gl.float32), bitcast=True)

        # By way of the state, and the inner products with k and q that beta, gates and norms take.
        square, wide = gl.zeros([ROWS, ROWS], gl.float32, SQUARE), gl.zeros([ROWS, HALF], gl.float32, WIDE)
        write_w, read_w = table[WRITE].load(WROW), table[READ].load(WROW)
        query_w, beta_w = table[QUERY].load(WROW), table[BETA].load(WROW)
        none = gl.zeros([ROWS], gl.float32, WROW)
        kw, kr, qr = none, none, none
        b_sums = gl.zeros([WIDTH // 4, HALF], gl.float32, STORE)  # of S .* dS'
        mbarrier.wait(bars.index(FIRST), step & 1)
        mbarrier.wait(bars.index(VALUES), step & 1)
        for half in gl.static_range(2):
            b_dk, b_y, b_dq = wide, wide, wide
            for i in range(TILES):
                part = half * TILES + i
                count = 2 * (step * PARTS + part)
                s_ds, s_s = ring.index(count % SLOTS), ring.index((count + 1) % SLOTS)
                mbarrier.wait(bars.index(count % SLOTS), count // SLOTS & 1)
                b_dk = warpgroup_mma(m_u.index(i), s_ds, b_dk, is_async=True)
                if GATED:
                    b_ds = load_quarters(s_ds, STORE)
                mbarrier.wait(bars.index((count + 1) % SLOTS), (count + 1) // SLOTS & 1)
                b_y = warpgroup_mma(m_dv.index(i), s_s, b_y, is_async=True)
                b_dq = warpgroup_mma(m_do.index(i), s_s, b_dq, is_async=True)
                b_dk = warpgroup_mma_wait(2, deps=[b_dk])
                barrier()  # this part of dS' is read
                copy_slice(states, ring, bars, count + 3, work, part + 1, n_work)
                if GATED:
                    b_sums = add_products(b_sums, b_ds, load_quarters(s_s, STORE))
                b_y, b_dq = warpgroup_mma_wait(0, deps=[b_y, b_dq])
                barrier()  # and S
                copy_slice(dstates, ring, bars, count + 4, work, part + 2, n_work)
            if half == 0:
                mbarrier.wait(bars.index(KEYS), step & 1)
            s_k, s_q = m_k.index(zero + half), m_q.index(zero + half)
            b_dk, b_dq, kw_i, kr_i, qr_i = by_state(
                b_dk, b_y, b_dq, s_k, s_q, write_w, read_w, query_w, beta_w, WIDE
            )
            kw, kr, qr = kw + kw_i, kr + kr_i, qr + qr_i
            if half == 0:
                gl.store(p_dk0 + place, b_dk, mask=k_rows)
                gl.store(p_dq0 + place, b_dq, mask=q_rows)

        # Inside the chunk.
        b_da, b_dp, b_kk, b_kq = square, square, square, square
        for i in gl.static_range(TILES):
            s_u = m_u.index(zero + i).permute((1, 0))
            s_do = m_do.index(zero + i).permute((1, 0))
            b_da = warpgroup_mma(m_dv.index(zero + i), s_u, b_da, is_async=True)  # dV u^T
            b_dp = warpgroup_mma(m_u.index(zero + i), s_do, b_dp, is_async=True)  # u dO^T
        for half in gl.static_range(2):
            s_k, s_q = m_k.index(zero + half), m_q.index(zero + half)
            b_kk = warpgroup_mma(s_k, s_k.permute((1, 0)), b_kk, is_async=True)
            b_kq = warpgroup_mma(s_k, s_q.permute((1, 0)), b_kq, is_async=True)
        b_da, b_dp, b_kk, b_kq = warpgroup_mma_wait(0, deps=[b_da, b_dp, b_kk, b_kq])
        barrier()  # u, dV and dO are read
        copy_chunk_values(u, dv, do, m_u, m_dv, m_do, bars.index(VALUES), r_m, r_t, f_h, pred)
        s_da, s_dp = m_u.index(zero), m_u.index(zero + 1)
        b_da, b_dp = score_gradients(b_da, b_dp, s_da, s_dp, table, n_m, n_t, scale, N, GATED, SQUARE)
        inner, kp, qp = score_sums(b_da, b_dp, b_kk, b_kq, table, SQUARE, WROW)
        kw_r, kr_r = gl.convert_layout(kw, ROW), gl.convert_layout(kr, ROW)
        b_ss = gl.sum(gl.sum(b_sums, 1), 0)
        store_scalar_gradients(
            dbeta, dg, table, kw_r, kr_r, qr, inner, kp, qp, b_ss, g_last, i_m, n_m, i_t, n_t, i_h,
            H, N, GATED, SQUARE,
        )  # fmt: skip
        of_k, of_q = kw, qr
        if L2NORM:
            of_k, of_q = norm_parts(table, kw_r, kr_r, kp, qr, qp, ROW, WROW)

        scalars = fetch_scalars(rows, f_t, f_n, f_h, n_total, H, N, GATED, L2NORM, num_warps)

        # Both halves in place of k and q, the second one first, and from there into rows of whole sectors.
        for half in gl.static_range(1, -1, -1):
            if half == 0:
                b_dk = gl.load(p_dk0 + place, mask=k_rows, other=0.0)
                b_dq = gl.load(p_dq0 + place, mask=q_rows, other=0.0)
            s_k, s_q = m_k.index(zero + half), m_q.index(zero + half)
            b_dk = warpgroup_mma(s_da, s_k, b_dk, is_async=True)
            b_dk = warpgroup_mma(s_da.permute((1, 0)), s_k, b_dk, is_async=True)
            b_dk = warpgroup_mma(s_dp, s_q, b_dk, is_async=True)
            b_dq = warpgroup_mma(s_dp.permute((1, 0)), s_k, b_dq, is_async=True)
            b_dk, b_dq = warpgroup_mma_wait(0, deps=[b_dk, b_dq])
            if L2NORM:
                b_dk -= s_k.load(WIDE).to(gl.float32) * of_k[:, None]
                b_dq -= s_q.load(WIDE).to(gl.float32) * of_q[:, None]
            barrier()  # this half of k and q is read
            s_k.store(b_dk.to(DTYPE))
            s_q.store(b_dq.to(DTYPE))
        copy_first(u, m_u, bars.index(FIRST), r_m, f_h, pred)
        barrier()
        g_last = keep_scalars(table, scalars, scale, GATED)
        o_s, o_c = gl.arange(0, ROWS, gl.SliceLayout(1, STORE)), gl.arange(0, HALF, gl.SliceLayout(0, STORE))
        offset = o_s[:, None] * (H * K) + o_c[None, :]
        for half in gl.static_range(2):
            s_k, s_q = m_k.index(zero + half), m_q.index(zero + half)
            gl.store(p_dk + half * HALF + offset, s_k.load(STORE), mask=(o_s < n_m)[:, None])
            gl.store(p_dq + half * HALF + offset, s_q.load(STORE), mask=(o_s < n_t)[:, None])
        fence_async_shared()
        barrier()  # the outputs have left the place of k and q
        copy_keys(k, q, m_k, m_q, bars.index(KEYS), r_m, r_t, f_h // G, pred)
        work, step = following, step + 1
        i_h, i_t, n_t = f_h, f_t, f_n


def launch(programs: int, **arguments: Any) -> None:
    """Run the kernel for so many chunks x heads; the arguments are those of the Triton kernel."""
    grid = (persistent_programs(programs, arguments["q"].device),)
    rows, states = ("q", "k", "do", "dv", "u"), ("states", "dstates")
    tiled = with_tma_descriptors(arguments, rows, states, SLICES)
    run_kernel(chunk_bwd_qkg_wide_kernel, grid, **tiled, n_work=programs, num_warps=WARPS)
