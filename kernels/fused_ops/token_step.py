"""Fused ops of a decoding step, Triton only: linear layers of one token, and the linear mixer between them.

A step of one token reads every weight and state once and computes little. So it takes as long as these reads,
plus some microseconds per kernel. `linear_step` runs several linear layers on the same tokens in one kernel.
For one sequence this kernel also adds the residual and applies RMSNorm; for several a kernel before it does.
`mixer_step` computes everything between the projections of a linear layer (convolutions, gates, recurrence,
gated output norm) and updates the states in place.
"""

from collections.abc import Mapping, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from fla_train.kernels.cached_launch import run_kernel
from fla_train.kernels.delta_product.recurrent import L2NORM_EPS
from fla_train.kernels.fused_ops.gates import softplus
from fla_train.kernels.optional_triton import tl, triton
from fla_train.kernels.sizes import ceil_div, next_power_of_2, processors

MAX_WEIGHTS = 6  # limit of `linear_step`
MAX_STATE = 32768  # elements of a head's state in `mixer_step`: 128 registers of each of 256 threads
MAX_TOKENS = 64  # limit per program of `linear_step`


def linear_step(
    x: Tensor,
    *weights: Tensor,
    residual: Tensor | None = None,
    norm: Tensor | None = None,
    eps: float = 0.0,
    swiglu: bool = False,
    in_parts: bool = False,
) -> tuple[Tensor, Tensor]:
    """Return the outputs of linear layers on rmsnorm(x + residual), side by side.

    Args:
        x: one token of each of B sequences, [B, 1, D], contiguous; or with a residual its parts (see below).
        weights: [rows, D] each, contiguous, in the dtype of `x`; at most six.
        residual: [B, 1, D], only with a norm.
        norm: weight of the RMSNorm [D]; None: no norm.
        swiglu: silu(x weights[0]^T) * (x weights[1]^T) instead; both have as many rows.
        in_parts: without a norm, return partial sums, which `merge` or a step with a residual adds up. A
            small product keeps the whole GPU busy only if several programs share a sum.

    Returns:
        y [B, 1, sum of rows] and x + residual [B, 1, D] (x without a residual). In parts y is
        [P, B, 1, sum of rows] in fp32, or as without for one sequence.
    """
    (tokens, _, size), rows = x.shape[-3:], [len(weight) for weight in weights]
    if tokens > 1 and norm is not None:
        y, total = _norm_step(x, residual, norm, eps)
        return linear_step(y, *weights, swiglu=swiglu)[0], total
    in_parts &= tokens > 1
    if tokens > 1 and len(weights) == 1 and not in_parts:
        return F.linear(x, weights[0]), x
    if swiglu:
        rows = rows[:1]
    total = x if residual is None else torch.empty_like(x)
    block_tokens, block_rows, block = step_tile(x, 1 + swiglu)
    overlap = overlaps(x)
    programs, blocks, parts = sum(ceil_div(n, block_rows) for n in rows), ceil_div(size, block), 1
    if in_parts:
        parts = min(blocks, max(1, processors(x.device) // programs))
        parts = ceil_div(blocks, ceil_div(blocks, parts))  # none is empty
        y = x.new_empty(parts, tokens, 1, sum(rows), dtype=torch.float32)
    else:
        y = x.new_empty(tokens, 1, sum(rows))
    unused = MAX_WEIGHTS - len(weights)
    pointers = {f"w{i}": weight for i, weight in enumerate((*weights, *weights[:1] * unused))}
    sizes = {f"R{i}": n for i, n in enumerate((*rows, *[0] * (MAX_WEIGHTS - len(rows))))}
    with torch.cuda.device_of(x):
        run_kernel(
            linear_step_kernel, (programs, ceil_div(tokens, block_tokens), parts),
            x=x, residual=residual, norm=norm, total=total, y=y, M=tokens, eps=eps, **pointers, **sizes,
            D=size, ROWS=sum(rows), BM=block_tokens, BR=block_rows, BD=block, SWIGLU=swiglu,
            PART=block * ceil_div(blocks, parts), OVERLAP=overlap, launch_pdl=overlap, num_warps=4,
            num_stages=3,
        )  # fmt: skip
    return y, total


def merge(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Sum parts [P, B, 1, D] of `linear_step` to [B, 1, D] in `dtype`; return anything else as it is."""
    return x.sum(0).to(dtype) if x.dim() == 4 else x


def _norm_step(x: Tensor, residual: Tensor | None, norm: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Return rmsnorm(x + residual) and that sum, [B, 1, D] each; with a residual `x` may come in parts."""
    tokens, _, size = x.shape[-3:]
    total = x if residual is None else torch.empty_like(residual)
    y, overlap = torch.empty_like(total), overlaps(x)
    with torch.cuda.device_of(x):
        run_kernel(
            norm_step_kernel, (tokens,), x=x, residual=residual, norm=norm, total=total, y=y, M=tokens,
            eps=eps, P=len(x) if x.dim() == 4 else 1, D=size, BD=next_power_of_2(size), OVERLAP=overlap,
            launch_pdl=overlap, num_warps=4,
        )  # fmt: skip
    return y, total


def mixer_step(
    y: Tensor,
    columns: Mapping[str, int],
    weights: Sequence[Tensor | None],
    conv_states: Sequence[Tensor | None],
    A_log: Tensor | None,
    dt_bias: Tensor | None,
    norm: Tensor,
    state: Tensor,
    *,
    num_householder: int,
    beta_max: float,
    eps: float,
) -> Tensor:
    """Compute the input of the output projection from the other projections of one token.

    The states are updated in place.

    Args:
        y: [B, 1, rows], the projections side by side.
        columns: first row of each projection: q, k, v, b, and a with a forget gate, g with an output gate.
        weights: [channels, 1, W] of the convolutions of q, k and v, W <= 4; None: no convolutions.
        conv_states: their last inputs, [B, channels, W-1].
        A_log, dt_bias: [H], or None without a forget gate.
        norm: weight of the output norm [V].
        state: [B, H, K, V].

    Returns:
        [B, 1, H V] in the dtype of `y`.
    """
    batch, heads, key_dim, value_dim = state.shape
    o = y.new_empty(batch, 1, heads * value_dim)
    key_tile, value_tile, tiles = next_power_of_2(key_dim), next_power_of_2(value_dim), 1
    if batch * heads > processors(y.device) and value_tile >= 32:
        value_tile, tiles = value_tile // 2, 2  # smaller programs, which all run at once
    # 128 elements of the state for each thread; more warps would load each channel several times.
    warps = min(8, max(1, value_tile // 32, key_tile * value_tile // 4096))
    starts = {f"C{name.upper()}": columns.get(name, -1) for name in "qkvbag"}
    overlap = overlaps(y)
    with torch.cuda.device_of(y):
        run_kernel(
            mixer_step_kernel, (batch * heads,),
            y=y, wq=weights[0], wk=weights[1], wv=weights[2],
            sq=conv_states[0], sk=conv_states[1], sv=conv_states[2],
            A_log=A_log, dt_bias=dt_bias, norm=norm, state=state, o=o,
            beta_max=float(beta_max), scale=key_dim**-0.5, l2_eps=L2NORM_EPS, eps=eps,
            **starts, ROWS=y.shape[-1], H=heads, K=key_dim, V=value_dim, N=num_householder,
            W=1 if weights[0] is None else weights[0].shape[-1], BK=key_tile, BV=value_tile,
            BT=tiles, OVERLAP=overlap, launch_pdl=overlap, num_warps=warps,
        )  # fmt: skip
    return o


def overlaps(x: Tensor) -> bool:
    """Return whether kernels start before the one ahead has ended (programmatic dependent launch, CUDA).

    Before it waits for that one's end it may read only tensors that no kernel of this step writes, such as
    weights.
    """
    return x.is_cuda and torch.cuda.get_device_capability(x.device) >= (9, 0)


def step_tile(x: Tensor, width: int) -> tuple[int, int, int]:
    """Return tokens, rows and channels of a program of `linear_step`, which reads `width` weights per row."""
    tokens, _, size = x.shape
    if tokens == 1:  # all of a program's loads at once, and all programs at once
        block = min(4096, next_power_of_2(size))
        return 1, max(1, 8192 // (block * width)), block
    # Each program reads all tokens again, from the L2 cache. Sizes by their times on an H100.
    return (min(MAX_TOKENS, max(16, next_power_of_2(tokens))), 64 // width, 512 // x.element_size())


@triton.jit
def select_weight(i, weights, rows, BR: tl.constexpr):
    """Return program i's weight, its number of rows, the first of its rows, the column of its row 0."""
    w, n, start, column = weights[0], rows[0], 0, 0
    next_start, next_column = 0, 0
    for j in tl.static_range(1, len(rows)):
        next_start += (rows[j - 1] + BR - 1) // BR
        next_column += rows[j - 1]
        if rows[j] > 0:
            if i >= next_start:
                w, n, start, column = weights[j], rows[j], next_start, next_column
    return w, n, (i - start) * BR, column


@triton.jit(do_not_specialize=["M"])
def linear_step_kernel(
    x, residual, norm, total, w0, w1, w2, w3, w4, w5,  # [M, D], the same, [D], out [M, D], [rows, D] each
    y, M, eps,  # out [parts, M, ROWS]
    R0: tl.constexpr, R1: tl.constexpr, R2: tl.constexpr, R3: tl.constexpr, R4: tl.constexpr,
    R5: tl.constexpr, D: tl.constexpr, ROWS: tl.constexpr, BM: tl.constexpr, BR: tl.constexpr,
    BD: tl.constexpr, PART: tl.constexpr, SWIGLU: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Multiply BR rows of one weight with BM tokens, and PART of the D channels: a part of the sum.

    The factor 1 / rms of a token is applied to the products; a norm needs all channels.
    """
    weights, rows = (w0, w1, w2, w3, w4, w5), (R0, R1, R2, R3, R4, R5)
    w, n, i_row, i_column = select_weight(tl.program_id(0), weights, rows, BR)
    o_m, o_r = tl.program_id(1) * BM + tl.arange(0, BM), i_row + tl.arange(0, BR)
    m_m, m_r = o_m < M, o_r < n
    b_squares = tl.zeros([BM], tl.float32)
    b_y = tl.zeros([BR, BD if BM == 1 else BM], tl.float32)
    b_up = tl.zeros([BR, BD if BM == 1 else BM], tl.float32)
    if OVERLAP and BM > 1:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    i_d = 0
    if PART < D:
        i_d = tl.program_id(2) * PART
        y += tl.program_id(2).to(tl.int64) * M * ROWS
    for i in range(0, PART, BD):
        o_d = i_d + i + tl.arange(0, BD)
        m_x, m_w = m_m[:, None] & (o_d < D)[None, :], m_r[:, None] & (o_d < D)[None, :]
        p_x, p_w = o_m[:, None] * D + o_d[None, :], o_r[:, None] * D + o_d[None, :]
        b_w = tl.load(w + p_w, mask=m_w, other=0.0)
        if SWIGLU:
            b_w_up = tl.load(w1 + p_w, mask=m_w, other=0.0)
        if OVERLAP and BM == 1:  # behind the loads of the weights; only the first call waits
            tl.extra.cuda.gdc_wait()
            tl.extra.cuda.gdc_launch_dependents()
        b_x = tl.load(x + p_x, mask=m_x, other=0.0)
        if residual is not None:
            b_x = b_x.to(tl.float32) + tl.load(residual + p_x, mask=m_x, other=0.0).to(tl.float32)
            b_x = b_x.to(total.dtype.element_ty)
            if tl.program_id(0) == 0:
                tl.store(total + p_x, b_x, mask=m_x)
        if norm is not None:
            b_wide = b_x.to(tl.float32)
            b_squares += tl.sum(b_wide * b_wide, 1)
            b_norm = tl.load(norm + o_d, mask=o_d < D, other=0.0).to(tl.float32)
            b_x = b_wide * b_norm[None, :]
        if BM == 1:
            b_y += b_w.to(tl.float32) * b_x.to(tl.float32)
            if SWIGLU:
                b_up += b_w_up.to(tl.float32) * b_x.to(tl.float32)
        else:
            b_y = tl.dot(b_w, tl.trans(b_x.to(b_w.dtype)), b_y, input_precision="ieee")
            if SWIGLU:
                b_up = tl.dot(b_w_up, tl.trans(b_x.to(b_w.dtype)), b_up, input_precision="ieee")
    if BM == 1:
        b_y = tl.sum(b_y, 1)[:, None]
        b_up = tl.sum(b_up, 1)[:, None]
    if norm is not None:
        b_rstd = tl.rsqrt(b_squares / D + eps)
        b_y *= b_rstd[None, :]
        b_up *= b_rstd[None, :]
    if SWIGLU:
        b_y *= tl.sigmoid(b_y) * b_up
    p_y = o_m[None, :] * ROWS + (i_column + o_r)[:, None]
    tl.store(y + p_y, b_y.to(y.dtype.element_ty), mask=m_r[:, None] & m_m[None, :])


@triton.jit(do_not_specialize=["M"])
def norm_step_kernel(
    x, residual, norm, total, y,  # [P, M, D], [M, D], [D], out [M, D], out [M, D]
    M, eps, P: tl.constexpr, D: tl.constexpr, BD: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Norm one token."""
    o_d = tl.arange(0, BD)
    m_d, p_x = o_d < D, tl.program_id(0) * D + o_d
    b_norm = tl.load(norm + o_d, mask=m_d, other=0.0).to(tl.float32)
    if OVERLAP:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    b_x = tl.load(x + p_x, mask=m_d, other=0.0).to(tl.float32)
    for i in tl.static_range(1, P):
        b_x += tl.load(x + i * M * D + p_x, mask=m_d, other=0.0).to(tl.float32)
    if residual is not None:
        b_x += tl.load(residual + p_x, mask=m_d, other=0.0).to(tl.float32)
        tl.store(total + p_x, b_x.to(total.dtype.element_ty), mask=m_d)
        b_x = b_x.to(total.dtype.element_ty).to(tl.float32)
    b_y = b_x * tl.rsqrt(tl.sum(b_x * b_x, 0) / D + eps) * b_norm
    tl.store(y + p_x, b_y.to(y.dtype.element_ty), mask=m_d)


@triton.jit
def convolve_token(y, weight, state, o_c, mask, W: tl.constexpr):
    """Return silu of the convolution at channels `o_c`, and the state after it, a tuple, oldest first.

    `y` and `state` point at the sequence's.
    """
    b_new = tl.load(y + o_c, mask=mask, other=0.0)
    b_x, inputs = b_new.to(tl.float32), ()
    if W > 1:
        p_s, p_w = state + o_c * (W - 1), weight + o_c * W
        b_x *= tl.load(p_w + W - 1, mask=mask, other=0.0).to(tl.float32)
        for i in tl.static_range(W - 1):
            inputs += (tl.load(p_s + i, mask=mask, other=0.0),)
        for i in tl.static_range(W - 1):
            b_x += inputs[i].to(tl.float32) * tl.load(p_w + i, mask=mask, other=0.0).to(tl.float32)
    inputs += (b_new,)
    return (b_x * tl.sigmoid(b_x)).to(y.dtype.element_ty).to(tl.float32), inputs[1:]


@triton.jit
def keep_inputs(state, o_c, mask, inputs):
    """Store what `convolve_token` returned, behind a barrier: several threads may have loaded a channel."""
    for i in tl.static_range(len(inputs)):
        tl.store(state + o_c * len(inputs) + i, inputs[i].to(state.dtype.element_ty), mask=mask)


@triton.jit
def normalised(b_x, eps):
    return b_x * tl.rsqrt(tl.sum(b_x * b_x, 0) + eps)


@triton.jit
def mixer_step_kernel(
    y, wq, wk, wv, sq, sk, sv,  # [B, ROWS]; [channels, W] and [B, channels, W - 1] of q, k, v
    A_log, dt_bias, norm, state, o,  # [H], [H], [V], [B, H, K, V], out [B, H, V]
    beta_max, scale, l2_eps, eps,
    CQ: tl.constexpr, CK: tl.constexpr, CV: tl.constexpr, CB: tl.constexpr, CA: tl.constexpr,
    CG: tl.constexpr, ROWS: tl.constexpr, H: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
    N: tl.constexpr, W: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, BT: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    """Mix one head of one sequence, BV of its values at a time."""
    i_bh = tl.program_id(0).to(tl.int64)
    i_b, i_h = i_bh // H, i_bh % H
    o_k, o_v, o_t = tl.arange(0, BK), tl.arange(0, BV), tl.arange(0, BT)
    m_k, c_q = o_k < K, i_h * K + o_k
    p_s = state + i_bh * K * V + o_k[:, None] * V + o_v[None, :]
    b_s = tl.load(p_s, mask=m_k[:, None] & (o_v < V)[None, :], other=0.0)
    if OVERLAP:  # the state is of the step before, which had ended when this step's embedding began
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    y += i_b * ROWS
    if W > 1:
        sq += i_b * H * K * (W - 1)
        sk += i_b * N * H * K * (W - 1)
        sv += i_b * N * H * V * (W - 1)
    b_q, q_inputs = convolve_token(y + CQ, wq, sq, c_q, m_k, W)
    ks, betas = (), ()
    for j in tl.static_range(N):
        ks += (convolve_token(y + CK, wk, sk, (j * H + i_h) * K + o_k, m_k, W),)
        betas += (beta_max * tl.sigmoid(tl.load(y + CB + j * H + i_h).to(tl.float32)),)
    b_decay = 1.0
    if A_log is not None:
        b_a = tl.load(y + CA + i_h).to(tl.float32) + tl.load(dt_bias + i_h).to(tl.float32)
        b_decay = tl.exp(-tl.exp(tl.load(A_log + i_h).to(tl.float32)) * softplus(b_a))
    tl.debug_barrier()
    keep_inputs(sq, c_q, m_k, q_inputs)
    for j in tl.static_range(N):
        keep_inputs(sk, (j * H + i_h) * K + o_k, m_k, ks[j][1])
    b_q = normalised(b_q, l2_eps) * scale
    b_o = tl.zeros([BT, BV], tl.float32)
    for t in tl.static_range(BT):
        if t > 0:
            o_v += BV
            b_s = tl.load(p_s + t * BV, mask=m_k[:, None] & (o_v < V)[None, :], other=0.0)
        m_v = o_v < V
        b_s = b_s.to(tl.float32) * b_decay
        vs = ()
        for j in tl.static_range(N):
            vs += (convolve_token(y + CV, wv, sv, (j * H + i_h) * V + o_v, m_v, W),)
        tl.debug_barrier()
        for j in tl.static_range(N):
            keep_inputs(sv, (j * H + i_h) * V + o_v, m_v, vs[j][1])
            b_k = normalised(ks[j][0], l2_eps)
            b_u = betas[j] * (vs[j][0] - tl.sum(b_s * b_k[:, None], 0))
            b_s += b_k[:, None] * b_u[None, :]
        tl.store(p_s + t * BV, b_s.to(state.dtype.element_ty), mask=m_k[:, None] & m_v[None, :])
        b_o = tl.where(o_t[:, None] == t, tl.sum(b_s * b_q[:, None], 0)[None, :], b_o)
    b_o = b_o.to(o.dtype.element_ty).to(tl.float32)
    o_v = o_t[:, None] * BV + tl.arange(0, BV)[None, :]
    m_v = o_v < V
    b_o *= tl.rsqrt(tl.sum(tl.sum(b_o * b_o, 1), 0) / V + eps)
    b_o *= tl.load(norm + o_v, mask=m_v, other=0.0).to(tl.float32)
    if CG >= 0:
        b_gate = tl.load(y + CG + i_h * V + o_v, mask=m_v, other=0.0).to(tl.float32)
        b_o *= b_gate * tl.sigmoid(b_gate)
    tl.store(o + i_bh * V + o_v, b_o.to(o.dtype.element_ty), mask=m_v)
