"""Causal depthwise short convolution over time, followed by SiLU: PyTorch definition and Triton kernels.

Triton: a program owns BR blocks of L tokens and BD channels. It steps through its blocks side by side, GROUP
tokens at a time, and holds the last three inputs of each in registers, so that an input is loaded once
whatever the number of taps. It loads the next group before it computes the present one, because the compiler
does not move a load ahead of a store. The backward kernel recomputes the pre-activation and carries the
unfinished sums of dx along. A convolution of fewer than four taps runs as one of four whose oldest are zero.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from fla_train.kernels.custom_op import custom_op
from fla_train.kernels.fused_ops.backend import resolve_backend
from fla_train.kernels.fused_ops.side_by_side import as_rows, empty_gradient, row_stride
from fla_train.kernels.fused_ops.sigmoid import sigmoid
from fla_train.kernels.fused_ops.sum_rows import sum_rows
from fla_train.kernels.optional_triton import tl, triton
from fla_train.kernels.sizes import ceil_div

MAX_TAPS = 4  # limit of the Triton kernels, which keep a token's earlier inputs in registers
HALO = tl.constexpr(3)  # inputs before a token that reach it
GROUP = tl.constexpr(4)  # tokens per step of a program
# (L, BR, BD, warps): tokens per block (a multiple of GROUP), blocks and channels per program.
FORWARD = (32, 4, 128, 4)
BACKWARD = (64, 8, 64, 4)
REGISTERS = 128  # a thread, of the backward kernel: four of its programs fit on a processor


def short_convolution(
    x: Tensor,
    weight: Tensor,
    *,
    state: Tensor | None = None,
    position_in_document: Tensor | None = None,
    backend: str = "auto",
) -> tuple[Tensor, Tensor]:
    """Return y_t = silu(sum_s weight[:, 0, W-1-s] * x_{t-s}), s = 0 .. W-1, differentiable in all tensors.

    Args:
        x: [B, T, D]. The triton backend computes in float32, the torch backend in the dtype of `x`.
        weight: [D, 1, W], as a depthwise `nn.Conv1d` keeps it.
        state: the W-1 inputs before x, [B, D, W-1]; zeros when absent. With `position_in_document` x may be R
            rows of T / R tokens packed into one row, and `state` [R, D, W-1] the inputs before each of them.
        position_in_document: distance of each token from its document's start, integers [T], for documents
            packed in one row (B = 1); taps never reach beyond it. With `state` a document may begin before x.
        backend: "torch", "triton" or "auto" (see `resolve_backend`).

    Returns:
        y [B, T, D] in the dtype of `x`, and the last W-1 inputs to continue from, [B, D, W-1] or as `state`;
        with both `state` and `position_in_document` those of the last document, zeros before it.

    Raises:
        ValueError: a backend that is unknown or cannot run.
    """
    (batch, length, channels), width = x.shape, weight.shape[-1]
    rows = batch if state is None or position_in_document is None else len(state)
    assert weight.shape == (channels, 1, width)
    assert position_in_document is None or (batch == 1 and position_in_document.shape == (length,))
    assert state is None or (state.shape == (rows, channels, width - 1) and batch * length % rows == 0)
    limit = None if width <= MAX_TAPS else f"takes at most {MAX_TAPS} taps, got {width}"
    backend = resolve_backend(backend, x, limit)

    before = None if state is None else state.transpose(1, 2).to(x.dtype)  # [R, W-1, D]
    differentiable = before is not None and before.requires_grad and torch.is_grad_enabled()
    if backend == "triton" and width > 1 and differentiable:
        return _ShortConvolutionOfParts.apply(x, weight, position_in_document, before)
    apply = _torch_short_convolution if backend == "torch" else _ShortConvolution.apply
    last = _last_inputs(_in_rows(x, rows), width - 1, position_in_document, before)
    return apply(x, weight, position_in_document, before), last


def _torch_short_convolution(
    x: Tensor, weight: Tensor, position_in_document: Tensor | None, before: Tensor | None
) -> Tensor:
    """Compute the definition, as W shifted multiply-adds.

    This is as fast on CPUs as a grouped `conv1d`, needs no transposes, and makes the reset at document
    boundaries a mask per shift.
    """
    shape, history = x.shape, weight.shape[-1] - 1
    if before is None:
        before = x.new_zeros(len(x), history, shape[-1])
    x = torch.cat([before, _in_rows(x, len(before))], dim=1)
    length = x.shape[1] - history
    taps = weight[:, 0].to(x.dtype).unbind(-1)
    y = x[:, history:] * taps[-1]
    for shift in range(1, history + 1):
        past = x[:, history - shift : history - shift + length]
        if position_in_document is not None:
            past = past * (position_in_document >= shift).to(x.dtype).view(len(x), length, 1)
        y = torch.addcmul(y, past, taps[-1 - shift])
    return F.silu(y).view(shape)


def _in_rows(x: Tensor, rows: int) -> Tensor:
    """Return x [B, T, D] as [R, T', D]."""
    return x if len(x) == rows else x.view(rows, -1, x.shape[-1])


def _last_inputs(x: Tensor, count: int, position_in_document: Tensor | None, before: Tensor | None) -> Tensor:
    """Return the last `count` tokens of x [R, T, D], or of inputs before it or zeros: [R, D, count]."""
    length = x.shape[1]
    if length < count:
        x = F.pad(x, (0, 0, count - length, 0)) if before is None else torch.cat([before, x], dim=1)
    last = x[:, x.shape[1] - count :].transpose(1, 2)
    if before is not None and position_in_document is not None:
        distance = torch.arange(count - 1, -1, -1, device=x.device)  # from the last token
        last = last * (position_in_document.view(len(x), length)[:, -1:] >= distance)[:, None].to(x.dtype)
    return last


class _ShortConvolution(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, position_in_document, before):
        x, weight = as_rows(x), weight.contiguous()
        position_in_document = None if position_in_document is None else position_in_document.contiguous()
        before = None if before is None else before.contiguous()
        y = x.new_empty(x.shape)
        short_convolution_forward(x, weight, position_in_document, before, y)
        ctx.save_for_backward(x, weight, position_in_document, before)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx, dy):
        return *_gradients(*ctx.saved_tensors, dy.contiguous()), None, None


def _gradients(
    x: Tensor, weight: Tensor, position_in_document: Tensor | None, before: Tensor | None, dy: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the gradients of x (side by side with others' if x is) and of the weight."""
    dx, dweight = empty_gradient(x), torch.empty_like(weight, dtype=torch.float32)
    short_convolution_backward(x, weight, position_in_document, before, dy, dx, dweight)
    return dx, dweight.to(weight.dtype)


class _ShortConvolutionOfParts(torch.autograd.Function):
    """Convolve with gradients of the inputs before x [R, W-1, D] and of the last ones, which it also returns.

    Only the first W-1 outputs depend on the former, and only the last W-1 inputs are among the latter, so
    PyTorch computes these two on slices. By slices outside of this function autograd would fill and add
    tensors of the size of x.
    """

    @staticmethod
    def forward(ctx, x, weight, position_in_document, before):
        y = _ShortConvolution.forward(ctx, x, weight, position_in_document, before)
        history = before.shape[1]
        last = _last_inputs(_in_rows(x, len(before)), history, position_in_document, before)
        return y, last.contiguous()

    @staticmethod
    @once_differentiable
    def backward(ctx, dy, dlast):
        x, weight, positions, before = ctx.saved_tensors
        dy = dy.contiguous()
        dx, dweight = _gradients(x, weight, positions, before, dy)
        rows, history, _ = before.shape
        x, dy, dx_rows = (_in_rows(tensor, rows) for tensor in (x, dy, dx))
        head = tail = None
        if positions is not None:
            positions = positions.view(rows, -1)
            head, tail = positions[:, :history], positions[:, -history:]
        first, end = x.detach()[:, :history], x.detach()[:, -history:]
        end, start = (tensor.float().detach().requires_grad_() for tensor in (end, before))
        with torch.enable_grad():
            outputs = _torch_short_convolution(first.float(), weight.detach().float(), head, start)
            last = _last_inputs(end, history, tail, start)
            gradients = dy[:, :history].float(), dlast.float()
            dend, dbefore = torch.autograd.grad((outputs, last), (end, start), gradients)
        dx_rows[:, -history:] += dend
        return dx, dweight, None, dbefore.to(before.dtype)


@custom_op(mutates=("y",))
def short_convolution_forward(
    x: Tensor, weight: Tensor, position_in_document: Tensor | None, before: Tensor | None, y: Tensor
) -> None:
    """Fill y."""
    grid, sizes = _conv_launch(x, weight, position_in_document, before, FORWARD)
    conv_forward_kernel[grid](x, weight, position_in_document, before, y, S_x=row_stride(x), **sizes)


@custom_op(mutates=("dx", "dweight"))
def short_convolution_backward(
    x: Tensor, weight: Tensor, position_in_document: Tensor | None, before: Tensor | None, dy: Tensor,
    dx: Tensor, dweight: Tensor,
) -> None:  # fmt: skip
    """Fill the gradients, that of the weight in fp32."""
    grid, sizes = _conv_launch(x, weight, position_in_document, before, BACKWARD)
    groups = ceil_div(sizes["n_blocks"], sizes["BR"])
    partial = torch.empty(groups, *weight.shape, dtype=torch.float32, device=x.device)
    conv_backward_kernel[grid](
        x, weight, position_in_document, before, dy, dx, partial,
        S_x=row_stride(x), S_dx=row_stride(dx), maxnreg=REGISTERS, **sizes,
    )  # fmt: skip
    sum_rows(partial, dweight)


def _conv_launch(
    x: Tensor,
    weight: Tensor,
    position_in_document: Tensor | None,
    before: Tensor | None,
    config: tuple[int, int, int, int],
) -> tuple[tuple[int], dict[str, Any]]:
    """Return grid (channel blocks fastest) and the arguments that both kernels share."""
    (batch, length, channels), (tokens, rows, block, warps) = x.shape, config
    if before is not None and len(before) != batch:  # of each of the rows, which may be packed into one row
        batch, length = len(before), batch * length // len(before)
    n_blocks = batch * ceil_div(length, tokens)
    sizes = dict(
        T=length, n_blocks=n_blocks, D=channels, W=weight.shape[-1], L=tokens, BR=rows, BD=block,
        PACKED=position_in_document is not None, num_warps=warps,
    )  # fmt: skip
    return (ceil_div(n_blocks, rows) * ceil_div(channels, block),), sizes


@triton.jit
def load_taps(weight, o_d, D: tl.constexpr, W: tl.constexpr):
    """Load [1, BD] fp32 weights of the inputs 0, 1, 2 and 3 tokens back, zeros where there is none."""
    taps = ()
    for shift in tl.static_range(HALO + 1):
        b_w = tl.zeros_like(o_d).to(tl.float32)
        if shift < W:
            b_w += tl.load(weight + o_d * W + (W - 1 - shift), mask=o_d < D, other=0.0).to(tl.float32)
        taps += (b_w[None, :],)
    return taps


@triton.jit
def pointers(p, o_row, o_t, o_d, S: tl.constexpr):
    """Return pointers [BR, BD] to tokens `o_t` of sequences from row `o_row`; rows are S elements apart."""
    return p + (o_row + o_t)[:, None] * S + o_d[None, :]


@triton.jit
def inside(o_t, o_end, m_d):
    """Return [BR, BD]: whether tokens are before `o_end`, and channels exist (m_d [1, BD])."""
    return (o_t < o_end)[:, None] & m_d


@triton.jit
def load_group(p, o_t, o_end, m_d, S: tl.constexpr):
    """Load the GROUP tokens from `o_t` on, to which p points; zeros from `o_end` on."""
    group = ()
    for i in tl.static_range(GROUP):
        group += (tl.load(p + i * S, mask=inside(o_t + i, o_end, m_d), other=0.0),)
    return group


@triton.jit
def load_past(p, before, o_row, o_t, o_end, o_d, m_d, T, D: tl.constexpr, W: tl.constexpr, S: tl.constexpr):
    """Load the HALO tokens ahead of `o_t` at p; `before` [B, W-1, D] has those before their sequence."""
    past = ()
    for i in tl.static_range(HALO):
        o_past = o_t + (i - HALO)
        b_x = tl.load(p + (i - HALO) * S, mask=(o_past >= 0)[:, None] & inside(o_past, o_end, m_d), other=0.0)
        if before is not None:
            mask = ((o_past < 0) & (o_past > -W) & (o_end > 0))[:, None] & m_d
            o_before = (o_row // T + 1) * (W - 1) + o_past
            b_x += tl.load(before + o_before[:, None] * D + o_d[None, :], mask=mask, other=0.0)
        past += (b_x,)
    return past


@triton.jit
def widen(b_xs):
    """Return a tuple of inputs in fp32."""
    wide = ()
    for i in tl.static_range(len(b_xs)):
        wide += (b_xs[i].to(tl.float32),)
    return wide


@triton.jit
def load_positions(position_in_document, o_row, o_t, o_end, PACKED: tl.constexpr):
    """Load [BR, 1] distances from the document's start."""
    b_n = tl.zeros_like(o_t)
    if PACKED:
        b_n = tl.load(position_in_document + o_row + o_t, mask=(o_t >= 0) & (o_t < o_end), other=0).to(
            tl.int32
        )
    return b_n[:, None]


@triton.jit
def reached(b_x, b_n, shift: tl.constexpr, PACKED: tl.constexpr):
    """Return b_x where the token `shift` places back is of the same document, else 0."""
    return tl.where(b_n >= shift, b_x, 0.0) if PACKED else b_x


@triton.jit
def convolve(b_xs, j: tl.constexpr, b_ws, b_n, PACKED: tl.constexpr):
    """Return the pre-activation of token `j` of a group, whose inputs and the three before are b_xs."""
    b_z = b_xs[j + 3] * b_ws[0] + reached(b_xs[j + 2] * b_ws[1], b_n, 1, PACKED)
    return b_z + reached(b_xs[j + 1] * b_ws[2], b_n, 2, PACKED) + reached(b_xs[j] * b_ws[3], b_n, 3, PACKED)


@triton.jit
def program_tile(T, n_blocks, D: tl.constexpr, L: tl.constexpr, BR: tl.constexpr, BD: tl.constexpr):
    """Return first rows of sequences, first tokens and ends of this program's blocks, and its channels."""
    ND: tl.constexpr = (D + BD - 1) // BD
    o_s = (tl.program_id(0) // ND) * BR + tl.arange(0, BR)
    n_per_sequence = tl.cdiv(T, L)
    o_row = (o_s // n_per_sequence).to(tl.int64) * T
    o_end = tl.where(o_s < n_blocks, T, 0)
    return o_row, (o_s % n_per_sequence) * L, o_end, (tl.program_id(0) % ND) * BD + tl.arange(0, BD)


@triton.jit(do_not_specialize=["T", "n_blocks"])
def conv_forward_kernel(
    x, weight, position_in_document, before, y,  # [B, T, D], [D, W], [B T], [B, W-1, D], out [B, T, D]
    T, n_blocks,
    D: tl.constexpr, W: tl.constexpr, L: tl.constexpr, BR: tl.constexpr, BD: tl.constexpr,
    S_x: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    o_row, o_t, o_end, o_d = program_tile(T, n_blocks, D, L, BR, BD)
    b_ws = load_taps(weight, o_d, D, W)
    m_d = (o_d < D)[None, :]
    p_x = pointers(x, o_row, o_t, o_d, S_x)
    past = load_past(p_x, before, o_row, o_t, o_end, o_d, m_d, T, D, W, S_x)
    o_stop = tl.minimum(o_end, o_t + L)
    group = load_group(p_x, o_t, o_stop, m_d, S_x)
    p_y = pointers(y, o_row, o_t, o_d, D)
    for i in range(0, L, GROUP):
        b_xs = widen(past + group)
        past = group[1:]
        p_x += GROUP * S_x
        group = load_group(p_x, o_t + i + GROUP, o_stop, m_d, S_x)
        for j in tl.static_range(GROUP):
            b_n = load_positions(position_in_document, o_row, o_t + i + j, o_stop, PACKED)
            b_z = convolve(b_xs, j, b_ws, b_n, PACKED)
            b_y = (b_z * sigmoid(b_z)).to(y.dtype.element_ty)
            tl.store(p_y + j * D, b_y, mask=inside(o_t + i + j, o_stop, m_d))
        p_y += GROUP * D


@triton.jit(do_not_specialize=["T", "n_blocks"])
def conv_backward_kernel(
    x, weight, position_in_document, before, dy,  # [B, T, D], [D, W], [B T], [B, W-1, D], [B, T, D]
    dx, partial,  # out: [B, T, D]; weight gradient per program, fp32 [groups, D, W]
    T, n_blocks,
    D: tl.constexpr, W: tl.constexpr, L: tl.constexpr, BR: tl.constexpr, BD: tl.constexpr,
    S_x: tl.constexpr, S_dx: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    """Compute, with dz of the pre-activation: dx_t = sum_s w_s dz_{t+s} and dw_s = sum_t dz_t x_{t-s}."""
    o_row, o_t, o_end, o_d = program_tile(T, n_blocks, D, L, BR, BD)
    b_ws = load_taps(weight, o_d, D, W)
    m_d = (o_d < D)[None, :]
    p_x = pointers(x, o_row, o_t, o_d, S_x)
    past = load_past(p_x, before, o_row, o_t, o_end, o_d, m_d, T, D, W, S_x)
    o_stop = tl.minimum(o_end, o_t + L + HALO)
    group = load_group(p_x, o_t, o_stop, m_d, S_x)
    p_dy = pointers(dy, o_row, o_t, o_d, D)
    dy_group = load_group(p_dy, o_t, o_stop, m_d, D)
    o_last = tl.minimum(o_end, o_t + L) + HALO  # a token finishes dx of the one HALO before it
    p_dx = pointers(dx, o_row, o_t - HALO, o_d, S_dx)
    b_zero = tl.zeros((BR, BD), tl.float32)
    b_dx1, b_dx2, b_dx3 = b_zero, b_zero, b_zero  # unfinished sums of the last three tokens
    b_dw0, b_dw1, b_dw2, b_dw3 = b_zero, b_zero, b_zero, b_zero
    for i in range(0, L + GROUP, GROUP):
        b_xs, b_dys = widen(past + group), dy_group
        past = group[1:]
        p_x += GROUP * S_x
        p_dy += GROUP * D
        group = load_group(p_x, o_t + i + GROUP, o_stop, m_d, S_x)
        dy_group = load_group(p_dy, o_t + i + GROUP, o_stop, m_d, D)
        for j in tl.static_range(GROUP):
            b_n = load_positions(position_in_document, o_row, o_t + i + j, o_stop, PACKED)
            b_z = convolve(b_xs, j, b_ws, b_n, PACKED)
            b_sigmoid = sigmoid(b_z)
            b_dz = b_dys[j].to(tl.float32) * b_sigmoid * (1.0 + b_z * (1.0 - b_sigmoid))

            b_dx = b_dx3 + reached(b_dz * b_ws[3], b_n, 3, PACKED)
            m_dx = inside(o_t + i + j, o_last, m_d) & (i + j >= HALO)  # i + j < HALO finishes none
            tl.store(p_dx + j * S_dx, b_dx.to(dx.dtype.element_ty), mask=m_dx)
            b_dx3 = b_dx2 + reached(b_dz * b_ws[2], b_n, 2, PACKED)
            b_dx2 = b_dx1 + reached(b_dz * b_ws[1], b_n, 1, PACKED)
            b_dx1 = b_dz * b_ws[0]

            b_own = tl.where(i < L, b_dz, 0.0)  # the next block counts the tokens after this one
            b_dw0 += b_own * b_xs[j + 3]
            b_dw1 += reached(b_own * b_xs[j + 2], b_n, 1, PACKED)
            b_dw2 += reached(b_own * b_xs[j + 1], b_n, 2, PACKED)
            b_dw3 += reached(b_own * b_xs[j], b_n, 3, PACKED)
        p_dx += GROUP * S_dx
    i_group = tl.program_id(0) // ((D + BD - 1) // BD)
    p_dw = partial + (i_group.to(tl.int64) * D + o_d) * W + W - 1
    b_dws = (b_dw0, b_dw1, b_dw2, b_dw3)
    for shift in tl.static_range(W):
        tl.store(p_dw - shift, tl.sum(b_dws[shift], 0), mask=o_d < D)
