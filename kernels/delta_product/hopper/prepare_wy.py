"""`chunk_prepare_wy_kernel` for Hopper in Gluon: keys and queries are in shared memory only.

The formulas are those of the Triton kernel. A program of four warps prepares one chunk and head. The tiles
come by the copy engine and are read by matrix products alone: the norms are the diagonals of K K^T and Q Q^T.
The operands of the inverse then replace them.

For normalised 16-bit inputs with K from 64 to 128; the kernel of triton/chunk_fwd.py computes the rest.
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
    LEAST,
    ROWS,
    TILE,
    accumulator,
    add,
    barrier,
    chunk_span,
    copy_pair,
    make_bar,
    make_lines,
    opaque_zero,
    reinterpret,
    rows_of,
    with_tma_descriptors,
)
from fla_train.kernels.delta_product.triton.chunk_fwd import LOG2E, MIN_LOG2_DECAY

WARPS = 4
REGISTERS = 128  # a thread's limit. With 150, three programs share an SM instead of four; few are spilled
# Constants of chunk_fwd for Gluon: log2(e), and the least log2 decay of a token.
PER_NAT, LEAST_DECAY = gl.constexpr(LOG2E.value), gl.constexpr(MIN_LOG2_DECAY.value)


@gluon.jit
def invert(b_l, zero, s_l, s_rest, s_wy, ACC: gl.constexpr):
    """Return (I + L)^-1 of a strictly lower triangular L [64, 64] in fp32, as `unit_lower_inverse` has it.

    L stays whole: with T block diagonal, T L T between two blocks is that of L between them. So each product
    is masked and not its operand, and L goes to shared memory once.
    """
    ROW: gl.constexpr = gl.SliceLayout(1, ACC)
    COLUMN: gl.constexpr = gl.SliceLayout(0, ACC)
    LEFT: gl.constexpr = gl.DotOperandLayout(0, ACC, 2)
    o_r, o_c = gl.arange(0, ROWS, ROW)[:, None], gl.arange(0, ROWS, COLUMN)[None, :]
    b_w = b_l.to(gl.float16)
    s_l.store(b_w)
    s_rest.store((b_l - b_w.to(gl.float32)).to(gl.float16))
    unit = gl.where(o_r == o_c, 1.0, zero)
    b_wy = unit - gl.where((o_r == o_c + 1) & (o_c % 2 == 0), b_l, 0.0)
    empty = gl.zeros([ROWS, ROWS], gl.float32, ACC)
    for level in gl.static_range(1, 6):
        b_y = b_wy.to(gl.float16)
        s_wy.store(b_y)
        fence_async_shared()
        barrier()
        b_w = warpgroup_mma(gl.convert_layout(b_y, LEFT), s_l, empty, is_async=True)
        b_w = warpgroup_mma_wait(0, deps=[b_w])
        b_w = warpgroup_mma(gl.convert_layout(b_w.to(gl.float16), LEFT), s_wy, empty, is_async=True)
        b_w = warpgroup_mma_wait(0, deps=[b_w])
        below = ((o_r >> level) == (o_c >> level) + 1) & ((o_c >> level) % 2 == 0)
        b_wy -= gl.where(below, b_w, 0.0)
        barrier()  # T of this width is read
    # One Newton step on the rounded T, with L in two terms
    b_y = b_wy.to(gl.float16)
    s_wy.store(b_y)
    fence_async_shared()
    barrier()
    b_w = warpgroup_mma(s_l, s_wy, b_y.to(gl.float32), is_async=True)
    b_w = warpgroup_mma(s_rest, s_wy, b_w, is_async=True)
    b_w = warpgroup_mma_wait(0, deps=[b_w])
    barrier()
    s_rest.store((unit - b_w).to(gl.float16))
    fence_async_shared()
    barrier()
    b_wy = warpgroup_mma(gl.convert_layout(b_y, LEFT), s_rest, b_y.to(gl.float32), is_async=True)
    b_wy = warpgroup_mma_wait(0, deps=[b_wy])
    return b_wy


@gluon.jit(do_not_specialize=["T", "NT"])
def chunk_prepare_wy_kernel(
    q, k,  # descriptors of [rows, columns]
    beta, g,
    wy, p, read, write, query, decay, peak, g_cum, q_rnorm, k_rnorm,
    cu_seqlens, chunk_offsets, chunk_sequence, scale, eps, n_total, T, NT,
    H: gl.constexpr, G: gl.constexpr, K: gl.constexpr, N: gl.constexpr, C: gl.constexpr,
    GATED: gl.constexpr, PACKED: gl.constexpr, num_warps: gl.constexpr,
):  # fmt: skip
    """Take the arguments of the Triton `chunk_prepare_wy_kernel`.

    The tile of q also has 64 rows: those past the chunk belong to later tokens and count as zero.
    """
    DTYPE: gl.constexpr = k.dtype
    BK: gl.constexpr = 64 if K <= 64 else 128
    ACC: gl.constexpr = accumulator(ROWS, num_warps)
    ROW: gl.constexpr = gl.SliceLayout(1, ACC)
    COLUMN: gl.constexpr = gl.SliceLayout(0, ACC)
    LINE: gl.constexpr = gl.BlockedLayout([1], [32], [num_warps], [0])
    STORE: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [num_warps, 1], [1, 0])

    i_c, i_h = gl.program_id(0) // H, gl.program_id(0) % H  # heads side by side: their rows are adjacent
    i_t, n_t = chunk_span(i_c, cu_seqlens, chunk_offsets, chunk_sequence, T, NT, C, PACKED)
    if n_t == 0:
        return
    i_m, n_m = i_t * N, n_t * N
    m_k = gl.allocate_shared_memory(DTYPE, [ROWS, BK], TILE)
    m_q = gl.allocate_shared_memory(DTYPE, [ROWS, BK], TILE)
    if BK == 64:
        m_rest = gl.allocate_shared_memory(gl.float16, [ROWS, ROWS], TILE)
        m_wy = gl.allocate_shared_memory(gl.float16, [ROWS, ROWS], TILE)
    t_rk, t_rq, t_beta, t_gm, t_gt = make_lines(5)
    bar = make_bar()
    fence_async_shared()
    barrier()
    copy_pair(k, q, m_k, m_q, bar, i_m.to(gl.int32), i_t.to(gl.int32), i_h // G, True, 2 * ROWS * BK * 2)

    o = gl.arange(0, ROWS, LINE)
    p_t, p_m = i_h.to(gl.int64) * n_total + i_t, i_h.to(gl.int64) * n_total * N + i_m
    b_beta = rows_of(beta + i_m * H + i_h, n_m, H, LINE)
    t_beta.store(b_beta)
    b_peak = gl.abs(scale) * gl.max(gl.abs(b_beta), 0)
    b_peak = gl.where(b_peak > LEAST, b_peak, 1.0)  # without writes P diag(beta) is 0, whatever divides it
    gl.store(peak + i_c.to(gl.int64) * H + i_h, b_peak)
    g_last, b_gm, b_gt = 0.0, b_beta, b_beta
    if GATED:
        b_g = rows_of(g + i_t * H + i_h, n_t, H, LINE) * PER_NAT
        b_g = gl.where(b_g < LEAST_DECAY, LEAST_DECAY, b_g)  # `maximum` would make a NaN a closed gate
        b_gt = gl.associative_scan(b_g, 0, add)
        b_gm = gl.gather(b_gt, o // N, 0)  # Householder steps of one token get bit-identical values
        g_last = gl.sum(b_g, 0)
        gl.store(g_cum + p_t + o, b_gt, mask=o < n_t)
        t_gm.store(b_gm)
        t_gt.store(b_gt)

    mbarrier.wait(bar, 0)
    empty = gl.zeros([ROWS, ROWS], gl.float32, ACC)
    b_a = warpgroup_mma(m_k, m_k.permute((1, 0)), empty, is_async=True)
    b_qq = warpgroup_mma(m_q, m_q.permute((1, 0)), empty, is_async=True)
    b_p = warpgroup_mma(m_q, m_k.permute((1, 0)), empty, is_async=True)
    b_a, b_qq, b_p = warpgroup_mma_wait(0, deps=[b_a, b_qq, b_p])
    o_r, o_c = gl.arange(0, ROWS, ROW), gl.arange(0, ROWS, COLUMN)
    diagonal = o_r[:, None] == o_c[None, :]
    t_rk.store(gl.rsqrt(gl.sum(gl.where(diagonal, b_a, 0.0), 1) + eps))
    t_rq.store(gl.rsqrt(gl.sum(gl.where(diagonal, b_qq, 0.0), 1) + eps))
    barrier()

    b_rk, b_rq = t_rk.load(LINE), t_rq.load(LINE)
    gl.store(k_rnorm + p_m + o, b_rk, mask=o < n_m)
    gl.store(q_rnorm + p_t + o, b_rq, mask=o < n_t)
    b_read, b_write, b_query, chunk_decay = b_rk, b_rk * b_beta, b_rq * scale, 1.0
    if GATED:
        b_read *= gl.exp2(b_gm)
        b_write *= gl.exp2(g_last - b_gm)
        b_query *= gl.exp2(b_gt)
        chunk_decay = gl.exp2(g_last)
    gl.store(read + p_m + o, b_read, mask=o < n_m)
    gl.store(write + p_m + o, b_write, mask=o < n_m)
    gl.store(query + p_t + o, b_query, mask=o < n_t)
    gl.store(decay + i_c.to(gl.int64) * H + i_h, chunk_decay)

    write_c = (t_rk.load(COLUMN) * t_beta.load(COLUMN))[None, :]
    lower = (o_r[:, None] > o_c[None, :]) & (o_r < n_m)[:, None]
    seen = ((o_c // N)[None, :] <= o_r[:, None]) & (o_r < n_t)[:, None]
    b_a *= t_rk.load(ROW)[:, None] * write_c
    b_p *= (t_rq.load(ROW) * (scale / b_peak))[:, None] * write_c
    if GATED:
        gm_c = t_gm.load(COLUMN)[None, :]
        b_a *= gl.exp2(gl.where(lower, t_gm.load(ROW)[:, None] - gm_c, 0.0))
        b_p *= gl.exp2(gl.where(seen, t_gt.load(ROW)[:, None] - gm_c, 0.0))
    if BK == 128:
        halves = reinterpret(m_k, gl.float16, [2, ROWS, ROWS], TILE)
        s_l, s_rest = halves.index(0), halves.index(1)
        s_wy = reinterpret(m_q, gl.float16, [2, ROWS, ROWS], TILE).index(0)
    else:
        s_l, s_rest, s_wy = reinterpret(m_k, gl.float16, [ROWS, ROWS], TILE), m_rest, m_wy
    zero = opaque_zero(T)
    s_wy.store(gl.where(seen, b_p, zero).to(gl.float16))
    o_s, o_k = gl.arange(0, ROWS, gl.SliceLayout(1, STORE)), gl.arange(0, ROWS, gl.SliceLayout(0, STORE))
    offset = o_s[:, None] * (H * ROWS) + o_k[None, :]
    barrier()
    gl.store(p + (i_t * H + i_h) * ROWS + offset, s_wy.load(STORE), mask=(o_s < n_t)[:, None])
    barrier()  # P has left the buffer of T
    b_wy = invert(gl.where(lower, b_a, zero), zero, s_l, s_rest, s_wy, ACC)
    s_wy.store(b_wy.to(gl.float16))
    barrier()
    gl.store(wy + (i_m * H + i_h) * ROWS + offset, s_wy.load(STORE), mask=(o_s < n_m)[:, None])


def launch(programs: int, **arguments: Any) -> None:
    """Run the kernel for so many chunks x heads; the arguments are those of the Triton kernel."""
    tiled = with_tma_descriptors(arguments, rows=("q", "k"))
    run_kernel(chunk_prepare_wy_kernel, (programs,), **tiled, num_warps=WARPS, maxnreg=REGISTERS)
