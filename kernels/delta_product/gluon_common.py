"""Parts of the Gluon kernel: where a chunk lies, the scalars of its rows, and the copies of its tiles."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

# What triton 3.6 calls thread_barrier.
barrier = getattr(gl, "barrier", None) or gl.thread_barrier

ROWS = gl.constexpr(64)  # sub-steps per chunk, and rows of every tile of q, o and k


@gluon.jit
def span(i_c, cu_seqlens, chunk_offsets, chunk_segment, T, NT, C: gl.constexpr, PACKED: gl.constexpr):
    """`triton_common.chunk_span`."""
    if PACKED:
        i_s = gl.load(chunk_segment + i_c)
        i_first = gl.load(chunk_offsets + i_s)
        i_start = gl.load(cu_seqlens + i_s).to(gl.int64) + (i_c - i_first).to(gl.int64) * C
        i_end = gl.load(cu_seqlens + i_s + 1).to(gl.int64)
    else:
        i_s = i_c // NT
        i_start = i_s.to(gl.int64) * T + (i_c - i_s * NT) * C
        i_end = (i_s + 1).to(gl.int64) * T
    return i_start, gl.minimum(i_end - i_start, C).to(gl.int32)


@gluon.jit
def rows_of(p, n_rows, stride, layout: gl.constexpr):
    """[64] scalars in fp32, zeros past `n_rows`."""
    o = gl.arange(0, ROWS, layout)
    return gl.load(p + o * stride, mask=o < n_rows, other=0.0)


@gluon.jit
def norms_of(p, n_rows, layout: gl.constexpr, L2NORM: gl.constexpr):
    """[64] reciprocal norms, 1 without normalisation; zeros past `n_rows`."""
    if L2NORM:
        return rows_of(p, n_rows, 1, layout)
    return gl.where(gl.arange(0, ROWS, layout) < n_rows, 1.0, 0.0)


@gluon.jit
def gates_of(p, n_t, N: gl.constexpr, layout: gl.constexpr):
    """[64] cumulative gates, one per N rows, zeros past the chunk."""
    o = gl.arange(0, ROWS, layout) // N
    return gl.load(p + o, mask=o < n_t, other=0.0)


@gluon.jit
def add2(a0, a1, b0, b1):
    return a0 + b0, a1 + b1


@gluon.jit
def add3(a0, a1, a2, b0, b1, b2):
    return a0 + b0, a1 + b1, a2 + b2


@gluon.jit
def load_scalars(
    beta, g, gc, rq, rk, i_m, n_m, i_t, n_t, i_h, n_total,
    H: gl.constexpr, N: gl.constexpr, layout: gl.constexpr, GATED: gl.constexpr, L2NORM: gl.constexpr,
):  # fmt: skip
    """Of a chunk's rows: beta, reciprocal norms of q and k, gates by sub-step, by token, last, and raw."""
    b_beta = rows_of(beta + i_m * H + i_h, n_m, H, layout)
    b_rk, b_rq, b_gm, b_gt, g_last, b_g = b_beta, b_beta, b_beta, b_beta, 0.0, b_beta
    if L2NORM:
        b_rk = rows_of(rk + i_h.to(gl.int64) * n_total * N + i_m, n_m, 1, layout)
        b_rq = rows_of(rq + i_h.to(gl.int64) * n_total + i_t, n_t, 1, layout)
    if GATED:
        p_g = gc + i_h.to(gl.int64) * n_total + i_t
        b_gm, b_gt = gates_of(p_g, n_t, N, layout), gates_of(p_g, n_t, 1, layout)
        g_last = gl.load(p_g + n_t - 1, mask=n_t > 0, other=0.0)
        b_g = rows_of(g + i_t * H + i_h, n_t, H, layout)
    return b_beta, b_rk, b_rq, b_gm, b_gt, g_last, b_g


@gluon.jit
def copy_pair(a, b, s_a, s_b, bar, i_a, i_b, i_column, pred, BYTES: gl.constexpr):
    """Tiles of two matrices, from the same column on; `bar` completes when BYTES have come."""
    mbarrier.expect(bar, BYTES, pred=pred)
    tma.async_copy_global_to_shared(a, [i_a, i_column], bar, s_a, pred=pred)
    tma.async_copy_global_to_shared(b, [i_b, i_column], bar, s_b, pred=pred)


@gluon.jit
def copy_values(errors, dv, do, m_e, m_dv, m_do, bars, buffer, i_m, i_t, i_column, pred, BYTES: gl.constexpr):
    """E, dV and dO of a chunk into the buffers of that number; barrier `buffer` completes with all three."""
    bar = bars.index(buffer)
    copy_pair(errors, dv, m_e.index(buffer), m_dv.index(buffer), bar, i_m, i_m, i_column, pred, BYTES)
    tma.async_copy_global_to_shared(do, [i_t, i_column], bar, m_do.index(buffer), pred=pred)
