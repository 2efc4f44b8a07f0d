"""The scalars of a chunk's rows in shared memory, for the Gluon `gradient_kernel` and `reverse_kernel`.

Loaded a chunk ahead, a number a thread, and read from there in whatever layout a product needs them: columns
of a matrix product's layout, loaded from device memory, took half of a chunk's time (docs/kernels.md).
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from fla_train.kernels.delta_product.hopper.common import FLAT, ROWS, rows_of

# Lines of a table: beta, reciprocal norms; factors of k where it reads a state and where it is written, and
# of q; cumulative gates by sub-step and by token, and the gates as given. Without gates the last three are
# not filled. The former puts its sums into lines that it has done with.
BETA, RK, RQ, READ, WRITE, QUERY, GM, GT, RAW = (gl.constexpr(i) for i in range(9))


@gluon.jit
def make_table():
    """Nine lines of 64; of one array the compiler would have each store wait for the one before."""
    return (
        gl.allocate_shared_memory(gl.float32, [ROWS], FLAT),
        gl.allocate_shared_memory(gl.float32, [ROWS], FLAT),
        gl.allocate_shared_memory(gl.float32, [ROWS], FLAT),
        gl.allocate_shared_memory(gl.float32, [ROWS], FLAT),
        gl.allocate_shared_memory(gl.float32, [ROWS], FLAT),
        gl.allocate_shared_memory(gl.float32, [ROWS], FLAT),
        gl.allocate_shared_memory(gl.float32, [ROWS], FLAT),
        gl.allocate_shared_memory(gl.float32, [ROWS], FLAT),
        gl.allocate_shared_memory(gl.float32, [ROWS], FLAT),
    )


@gluon.jit
def gates_of(p, n_t, g_last, N: gl.constexpr, layout: gl.constexpr):
    """[64] cumulative gates, one per N rows; past the chunk the last one, so that no decay is infinite."""
    o = gl.arange(0, ROWS, layout) // N
    return gl.load(p + o, mask=o < n_t, other=g_last)


@gluon.jit
def fetch_scalars(
    beta, g, gc, rq, rk, i_t, n_t, i_h, n_total,
    H: gl.constexpr, N: gl.constexpr, GATED: gl.constexpr, L2NORM: gl.constexpr, num_warps: gl.constexpr,
):  # fmt: skip
    """Of a chunk's rows: beta, reciprocal norms of k and q, gates by sub-step, by token, last, and raw."""
    LINE: gl.constexpr = gl.BlockedLayout([1], [32], [num_warps], [0])
    i_m, n_m = i_t * N, n_t * N
    b_beta = rows_of(beta + i_m * H + i_h, n_m, H, LINE)
    if L2NORM:
        b_rk = rows_of(rk + i_h.to(gl.int64) * n_total * N + i_m, n_m, 1, LINE)
        b_rq = rows_of(rq + i_h.to(gl.int64) * n_total + i_t, n_t, 1, LINE)
    else:
        o = gl.arange(0, ROWS, LINE)
        b_rk, b_rq = gl.where(o < n_m, 1.0, 0.0), gl.where(o < n_t, 1.0, 0.0)
    b_gm, b_gt, g_last, b_g = b_beta, b_beta, 0.0, b_beta
    if GATED:
        p_g = gc + i_h.to(gl.int64) * n_total + i_t
        g_last = gl.load(p_g + n_t - 1, mask=n_t > 0, other=0.0)
        b_gm, b_gt = gates_of(p_g, n_t, g_last, N, LINE), gates_of(p_g, n_t, g_last, 1, LINE)
        b_g = rows_of(g + i_t * H + i_h, n_t, H, LINE)
    return b_beta, b_rk, b_rq, b_gm, b_gt, g_last, b_g


@gluon.jit
def keep_scalars(table, scalars, scale, GATED: gl.constexpr):
    """Write what `fetch_scalars` returned, and the factors made of it."""
    b_beta, b_rk, b_rq, b_gm, b_gt, g_last, b_g = scalars
    table[BETA].store(b_beta)
    table[RK].store(b_rk)
    table[RQ].store(b_rq)
    if GATED:
        table[READ].store(b_rk * gl.exp2(b_gm))
        table[WRITE].store(b_rk * gl.exp2(g_last - b_gm))
        table[QUERY].store(b_rq * scale * gl.exp2(b_gt))
        table[GM].store(b_gm)
        table[GT].store(b_gt)
        table[RAW].store(b_g)
    else:
        table[READ].store(b_rk)
        table[WRITE].store(b_rk)
        table[QUERY].store(b_rq * scale)
