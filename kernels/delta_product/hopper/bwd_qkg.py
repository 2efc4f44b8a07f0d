"""`chunk_bwd_qkg_kernel` for Hopper in Gluon: the next chunk's tiles load while this one's are used.

The formulas are those of the Triton kernel. A program of eight warps fills an SM and goes through chunks and
heads, and the copy engine (TMA) fills shared memory for the chunk after this one: u, dV and dO have two
buffers each, those of the states are refilled as soon as the products that read them are done, those of q and
k at the end. Every tile is read once.

For 16-bit inputs with K = V = 64 or 128. `bwd_qkg_wide` takes 256, `chunk_bwd_qkg_kernel` of
triton/chunk_bwd.py the rest.
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
    TILE,
    WRITE,
    accumulator,
    barrier,
    copy_pair,
    copy_state,
    copy_tile,
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


@gluon.jit
def copy_values(u, dv, do, m_u, m_dv, m_do, bars, buffer, i_m, i_t, i_head, pred, BYTES: gl.constexpr):
    """Copy u, dV and dO of a chunk to the buffers of that number; its barrier completes with all three."""
    bar = bars.index(buffer)
    copy_pair(u, dv, m_u.index(buffer), m_dv.index(buffer), bar, i_m, i_m, i_head, pred, BYTES)
    copy_tile(do, m_do.index(buffer), bar, i_t, i_head, pred)


@gluon.jit
def copy_states(dstates, states, s_ds, s_s, bar, i_state, pred, BYTES: gl.constexpr):
    """Copy both states of a chunk and head, with which `bar` completes."""
    mbarrier.expect(bar, BYTES, pred=pred)
    copy_state(dstates, s_ds, bar, i_state, pred)
    copy_state(states, s_s, bar, i_state, pred)


@gluon.jit(do_not_specialize=["T", "NT", "n_work"])
def chunk_bwd_qkg_kernel(
    q, k, do, dv, u, states, dstates,  # descriptors of [rows, columns]
    beta, g, g_cum, q_rnorm, k_rnorm,
    dq, dk, dbeta, dg,
    cu_seqlens, chunk_offsets, chunk_sequence, scale, n_total, T, NT, n_work,
    H: gl.constexpr, G: gl.constexpr, K: gl.constexpr, V: gl.constexpr, N: gl.constexpr, C: gl.constexpr,
    GATED: gl.constexpr, L2NORM: gl.constexpr, PACKED: gl.constexpr, num_warps: gl.constexpr,
):  # fmt: skip
    """Take the arguments of the Triton `chunk_bwd_qkg_kernel`; `n_work` is chunks x heads.

    Tiles of q and dO also have 64 rows: those past the chunk belong to later tokens and count as zero.
    """
    DTYPE: gl.constexpr = k.dtype
    SQUARE: gl.constexpr = accumulator(ROWS, num_warps)
    WIDE: gl.constexpr = accumulator(K, num_warps)
    ROW: gl.constexpr = gl.SliceLayout(1, SQUARE)
    WROW: gl.constexpr = gl.SliceLayout(1, WIDE)
    STORE: gl.constexpr = gl.BlockedLayout([1, 8], [256 // K, K // 8], [num_warps, 1], [1, 0])
    PART: gl.constexpr = 256 // K * num_warps  # rows of a state that the program's threads hold once
    STATE_BYTES: gl.constexpr = 2 * V * K * 2
    VALUE_BYTES: gl.constexpr = 3 * ROWS * V * 2
    ROW_BYTES: gl.constexpr = 2 * ROWS * K * 2

    m_u = gl.allocate_shared_memory(DTYPE, [2, ROWS, V], u.layout)
    m_dv = gl.allocate_shared_memory(DTYPE, [2, ROWS, V], dv.layout)
    m_do = gl.allocate_shared_memory(DTYPE, [2, ROWS, V], do.layout)
    m_s = gl.allocate_shared_memory(DTYPE, [1, V, K], states.layout)
    m_ds = gl.allocate_shared_memory(DTYPE, [1, V, K], dstates.layout)
    m_k = gl.allocate_shared_memory(DTYPE, [1, ROWS, K], k.layout)
    m_q = gl.allocate_shared_memory(DTYPE, [1, ROWS, K], q.layout)
    m_da = gl.allocate_shared_memory(DTYPE, [1, ROWS, ROWS], TILE)
    m_dp = gl.allocate_shared_memory(DTYPE, [1, ROWS, ROWS], TILE)
    table = make_lines(LINES)
    bars = gl.allocate_shared_memory(gl.int64, [4, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(4):
        mbarrier.init(bars.index(i), count=1)
    fence_async_shared()
    barrier()

    where, rows = (cu_seqlens, chunk_offsets, chunk_sequence, T, NT), (beta, g, g_cum, q_rnorm, k_rnorm)
    work = gl.program_id(0)
    i_h, i_t, n_t, r_m, r_t = work_span(work, where, H, N, C, PACKED)
    copy_values(u, dv, do, m_u, m_dv, m_do, bars, 0, r_m, r_t, i_h, True, VALUE_BYTES)
    copy_states(dstates, states, m_ds.index(0), m_s.index(0), bars.index(2), work, True, STATE_BYTES)
    copy_pair(k, q, m_k.index(0), m_q.index(0), bars.index(3), r_m, r_t, i_h // G, True, ROW_BYTES)

    scalars = fetch_scalars(rows, i_t, n_t, i_h, n_total, H, N, GATED, L2NORM, num_warps)
    g_last = keep_scalars(table, scalars, scale, GATED)
    barrier()
    step = 0
    while work < n_work:
        # 0, but the compiler can't know: it would keep all tiles' addresses over the loop, and spill them.
        zero = step >> 30
        s_s, s_ds, s_da, s_dp = m_s.index(zero), m_ds.index(zero), m_da.index(zero), m_dp.index(zero)
        s_k, s_q = m_k.index(zero), m_q.index(zero)
        buffer = step & 1
        i_m, n_m = i_t * N, n_t * N
        following = work + gl.num_programs(0)
        pred = following < n_work
        ahead = gl.minimum(following, n_work - 1)
        f_h, f_t, f_n, r_m, r_t = work_span(ahead, where, H, N, C, PACKED)
        copy_values(u, dv, do, m_u, m_dv, m_do, bars, 1 - buffer, r_m, r_t, f_h, pred, VALUE_BYTES)

        scalars = fetch_scalars(rows, f_t, f_n, f_h, n_total, H, N, GATED, L2NORM, num_warps)

        s_u, s_dv, s_do = m_u.index(buffer), m_dv.index(buffer), m_do.index(buffer)
        mbarrier.wait(bars.index(buffer), (step >> 1) & 1)
        mbarrier.wait(bars.index(2), step & 1)
        square, wide = gl.zeros([ROWS, ROWS], gl.float32, SQUARE), gl.zeros([ROWS, K], gl.float32, WIDE)
        b_dk = warpgroup_mma(s_u, s_ds, wide, is_async=True)
        b_y = warpgroup_mma(s_dv, s_s, wide, is_async=True)
        b_dq = warpgroup_mma(s_do, s_s, wide, is_async=True)
        b_da = warpgroup_mma(s_dv, s_u.permute((1, 0)), square, is_async=True)  # dV u^T
        b_dp = warpgroup_mma(s_u, s_do.permute((1, 0)), square, is_async=True)  # u dO^T
        b_ss = 0.0
        if GATED:
            b_sums = gl.zeros([2 * PART, K], gl.float32, STORE)
            for i in gl.static_range(0, V, 2 * PART):
                b_s, b_ds = s_s.slice(i, 2 * PART).load(STORE), s_ds.slice(i, 2 * PART).load(STORE)
                b_sums += b_s.to(gl.float32) * b_ds.to(gl.float32)
            b_ss = gl.sum(gl.sum(b_sums, 1), 0)
        b_da, b_dp, b_dk, b_y, b_dq = warpgroup_mma_wait(0, deps=[b_da, b_dp, b_dk, b_y, b_dq])
        barrier()  # the states are read
        copy_states(dstates, states, s_ds, s_s, bars.index(2), ahead, pred, STATE_BYTES)

        # Gradients through the state, and the inner products with k and q that beta, gates and norms take.
        mbarrier.wait(bars.index(3), step & 1)
        write_w, read_w = table[WRITE].load(WROW), table[READ].load(WROW)
        query_w, beta_w = table[QUERY].load(WROW), table[BETA].load(WROW)
        b_dk, b_dq, kw, kr, qr = by_state(b_dk, b_y, b_dq, s_k, s_q, write_w, read_w, query_w, beta_w, WIDE)

        # Inside the chunk.
        b_kq = warpgroup_mma(s_k, s_q.permute((1, 0)), square, is_async=True)
        b_kk = warpgroup_mma(s_k, s_k.permute((1, 0)), square, is_async=True)
        b_da, b_dp = score_gradients(b_da, b_dp, s_da, s_dp, table, n_m, n_t, scale, N, GATED, SQUARE)
        barrier()
        b_dk = warpgroup_mma(s_da, s_k, b_dk, is_async=True)
        b_dk = warpgroup_mma(s_da.permute((1, 0)), s_k, b_dk, is_async=True)
        b_dk = warpgroup_mma(s_dp, s_q, b_dk, is_async=True)
        b_dq = warpgroup_mma(s_dp.permute((1, 0)), s_k, b_dq, is_async=True)

        # Meanwhile what beta, gates and norms take of the chunk.
        b_kq, b_kk = warpgroup_mma_wait(4, deps=[b_kq, b_kk])
        inner, kp, qp = score_sums(b_da, b_dp, b_kk, b_kq, table, SQUARE, WROW)
        kw, kr = gl.convert_layout(kw, ROW), gl.convert_layout(kr, ROW)
        store_scalar_gradients(
            dbeta, dg, table, kw, kr, qr, inner, kp, qp, b_ss, g_last, i_m, n_m, i_t, n_t, i_h,
            H, N, GATED, SQUARE,
        )  # fmt: skip

        b_dk, b_dq = warpgroup_mma_wait(0, deps=[b_dk, b_dq])
        if L2NORM:
            of_k, of_q = norm_parts(table, kw, kr, kp, qr, qp, ROW, WROW)
            b_dk -= s_k.load(WIDE).to(gl.float32) * of_k[:, None]
            b_dq -= s_q.load(WIDE).to(gl.float32) * of_q[:, None]
        # Through the buffers of u and dV into rows of whole sectors.
        s_u.store(b_dk.to(DTYPE))
        s_dv.store(b_dq.to(DTYPE))
        fence_async_shared()
        barrier()  # q and k are read
        copy_pair(k, q, s_k, s_q, bars.index(3), r_m, r_t, f_h // G, pred, ROW_BYTES)
        g_last = keep_scalars(table, scalars, scale, GATED)
        o_s, o_k = gl.arange(0, ROWS, gl.SliceLayout(1, STORE)), gl.arange(0, K, gl.SliceLayout(0, STORE))
        offset = o_s[:, None] * (H * K) + o_k[None, :]
        gl.store(dk + (i_m * H + i_h) * K + offset, s_u.load(STORE), mask=(o_s < n_m)[:, None])
        gl.store(dq + (i_t * H + i_h) * K + offset, s_dv.load(STORE), mask=(o_s < n_t)[:, None])
        barrier()  # the outputs have left the buffers that the next step's copies take
        work, step = following, step + 1
        i_h, i_t, n_t = f_h, f_t, f_n


def launch(programs: int, **arguments: Any) -> None:
    """Run the kernel with `programs` = chunks x heads; the arguments are those of the Triton kernel."""
    grid = (persistent_programs(programs, arguments["q"].device),)
    tiled = with_tma_descriptors(arguments, ("q", "k", "do", "dv", "u"), states=("states", "dstates"))
    run_kernel(chunk_bwd_qkg_kernel, grid, **tiled, n_work=programs, num_warps=WARPS)
