"""Code shared by the two `chunk_bwd_qkg` kernels for Hopper: spans, gradients of scores, of beta and of
gates.

The formulas are in triton/chunk_bwd.py. Rows of scores [64, 64] are Householder steps of a chunk. Columns of
dA are also steps; those of dP are tokens. Scalars are [64], one per step or token. `table` is that of
`keep_scalars`; lines whose factors are no longer needed take sums. Products, sums and factors are fp32.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared

from fla_train.kernels.delta_product.hopper.common import (
    BETA,
    GM,
    GT,
    LEAST_GATE,
    QUERY,
    RAW,
    READ,
    RK,
    ROWS,
    RQ,
    WRITE,
    barrier,
    chunk_span,
)


@gluon.jit
def work_span(work, where, H: gl.constexpr, N: gl.constexpr, C: gl.constexpr, PACKED: gl.constexpr):
    """Return head, first token, tokens, and first rows of k and q of the `work`-th chunk and head.

    Rows are 32-bit numbers, which the copy engine takes. `where`: the kernel's cu_seqlens to NT.
    """
    i_t, n_t = chunk_span(work // H, *where, C, PACKED)
    return work % H, i_t, n_t, (i_t * N).to(gl.int32), i_t.to(gl.int32)


@gluon.jit
def add2(a0, a1, b0, b1):
    return a0 + b0, a1 + b1


@gluon.jit
def add3(a0, a1, a2, b0, b1, b2):
    return a0 + b0, a1 + b1, a2 + b2


@gluon.jit
def by_state(b_dk, b_y, b_dq, s_k, s_q, write, read, query, beta, LAYOUT: gl.constexpr):
    """Return the terms of dk and dq that contain the state, and the row sums that beta, gates and norms need.

    Args:
        b_dk: u dS'; b_y: dV S; b_dq: dO S, each [64, columns], of some key channels or of all.
        s_k: k; s_q: q, of the same channels.
        write, read, query, beta: factors of the rows.

    Returns:
        dk and dq [64, columns]; k . dk of the write to the state, k . dk of the read of it, q . dq.
    """
    b_x = s_k.load(LAYOUT).to(gl.float32)
    kw, kr, qr = gl.reduce((b_x * b_dk, b_x * b_y, s_q.load(LAYOUT).to(gl.float32) * b_dq), 1, add3)
    b_dk = b_dk * (write * beta)[:, None] - b_y * read[:, None]
    return b_dk, b_dq * query[:, None], kw * write, -kr * read, qr * query


@gluon.jit
def score_gradients(
    b_da, b_dp, s_da, s_dp, table, n_m, n_t, scale, N: gl.constexpr, GATED: gl.constexpr, LAYOUT: gl.constexpr
):
    """Return dA' and dP' [64, 64] without beta, from dV u^T and u dO^T; store them with beta as operands."""
    ROW: gl.constexpr = gl.SliceLayout(1, LAYOUT)
    COLUMN: gl.constexpr = gl.SliceLayout(0, LAYOUT)
    o_r, o_c = gl.arange(0, ROWS, ROW), gl.arange(0, ROWS, COLUMN)
    seen = ((o_r // N)[:, None] <= o_c[None, :]) & (o_c < n_t)[None, :]
    lower = (o_r[:, None] > o_c[None, :]) & (o_r < n_m)[:, None]
    rk_r = table[RK].load(ROW)
    b_dp *= rk_r[:, None] * (table[RQ].load(COLUMN) * scale)[None, :]
    b_da *= -rk_r[:, None] * table[RK].load(COLUMN)[None, :]
    if GATED:
        gm_r, gm_c, gt_c = table[GM].load(ROW), table[GM].load(COLUMN), table[GT].load(COLUMN)
        b_dp *= gl.exp2(gl.where(seen, gt_c[None, :] - gm_r[:, None], 0.0))
        b_da *= gl.exp2(gl.where(lower, gm_r[:, None] - gm_c[None, :], 0.0))
    b_da, b_dp = gl.where(lower, b_da, 0.0), gl.where(seen, b_dp, 0.0)
    beta_r, beta_c = table[BETA].load(ROW), table[BETA].load(COLUMN)
    s_dp.store((b_dp * beta_r[:, None]).to(s_dp.dtype))
    s_da.store((b_da * beta_c[None, :]).to(s_da.dtype))
    fence_async_shared()
    return b_da, b_dp


@gluon.jit
def score_sums(b_da, b_dp, b_kk, b_kq, table, LAYOUT: gl.constexpr, WROW: gl.constexpr):
    """Return row and column sums of dA .* A and dP .* P: what dbeta takes of them, k . dk and q . dq.

    Writes to the lines READ and QUERY. Contains a barrier.

    Args:
        b_da, b_dp: as `score_gradients` returns them; b_kk: K K^T; b_kq: K Q^T.
    """
    ROW: gl.constexpr = gl.SliceLayout(1, LAYOUT)
    beta_r, beta_c = table[BETA].load(ROW), table[BETA].load(gl.SliceLayout(0, LAYOUT))
    b_dp *= b_kq  # dP .* P
    b_da *= b_kk  # dA .* A
    inner, kp = gl.reduce((b_dp, b_da * beta_c[None, :]), 1, add2)
    columns, qp = gl.reduce((b_da, b_dp * beta_r[:, None]), 0, add2)
    table[READ].store(columns)
    table[QUERY].store(qp)
    barrier()
    inner += table[READ].load(ROW)
    return inner, kp + inner * beta_r, table[QUERY].load(WROW)


@gluon.jit
def store_scalar_gradients(
    dbeta, dg, table, kw, kr, qr, inner, kp, qp, b_ss, g_last, i_m, n_m, i_t, n_t, i_h,
    H: gl.constexpr, N: gl.constexpr, GATED: gl.constexpr, LAYOUT: gl.constexpr,
):  # fmt: skip
    """Compute dbeta and dg of a chunk and store them. Writes to the lines GM, WRITE and GT.

    Args:
        kw, kr, qr: sums of `by_state`; inner, kp, qp: those of `score_sums`.
        b_ss: the sum of S .* dS'.
    """
    ROW: gl.constexpr = gl.SliceLayout(1, LAYOUT)
    COLUMN: gl.constexpr = gl.SliceLayout(0, LAYOUT)
    o_r, o_c = gl.arange(0, ROWS, ROW), gl.arange(0, ROWS, COLUMN)
    gl.store(dbeta + (i_m + o_r) * H + i_h, kw + inner, mask=o_r < n_m)
    if GATED:
        # k that reads the state raises the gates up to its token, a write those after it.
        beta_r = table[BETA].load(ROW)
        table[GM].store(kr + kp - 2.0 * inner * beta_r)
        table[WRITE].store(kw * beta_r)
        table[GT].store(qr + qp)
        barrier()
        rises, later = table[GM].load(COLUMN), table[WRITE].load(COLUMN)
        tokens = table[GT].load(COLUMN)
        if N == 1:
            sums = gl.where(o_c[None, :] >= o_r[:, None], (rises + tokens)[None, :], later[None, :])
        else:
            sums = gl.where((o_c // N)[None, :] >= o_r[:, None], rises[None, :], later[None, :])
            sums += gl.where(o_c[None, :] >= o_r[:, None], tokens[None, :], 0.0)
        b_dg = gl.sum(sums, 1) + b_ss * gl.exp2(g_last)
        p_dg = dg + (i_t + o_r) * H + i_h
        gl.store(p_dg, gl.where(table[RAW].load(ROW) > LEAST_GATE, b_dg, 0.0), mask=o_r < n_t)


@gluon.jit
def norm_parts(table, kw, kr, kp, qr, qp, ROW: gl.constexpr, WROW: gl.constexpr):
    """Return the multiples of k and of q [64] that the gradient of the L2 norm subtracts from dk and dq.

    With r = rsqrt(x . x + eps) and y = r * d(x r), the gradient is dx = y - r^2 (x . y) x. This returns
    r^2 (x . y).
    """
    rk, rq = table[RK].load(ROW), table[RQ].load(WROW)
    of_k = rk * rk * (kr + kw * table[BETA].load(ROW) + kp)
    return gl.convert_layout(of_k, WROW), rq * rq * (qr + qp)
