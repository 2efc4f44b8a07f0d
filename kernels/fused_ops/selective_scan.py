"""Mamba's selective scan (arXiv 2312.00752, section 3.2): PyTorch definition and Triton kernels.

Every channel d has a state of N numbers with a diagonal transition, and c_t reads it:

    h_t = a_t h_(t-1) + dt_t u_t b_t        a_t = exp(-dt_t rate)        y_t = h_t . c_t

or a_t = 2 exp(-dt_t rate) - 1, with eigenvalues in [-1, 1] (arXiv 2411.12537, table 2). Products of such
transitions cannot be taken in log space, so the scan multiplies them out, token after token.

The definition has the states of all tokens in memory, [B, T, D, N]. The kernels keep a channel's state in
registers. Their forward pass stores one state in SPAN tokens, and from it the backward pass computes the
others of these tokens again, into a buffer of SPAN states for each sequence and channel.
"""

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from fla_train.kernels.custom_op import custom_op
from fla_train.kernels.fused_ops.backend import resolve_backend, without_autocast
from fla_train.kernels.optional_triton import tl, triton
from fla_train.kernels.sizes import ceil_div, next_power_of_2

SPAN = 32  # tokens from one stored state to the next
STAGES = tl.constexpr(4)  # stages of loops over tokens; 1 would wait for each load; 8: 12% slower (H100)
TILE = 512  # elements of the states of a program, which is one warp
MAX_STATE = 64  # beyond, parts of the gradients of b and c would be as large as the states


def selective_scan(
    u: Tensor, dt: Tensor, rate: Tensor, b: Tensor, c: Tensor, *, signed: bool = False, backend: str = "auto"
) -> Tensor:
    """Return y [B, T, D] from zero states, differentiable in all inputs.

    Args:
        u, dt: input and time step, [B, T, D].
        rate: factor of the time step, [D, N], -A of the paper.
        b, c: what writes and reads the states, [B, T, N]. All inputs have one dtype.
        signed: eigenvalues in [-1, 1] in place of [0, 1].
        backend: "torch", "triton" or "auto" (see `resolve_backend`). Triton takes fp32 and N up to 64.

    Raises:
        ValueError: a backend that is unknown or cannot run.
    """
    (batch, tokens, channels), size = u.shape, rate.shape[1]
    assert dt.shape == u.shape and len(rate) == channels and b.shape == c.shape == (batch, tokens, size)
    assert dt.dtype == rate.dtype == b.dtype == c.dtype == u.dtype
    limit = None
    if u.dtype != torch.float32:
        limit = f"takes float32 only, not {u.dtype}"
    elif size > MAX_STATE:
        limit = f"takes states of at most {MAX_STATE} numbers a channel"
    if resolve_backend(backend, u, limit) == "triton":
        return _SelectiveScan.apply(u, dt, rate, b, c, signed, torch.is_grad_enabled())
    with without_autocast(u):
        decay = torch.exp(dt[..., None] * -rate)
        states = _LinearScan.apply(2 * decay - 1 if signed else decay, (dt * u)[..., None] * b[..., None, :])
        return torch.einsum("btdn,btn->btd", states, c)


class _LinearScan(torch.autograd.Function):
    """h_t = a_t h_(t-1) + x_t over axis 1. Backwards dh_t = dy_t + a_(t+1) dh_(t+1), da_t = dh_t h_(t-1)."""

    @staticmethod
    def forward(ctx, a: Tensor, x: Tensor) -> Tensor:
        h = x.clone()
        state = x.new_zeros(x.shape[0], *x.shape[2:])
        for t in range(x.shape[1]):
            state = h[:, t].addcmul_(a[:, t], state)
        ctx.save_for_backward(a, h)
        return h

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor) -> tuple[Tensor, Tensor]:
        a, h = ctx.saved_tensors
        dx = grad.clone()
        slope = grad.new_zeros(grad.shape[0], *grad.shape[2:])
        for t in reversed(range(h.shape[1])):
            following = a[:, t + 1] if t + 1 < h.shape[1] else torch.zeros_like(slope)
            slope = dx[:, t].addcmul_(following, slope)
        da = torch.zeros_like(a)
        da[:, 1:].addcmul_(dx[:, 1:], h[:, :-1])
        return da, dx


class _SelectiveScan(torch.autograd.Function):
    @staticmethod
    def forward(ctx, u, dt, rate, b, c, signed, with_gradients):
        u, dt, rate, b, c = (x.contiguous() for x in (u, dt, rate, b, c))
        (batch, tokens, _), y = u.shape, torch.empty_like(u)
        spans = ceil_div(tokens, SPAN) if with_gradients and any(ctx.needs_input_grad) else 0
        states = u.new_empty(batch, spans, *rate.shape)
        scan_forward(u, dt, rate, b, c, y, states, signed)
        ctx.save_for_backward(u, dt, rate, b, c, states)
        ctx.signed = signed
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx, dy):
        u, dt, rate, b, c, states = ctx.saved_tensors
        du, ddt = torch.empty_like(u), torch.empty_like(u)
        tile, tiles = _tiles(rate)
        # Parts of one gradient each: of rows of the batch, of tiles of channels
        drate = u.new_empty(len(u), *rate.shape)
        db, dc = b.new_empty(tiles, *b.shape), b.new_empty(tiles, *b.shape)
        span = min(SPAN, u.shape[1])
        history = u.new_empty(len(u) * tiles, span, tile, next_power_of_2(rate.shape[1]))
        scan_backward(u, dt, rate, b, c, dy.contiguous(), states, history, du, ddt, drate, db, dc, ctx.signed)
        return du, ddt, drate.sum(0), db.sum(0), dc.sum(0), None, None


def _tiles(rate: Tensor) -> tuple[int, int]:
    """Return channels of a program, and programs of a row."""
    channels, size = rate.shape
    tile = min(max(1, TILE // next_power_of_2(size)), next_power_of_2(channels))
    return tile, ceil_div(channels, tile)


@custom_op(mutates=("y", "states"))
def scan_forward(
    u: Tensor, dt: Tensor, rate: Tensor, b: Tensor, c: Tensor, y: Tensor, states: Tensor, signed: bool
) -> None:
    """Fill y, and `states` [B, spans, D, N] with those before each span, unless it has no span."""
    grid, sizes = _launch(u, rate)
    scan_forward_kernel[grid](
        u, dt, rate, b, c, y, states, u.shape[1], SAVE=states.numel() > 0, SIGNED=signed, **sizes
    )


@custom_op(mutates=("history", "du", "ddt", "drate", "db", "dc"))
def scan_backward(
    u: Tensor, dt: Tensor, rate: Tensor, b: Tensor, c: Tensor, dy: Tensor, states: Tensor, history: Tensor,
    du: Tensor, ddt: Tensor, drate: Tensor, db: Tensor, dc: Tensor, signed: bool,
) -> None:  # fmt: skip
    """Fill the gradients: of `rate` by rows of the batch, of b and c by tiles of channels."""
    grid, sizes = _launch(u, rate)
    scan_backward_kernel[grid](
        u, dt, rate, b, c, dy, states, history, du, ddt, drate, db, dc,
        u.shape[1], len(u), SIGNED=signed, **sizes,
    )  # fmt: skip


def _launch(u: Tensor, rate: Tensor) -> tuple[tuple[int], dict[str, int]]:
    tile, tiles = _tiles(rate)
    channels, size = rate.shape
    sizes = {"D": channels, "N": size, "BD": tile, "BN": next_power_of_2(size), "LENGTH": SPAN}
    return (len(u) * tiles,), sizes | {"num_warps": 1}


@triton.jit
def program(D: tl.constexpr, N: tl.constexpr, BD: tl.constexpr, BN: tl.constexpr):
    """Return this program's row and tile of channels; its channels, states and elements of [D, N]; masks."""
    TILES: tl.constexpr = (D + BD - 1) // BD
    i_b, i_d = tl.program_id(0) // TILES, tl.program_id(0) % TILES
    o_d, o_n = i_d * BD + tl.arange(0, BD), tl.arange(0, BN)
    o_dn = o_d[:, None] * N + o_n[None, :]
    return i_b.to(tl.int64), i_d, o_d, o_n, o_dn, o_d < D, o_n < N


@triton.jit
def load_token(u, dt, b, i_r, o_d, o_n, m_d, m_n, D: tl.constexpr, N: tl.constexpr):
    """Load u and dt [BD], b [BN] of row `i_r` of [B T, ...]."""
    b_u = tl.load(u + i_r * D + o_d, mask=m_d, other=0.0)
    b_dt = tl.load(dt + i_r * D + o_d, mask=m_d, other=0.0)
    return b_u, b_dt, tl.load(b + i_r * N + o_n, mask=m_n, other=0.0)


@triton.jit
def transition(b_decay, SIGNED: tl.constexpr):
    """Return a of exp(-dt rate)."""
    if SIGNED:
        b_decay = 2.0 * b_decay - 1.0
    return b_decay


@triton.jit
def next_states(b_h, b_decay, b_x, b_b, SIGNED: tl.constexpr):
    """Return a h + x b^T of states [BD, BN]."""
    return transition(b_decay, SIGNED) * b_h + b_x[:, None] * b_b[None, :]


@triton.jit(do_not_specialize=["T"])
def scan_forward_kernel(
    u, dt, rate, b, c,  # [B, T, D], [B, T, D], [D, N], [B, T, N], [B, T, N]
    y, states,  # out [B, T, D], [B, spans, D, N]
    T,
    D: tl.constexpr, N: tl.constexpr, BD: tl.constexpr, BN: tl.constexpr, LENGTH: tl.constexpr,
    SAVE: tl.constexpr, SIGNED: tl.constexpr,
):  # fmt: skip
    i_b, _, o_d, o_n, o_dn, m_d, m_n = program(D, N, BD, BN)
    m_dn = m_d[:, None] & m_n[None, :]
    b_rate = tl.load(rate + o_dn, mask=m_dn, other=0.0)
    b_h = tl.zeros((BD, BN), tl.float32)
    n_spans = tl.cdiv(T, LENGTH)
    for i_s in range(0, n_spans):
        if SAVE:
            tl.store(states + (i_b * n_spans + i_s) * D * N + o_dn, b_h, mask=m_dn)
        for i_t in tl.range(i_s * LENGTH, tl.minimum(T, (i_s + 1) * LENGTH), num_stages=STAGES):
            i_r = i_b * T + i_t
            b_u, b_dt, b_b = load_token(u, dt, b, i_r, o_d, o_n, m_d, m_n, D, N)
            b_c = tl.load(c + i_r * N + o_n, mask=m_n, other=0.0)
            b_h = next_states(b_h, tl.exp(-b_dt[:, None] * b_rate), b_dt * b_u, b_b, SIGNED)
            tl.store(y + i_r * D + o_d, tl.sum(b_h * b_c[None, :], 1), mask=m_d)


@triton.jit(do_not_specialize=["T", "n_rows"])
def scan_backward_kernel(
    u, dt, rate, b, c, dy,  # [B, T, D], [B, T, D], [D, N], [B, T, N], [B, T, N], [B, T, D]
    states, history,  # [B, spans, D, N]; buffer for those before each token of a span
    du, ddt, drate, db, dc,  # out [B, T, D], [B, T, D], [B, D, N], [tiles, B, T, N], [tiles, B, T, N]
    T, n_rows,
    D: tl.constexpr, N: tl.constexpr, BD: tl.constexpr, BN: tl.constexpr, LENGTH: tl.constexpr,
    SIGNED: tl.constexpr,
):  # fmt: skip
    i_b, i_d, o_d, o_n, o_dn, m_d, m_n = program(D, N, BD, BN)
    m_dn = m_d[:, None] & m_n[None, :]
    p_history = history + tl.program_id(0).to(tl.int64) * tl.minimum(T, LENGTH) * BD * BN
    p_history += tl.arange(0, BD)[:, None] * BN + o_n[None, :]
    b_rate = tl.load(rate + o_dn, mask=m_dn, other=0.0)
    b_dh = tl.zeros((BD, BN), tl.float32)
    b_drate = tl.zeros((BD, BN), tl.float32)
    n_spans = tl.cdiv(T, LENGTH)
    for i_reverse in range(0, n_spans):
        i_s = n_spans - 1 - i_reverse
        i_start = i_s * LENGTH
        n_t = tl.minimum(T - i_start, LENGTH)
        b_h = tl.load(states + (i_b * n_spans + i_s) * D * N + o_dn, mask=m_dn, other=0.0)
        for i in tl.range(0, n_t, num_stages=STAGES):
            i_r = i_b * T + i_start + i
            tl.store(p_history + i * BD * BN, b_h)
            b_u, b_dt, b_b = load_token(u, dt, b, i_r, o_d, o_n, m_d, m_n, D, N)
            b_h = next_states(b_h, tl.exp(-b_dt[:, None] * b_rate), b_dt * b_u, b_b, SIGNED)
        tl.debug_barrier()  # the values stored above are loaded below
        for i in tl.range(0, n_t, num_stages=STAGES):
            i_t = n_t - 1 - i
            i_r = i_b * T + i_start + i_t
            b_u, b_dt, b_b = load_token(u, dt, b, i_r, o_d, o_n, m_d, m_n, D, N)
            b_c = tl.load(c + i_r * N + o_n, mask=m_n, other=0.0)
            b_dy = tl.load(dy + i_r * D + o_d, mask=m_d, other=0.0)
            b_before = tl.load(p_history + i_t * BD * BN)
            b_decay = tl.exp(-b_dt[:, None] * b_rate)
            b_h = next_states(b_before, b_decay, b_dt * b_u, b_b, SIGNED)
            b_dh += b_dy[:, None] * b_c[None, :]
            p_part = (i_d.to(tl.int64) * n_rows * T + i_r) * N + o_n
            tl.store(dc + p_part, tl.sum(b_dy[:, None] * b_h, 0), mask=m_n)
            tl.store(db + p_part, tl.sum(b_dh * (b_dt * b_u)[:, None], 0), mask=m_n)
            b_dx = tl.sum(b_dh * b_b[None, :], 1)  # of dt u
            b_dlog = b_dh * b_before * b_decay  # of -dt rate
            if SIGNED:
                b_dlog *= 2.0
            tl.store(du + i_r * D + o_d, b_dx * b_dt, mask=m_d)
            tl.store(ddt + i_r * D + o_d, b_dx * b_u - tl.sum(b_dlog * b_rate, 1), mask=m_d)
            b_drate -= b_dlog * b_dt[:, None]
            b_dh *= transition(b_decay, SIGNED)
        tl.debug_barrier()  # before the next span's states take this one's places
    tl.store(drate + i_b * D * N + o_dn, b_drate, mask=m_dn)
