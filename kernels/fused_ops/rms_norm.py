"""RMSNorm, alone, after a residual addition, or gated: PyTorch definition and Triton kernels.

Triton: a tile is BR whole rows. The forward kernel reads each row once; the backward kernel recomputes
1 / rms. A backward program goes over consecutive tiles and sums its part of the weight's gradient in
registers. `sum_rows` adds the parts, in an order that depends on the device but is the same in every run.
"""

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
from fla_train.kernels.sizes import ceil_div, next_power_of_2, processors

MAX_SIZE = 16384  # channels; the Triton kernels hold a row in registers
NORM_TILE = 2048  # elements of a tile of short rows
NORM_ELEMENTS_PER_WARP = 512
NORM_STAGES = 2  # stages of the backward kernel's loop, which loads one tile ahead
NORM_PROGRAMS_PER_PROCESSOR = 4  # programs of the backward kernel, all of which run at once


def rms_norm(
    x: Tensor,
    weight: Tensor,
    eps: float,
    *,
    gate: Tensor | None = None,
    dtype: torch.dtype | None = None,
    backend: str = "auto",
) -> Tensor:
    """Return weight * x / sqrt(mean(x^2) + eps) over the last axis, times silu(gate) if given, in fp32.

    Args:
        x: [..., D].
        weight: [D].
        gate: of the shape of `x`, or with its last two axes as one.
        dtype: of the result, default that of `x`.
        backend: "torch", "triton" or "auto" (see `resolve_backend`).

    Returns:
        [..., D], differentiable in all tensors (float64 input is computed in float64, by torch).

    Raises:
        ValueError: a backend that is unknown or cannot run.
    """
    dtype = x.dtype if dtype is None else dtype
    if _resolve(backend, x, weight, gate) == "triton":
        return _RMSNorm.apply(x, weight, gate, None, eps, dtype)[0]
    wide = torch.promote_types(x.dtype, torch.float32)
    y = F.rms_norm(x.to(wide), weight.shape, weight.to(wide), eps)
    if gate is not None:
        y = y * F.silu(gate.view_as(x).to(wide))
    return y.to(dtype)


def add_rms_norm(
    x: Tensor,
    residual: Tensor,
    weight: Tensor,
    eps: float,
    *,
    dtype: torch.dtype | None = None,
    backend: str = "auto",
) -> tuple[Tensor, Tensor]:
    """Return `rms_norm` of residual + x, and that sum: the next residual, in the dtype both promote to.

    Arguments and errors are those of `rms_norm`; `residual` has the shape of `x`. The norm sees the sum as it
    is rounded to its dtype; `dtype` defaults to that.
    """
    if _resolve(backend, x, weight, residual) == "triton":
        return _RMSNorm.apply(x, weight, None, residual, eps, dtype)
    total = residual + x
    return rms_norm(total, weight, eps, dtype=dtype, backend="torch"), total


def cast_rms_norm(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor,
    scaled: Tensor,
    eps: float,
    *,
    dtype: torch.dtype,
    narrow: torch.dtype,
    backend: str = "auto",
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return `rms_norm`, or `add_rms_norm`, whose result is needed in a float8 format only.

    Args:
        scaled: the weight times the scale of the result in `narrow`; without gradient.
        dtype: of the result's gradient.

    Returns:
        A tensor of the result's shape and `dtype` that receives its gradient, and has no content on a GPU;
        the scaled result in `narrow`; the sum with the residual.
    """
    if _resolve(backend, x, weight, residual) == "triton":
        return _CastRMSNorm.apply(x, residual, weight, scaled, eps, dtype, narrow)
    y, total = rms_norm(x, weight, eps, dtype=dtype, backend="torch"), None
    if residual is not None:
        y, total = add_rms_norm(x, residual, weight, eps, dtype=dtype, backend="torch")
    normed = (x if total is None else total).detach()
    return y, rms_norm(normed, scaled, eps, dtype=torch.float32, backend="torch").to(narrow), total


def _resolve(backend: str, x: Tensor, weight: Tensor, other: Tensor | None) -> str:
    size = x.shape[-1]
    joined = (*x.shape[:-2], x.shape[-2:].numel())  # a gate may have its last two axes as one
    assert weight.shape == (size,) and (other is None or other.shape in (x.shape, joined))
    limit = None if size <= MAX_SIZE else f"takes at most {MAX_SIZE} channels, got {size}"
    return resolve_backend(backend, x, limit)


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, gate, residual, eps, dtype):
        x, weight = as_rows(x), weight.contiguous()
        gate = None if gate is None else as_rows(gate)
        total = None
        if residual is not None:
            residual = residual.contiguous()
            total = x.new_empty(x.shape, dtype=torch.promote_types(x.dtype, residual.dtype))
        normed = x if total is None else total
        y = x.new_empty(x.shape, dtype=dtype or normed.dtype)
        rms_norm_forward(x, residual, weight, gate, eps, y, total)
        ctx.save_for_backward(normed, weight, gate)
        ctx.eps, ctx.residual_dtype = eps, None if residual is None else residual.dtype
        ctx.dtype = x.dtype
        ctx.set_materialize_grads(False)
        return y, total

    @staticmethod
    @once_differentiable
    def backward(ctx, dy, dtotal):
        x, weight, gate = ctx.saved_tensors
        dy = x.new_zeros(x.shape) if dy is None else dy.contiguous()
        dtotal = None if dtotal is None else dtotal.contiguous()
        added = ctx.residual_dtype is not None  # then x is the sum, an output
        dx = x.new_empty(x.shape, dtype=ctx.dtype) if added else empty_gradient(x)
        dgate = None if gate is None else empty_gradient(gate)
        dresidual = None
        if added:
            same = ctx.residual_dtype == ctx.dtype
            dresidual = dx if same else torch.empty_like(x, dtype=ctx.residual_dtype)
        dweight = torch.empty_like(weight, dtype=torch.float32)
        separate = None if dresidual is dx else dresidual
        rms_norm_backward(x, weight, gate, dy, dtotal, ctx.eps, dx, dweight, dgate, separate)
        return dx, dweight.to(weight.dtype), dgate, dresidual, None, None


class _CastRMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, residual, weight, scaled, eps, dtype, narrow):
        x = as_rows(x)
        data, total = _RMSNorm.forward(ctx, x, scaled, None, residual, eps, narrow)
        ctx.save_for_backward(x if total is None else total, weight.contiguous(), None)
        ctx.mark_non_differentiable(data)
        return x.new_empty(1, dtype=dtype).expand(x.shape), data, total

    @staticmethod
    @once_differentiable
    def backward(ctx, dy, _, dtotal):
        dx, dweight, _, dresidual, *_ = _RMSNorm.backward(ctx, dy, dtotal)
        return dx, dresidual, dweight, None, None, None, None


@custom_op(mutates=("y", "total"))
def rms_norm_forward(
    x: Tensor, residual: Tensor | None, weight: Tensor, gate: Tensor | None, eps: float,
    y: Tensor, total: Tensor | None,
) -> None:  # fmt: skip
    """Fill y and, with a residual, the sum that is normalised."""
    tiles, sizes = _norm_tiles(x)
    norm_forward_kernel[(tiles,)](
        x, residual, weight, gate, y, total, eps=eps, ADD=residual is not None, S_x=row_stride(x),
        **_gate_sizes(x, gate=gate), **sizes,
    )  # fmt: skip


@custom_op(mutates=("dx", "dweight", "dgate", "dresidual"))
def rms_norm_backward(
    x: Tensor, weight: Tensor, gate: Tensor | None, dy: Tensor, dtotal: Tensor | None, eps: float,
    dx: Tensor, dweight: Tensor, dgate: Tensor | None, dresidual: Tensor | None,
) -> None:  # fmt: skip
    """Fill the gradients, that of the weight in fp32; `dresidual` where its dtype is not that of dx."""
    tiles, sizes = _norm_tiles(x)
    tiles_each = max(1, ceil_div(tiles, NORM_PROGRAMS_PER_PROCESSOR * processors(x.device)))  # 1 for no rows
    programs = ceil_div(tiles, tiles_each)
    partial = torch.empty(programs, x.shape[-1], dtype=torch.float32, device=x.device)
    norm_backward_kernel[(programs,)](
        x, weight, gate, dy, dtotal, dx, dresidual, dgate, partial,
        tiles_each=tiles_each, eps=eps, ADD=dtotal is not None, SPLIT=dresidual is not None,
        STAGES=NORM_STAGES if sizes["BR"] * sizes["BD"] <= NORM_TILE else 1,  # wide rows fill memory
        S_x=row_stride(x), S_dx=row_stride(dx), **_gate_sizes(x, gate=gate, dgate=dgate), **sizes,
    )  # fmt: skip
    sum_rows(partial, dweight)


def _norm_tiles(x: Tensor) -> tuple[int, dict[str, int]]:
    """Return number of tiles of x [..., D], and the sizes that both kernels share."""
    size = x.shape[-1]
    block = next_power_of_2(size)
    tile_rows = max(1, NORM_TILE // block)
    rows = x.numel() // size
    warps = min(16, max(4, tile_rows * block // NORM_ELEMENTS_PER_WARP))
    sizes = {"n_rows": rows, "D": size, "BR": tile_rows, "BD": block, "num_warps": warps}
    return ceil_div(rows, tile_rows), sizes


def _gate_sizes(x: Tensor, **gates: Tensor | None) -> dict[str, int]:
    """Return the rows of x per row of the gate (0: no gate), and the row strides of gate and gradient."""
    gate = gates["gate"]
    heads = 0 if gate is None else gate.shape[-1] // x.shape[-1]
    return {"H": heads} | {f"S_{name}": row_stride(y) if heads else 0 for name, y in gates.items()}


@triton.jit
def load_tile(p, p_tile, mask):
    return tl.load(p + p_tile, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def store_tile(p, p_tile, b_x, mask):
    tl.store(p + p_tile, b_x.to(p.dtype.element_ty), mask=mask)


@triton.jit
def norm_tile(i_tile, n_rows, D: tl.constexpr, BR: tl.constexpr, BD: tl.constexpr):
    """Return rows [BR, 1], columns [1, BD] and mask [BR, BD] of tile `i_tile`."""
    o_r = i_tile.to(tl.int64) * BR + tl.arange(0, BR)
    o_d = tl.arange(0, BD)
    return o_r[:, None], o_d[None, :], (o_r < n_rows)[:, None] & (o_d < D)[None, :]


@triton.jit
def load_weight(weight, D: tl.constexpr, BD: tl.constexpr):
    """Load the weight [1, BD]."""
    o_d = tl.arange(0, BD)
    return load_tile(weight, o_d, o_d < D)[None, :]


@triton.jit
def gate_offsets(o_r, o_d, D: tl.constexpr, H: tl.constexpr, S: tl.constexpr):
    """Return offsets [BR, BD] of rows of x in the gate, which has H of them in a row."""
    return (o_r // H) * S + (o_r % H) * D + o_d


@triton.jit(do_not_specialize=["n_rows"])
def norm_forward_kernel(
    x, residual, weight, gate,  # [rows, D], the same or None, [D], [rows / H, H D] or None
    y, total,  # out [rows, D]; residual + x, with ADD
    n_rows, eps,
    D: tl.constexpr, BR: tl.constexpr, BD: tl.constexpr, H: tl.constexpr,
    S_x: tl.constexpr, S_gate: tl.constexpr, ADD: tl.constexpr,
):  # fmt: skip
    o_r, o_d, mask = norm_tile(tl.program_id(0), n_rows, D, BR, BD)
    p_tile = o_r * D + o_d
    b_w = load_weight(weight, D, BD)
    b_x = load_tile(x, o_r * S_x + o_d, mask)
    if H > 0:
        b_gate = load_tile(gate, gate_offsets(o_r, o_d, D, H, S_gate), mask)  # loaded during the sum
    if ADD:
        b_x = (b_x + load_tile(residual, p_tile, mask)).to(total.dtype.element_ty)
        tl.store(total + p_tile, b_x, mask=mask)
        b_x = b_x.to(tl.float32)
    b_rstd = tl.rsqrt(tl.sum(b_x * b_x, 1) / D + eps)
    b_y = b_x * b_rstd[:, None] * b_w
    if H > 0:
        b_y *= b_gate * sigmoid(b_gate)
    store_tile(y, p_tile, b_y, mask)


@triton.jit(do_not_specialize=["n_rows", "tiles_each"])
def norm_backward_kernel(
    x, weight, gate, dy,  # [rows, D] normalised input, [D], [rows / H, H D] or None, [rows, D]
    dtotal,  # gradient of the sum by its other use, with ADD
    dx, dresidual, dgate, partial,  # out; dresidual only with SPLIT; fp32 [programs, D] parts of dweight
    n_rows, tiles_each, eps,
    D: tl.constexpr, BR: tl.constexpr, BD: tl.constexpr, H: tl.constexpr,
    S_x: tl.constexpr, S_dx: tl.constexpr, S_gate: tl.constexpr, S_dgate: tl.constexpr,
    ADD: tl.constexpr, SPLIT: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Compute with u = dy * weight (* silu(gate)): dx = u / rms - x mean(u * x) / rms^3."""
    b_w = load_weight(weight, D, BD)
    b_dw = tl.zeros((BR, BD), tl.float32)
    for i in tl.range(0, tiles_each, num_stages=STAGES):
        o_r, o_d, mask = norm_tile(tl.program_id(0) * tiles_each + i, n_rows, D, BR, BD)
        p_tile = o_r * D + o_d
        b_x, b_dy = load_tile(x, o_r * S_x + o_d, mask), load_tile(dy, p_tile, mask)
        if ADD:
            b_dtotal = load_tile(dtotal, p_tile, mask)  # loaded during the sums
        if H > 0:
            b_gate = load_tile(gate, gate_offsets(o_r, o_d, D, H, S_gate), mask)
            b_sigmoid = sigmoid(b_gate)
            b_slope = b_dy * b_sigmoid * (1.0 + b_gate * (1.0 - b_sigmoid))
            b_dy *= b_gate * b_sigmoid
        b_u = b_dy * b_w
        # Both sums at once: programs wait for their warps once.
        b_square, b_dot = tl.split(tl.sum(tl.join(b_x * b_x, b_u * b_x), 1))
        b_rstd = tl.rsqrt(b_square / D + eps)[:, None]
        b_y = b_x * b_rstd
        if H > 0:
            store_tile(dgate, gate_offsets(o_r, o_d, D, H, S_dgate), b_slope * b_y * b_w, mask)
        b_dw += b_dy * b_y
        b_dx = b_rstd * (b_u - b_y * (b_dot[:, None] / D * b_rstd))
        if ADD:
            b_dx += b_dtotal
        store_tile(dx, o_r * S_dx + o_d, b_dx, mask)
        if SPLIT:
            store_tile(dresidual, p_tile, b_dx, mask)
    o_d = tl.arange(0, BD)
    tl.store(partial + tl.program_id(0).to(tl.int64) * D + o_d, tl.sum(b_dw, 0), mask=o_d < D)
