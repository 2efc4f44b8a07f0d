"""Parts of `chunk_bwd_qkg_kernel` for Hopper: what of a chunk lies between its own tokens, and its scalars.

The formulas are in triton/chunk_bwd.py. Rows and columns of scores are Householder steps of a chunk (of dP's
columns: tokens). `table` is that of `keep_scalars`; some lines take sums once their factors are used up.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

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
)


@gluon.jit
def add2(a0, a1, b0, b1):
    return a0 + b0, a1 + b1


@gluon.jit
def add3(a0, a1, a2, b0, b1, b2):
    return a0 + b0, a1 + b1, a2 + b2


@gluon.jit
def by_state(b_dk, b_y, b_dq, s_k, s_q, write, read, query, beta, LAYOUT: gl.constexpr):
    """dk and dq by way of the state, and of their parts k . dk (written and read) and q . dq; all in fp32.

    Of u dS'^T, dV S^T and dO S^T, some columns of them at a time, with the same columns of k and q.
    """
    b_x = s_k.load(LAYOUT).to(gl.float32)
    kw, kr, qr = gl.reduce((b_x * b_dk, b_x * b_y, s_q.load(LAYOUT).to(gl.float32) * b_dq), 1, add3)
    b_dk = b_dk * (write * beta)[:, None] - b_y * read[:, None]
    return b_dk, b_dq * query[:, None], kw * write, -kr * read, qr * query


@gluon.jit
def score_gradients(
    b_da, b_dp, table, n_m, n_t, scale, N: gl.constexpr, GATED: gl.constexpr, LAYOUT: gl.constexpr
):
    """dA' and dP' [64, 64] without beta, of dV u^T and u dO^T."""
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
    return gl.where(lower, b_da, 0.0), gl.where(seen, b_dp, 0.0)


@gluon.jit
def score_sums(b_da, b_dp, b_kk, b_kq, table, LAYOUT: gl.constexpr, WROW: gl.constexpr):
    """What beta takes of the scores, and the inner products k . dk and q . dq by way of them [64].

    Writes to the lines READ and QUERY, and has all threads meet.
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
    """dbeta and dg of a chunk; `b_ss` is the sum of S .* dS'. Writes to the lines GM, WRITE and GT."""
    ROW: gl.constexpr = gl.SliceLayout(1, LAYOUT)
    COLUMN: gl.constexpr = gl.SliceLayout(0, LAYOUT)
    o_r, o_c = gl.arange(0, ROWS, ROW), gl.arange(0, ROWS, COLUMN)
    gl.store(dbeta + (i_m + o_r) * H + i_h, kw + inner, mask=o_r < n_m)
    if GATED:
        # k that reads the state raises the gates up to its token, what is written those after it.
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
