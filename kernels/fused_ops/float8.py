"""Casts to float8 with one scale a tensor, alone or with SwiGLU: PyTorch definition and Triton kernels.

A scale is the power of two that puts the largest magnitude into the upper binade but one of the format, so
that scaling is exact. It is found from the tensor itself (dynamic scaling): one kernel leaves the largest
magnitude that each of its programs has seen, the next one computes their maximum and casts. The output of
an RMSNorm has a scale from its bound, and no kernel looks at it. Both orders of a matrix are written, because
a float8 product on a GPU takes rows of both factors along the summed axis. Numbers are rounded to bf16 first,
as bf16 training rounds them.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from fla_train.kernels.cached_launch import run_kernel
from fla_train.kernels.custom_op import custom_op
from fla_train.kernels.fused_ops.backend import resolve_backend
from fla_train.kernels.fused_ops.rms_norm import load_tile
from fla_train.kernels.fused_ops.sigmoid import sigmoid
from fla_train.kernels.fused_ops.swiglu import matrix_tile, swiglu_gradients
from fla_train.kernels.optional_triton import tl, triton
from fla_train.kernels.sizes import ceil_div, next_power_of_2, processors

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
# Exponent of the largest magnitudes once scaled; the formats end at 1.75 * 2^(TOP + 1).
TOP = {E4M3: 7, E5M2: 14}
MULTIPLE = 16  # float8 products need matrices whose two sizes are multiples of it

AMAX_PROGRAMS_PER_PROCESSOR = 4  # programs of the kernels that look for the largest magnitude
AMAX_BLOCK = 8192  # elements at once, in 8 warps as all kernels here
FP8_TILE = (128, 128)  # tile of a cast
ROWS_TILE = (8, 512)  # tile of SwiGLU without a transpose
SWIGLU_TILE = (128, 64)  # tile of SwiGLU's backward pass
CAST_WARPS = 8


class Float8Matrix(NamedTuple):
    """A matrix x = data * inverse."""

    data: Tensor  # [M, N] in float8
    transposed: Tensor | None  # its transpose in memory, [N, M]
    inverse: Tensor  # fp32 scalar, a power of two; NaN where x is not finite


def float8_product(
    a: Tensor, b: Tensor, inverse_a: Tensor, inverse_b: Tensor, dtype: torch.dtype, *, fast: bool = False
) -> Tensor:
    """Return a b^T times both inverse scales, summed in fp32.

    Args:
        a: [M, K] in float8, contiguous rows.
        b: [N, K], as a; at most one of them is e5m2.
        fast: let the tensor cores keep partial sums in fewer bits, as is usual for forward products.

    Returns:
        [M, N] in `dtype`. A device other than a GPU multiplies the same numbers in fp32.
    """
    if a.is_cuda:
        return torch._scaled_mm(a, b.t(), inverse_a, inverse_b, out_dtype=dtype, use_fast_accum=fast)
    with torch.autocast(a.device.type, enabled=False):
        return (a.float() @ b.float().t() * (inverse_a * inverse_b)).to(dtype)


def cast_float8(
    xs: Sequence[Tensor],
    dtype: torch.dtype,
    *,
    dim: int = -1,
    out: Float8Matrix | None = None,
    backend: str = "auto",
) -> Float8Matrix:
    """Cast matrices side by side (dim=-1) or one below the other (dim=0), and the transpose, with one scale.

    Args:
        xs: [M, N] each, with the other axis in common.
        dtype: E4M3 or E5M2.
        out: tensors to overwrite; default: new tensors.
        backend: "torch", "triton" or "auto" (see `resolve_backend`).
    """
    if out is None:
        rows, columns = xs[0].shape
        total = sum(x.shape[dim] for x in xs)
        shape = (rows, total) if dim == -1 else (total, columns)
        out = _empty_matrix(xs[0], shape, dtype)
    if resolve_backend(backend, xs[0]) == "torch":
        _torch_cast(torch.cat(list(xs), dim), out)
    else:
        xs = [x.contiguous() for x in xs]
        largest = _empty_amax(xs[0], len(xs))
        for x, part in zip(xs, largest, strict=True):
            float8_amax(x, part)
        start = 0
        for x in xs:
            size = x.shape[dim]
            data, transposed = out.data.narrow(dim, start, size), out.transposed.narrow(-1 - dim, start, size)
            float8_cast(x, largest, data, transposed, out.inverse)
            start += size
    return out


def cast_swiglu(gate_up: Tensor, *, backend: str = "auto") -> Float8Matrix:
    """Return silu(gate) * up in E4M3, without its transpose.

    Args:
        gate_up: [M, 2 F], gate and up side by side.
    """
    rows, columns = gate_up.shape
    y = _empty_matrix(gate_up, (rows, columns // 2), E4M3, transpose=False)
    if resolve_backend(backend, gate_up) == "torch":
        gate, up = gate_up.float().chunk(2, -1)
        _torch_cast(F.silu(gate) * up, y)
    else:
        gate_up = gate_up.contiguous()
        largest = _empty_amax(gate_up)
        swiglu_amax(gate_up, None, largest)
        swiglu_cast(gate_up, largest, y.data, y.inverse)
    return y


def cast_swiglu_backward(
    gate_up: Tensor, dy: Tensor, inverse: Tensor, *, dtype: torch.dtype = E5M2, backend: str = "auto"
) -> tuple[Float8Matrix, Tensor]:
    """Return the gradient of gate_up with its transpose, and the transpose of `cast_swiglu`'s data.

    Args:
        gate_up: [M, 2 F].
        dy: [M, F], the gradient of silu(gate) * up.
        inverse: of `cast_swiglu`.
        dtype: of the gradient.
    """
    rows, columns = gate_up.shape
    d = _empty_matrix(gate_up, (rows, columns), dtype)
    y_transposed = gate_up.new_empty((columns // 2, rows), dtype=E4M3)
    if resolve_backend(backend, gate_up) == "torch":
        gate, up = gate_up.float().chunk(2, -1)
        sigmoid, silu = gate.sigmoid(), F.silu(gate)
        dy = dy.float()
        _torch_cast(torch.cat([dy * up * (sigmoid + silu * (1 - sigmoid)), dy * silu], -1), d)
        y_transposed.copy_(((silu * up).bfloat16() / inverse).t())
    else:
        gate_up, dy = gate_up.contiguous(), dy.contiguous()
        largest = _empty_amax(gate_up)
        swiglu_amax(gate_up, dy, largest)
        swiglu_backward_cast(gate_up, dy, inverse, largest, d.data, d.transposed, d.inverse, y_transposed)
    return d, y_transposed


def transpose_float8(x: Tensor, *, backend: str = "auto") -> Tensor:
    """Return the transpose of x [M, N] in memory."""
    y = x.new_empty(x.shape[::-1])
    if resolve_backend(backend, y.new_empty(0, dtype=torch.float32)) == "torch":
        y.copy_(x.t())
    else:
        float8_transpose(x.contiguous(), y)
    return y


def norm_scale(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Return the weight [D] of an RMSNorm times a scale for its output, and the inverse scale.

    The output is at most sqrt(D) times the largest weight, so that the scale needs no look at it. A bound
    above the largest magnitude costs no precision, only numbers of the least binades.
    """
    scale, inverse = scale_of(weight.abs().amax() * len(weight) ** 0.5, E4M3)
    return weight * scale, inverse


def scale_of(amax: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return the scale of a tensor of largest magnitude `amax`, and its inverse; NaN if it is not finite."""
    bits = amax.float().view(torch.int32)
    exponent = bits >> 23
    up = (TOP[dtype] + 254 - exponent).clamp(1, 253)
    inverse = ((254 - up) << 23).view(torch.float32)
    return (up << 23).view(torch.float32), torch.where(exponent == 255, torch.nan, inverse)


def _empty_matrix(
    x: Tensor, shape: tuple[int, int], dtype: torch.dtype, transpose: bool = True
) -> Float8Matrix:
    """Allocate a matrix on the device of x."""
    transposed = x.new_empty(shape[::-1], dtype=dtype) if transpose else None
    return Float8Matrix(x.new_empty(shape, dtype=dtype), transposed, x.new_empty((), dtype=torch.float32))


def _torch_cast(x: Tensor, out: Float8Matrix) -> None:
    """Fill `out` with x and, if `out` has one, its transpose."""
    scale, inverse = scale_of(x.abs().amax(), out.data.dtype)
    out.data.copy_(x.bfloat16() * scale)
    out.inverse.copy_(inverse)
    if out.transposed is not None:
        out.transposed.copy_(out.data.t())


def _empty_amax(x: Tensor, *count: int) -> Tensor:
    """Allocate the largest magnitudes that each program finds, as bits of fp32."""
    shape = (*count, AMAX_PROGRAMS_PER_PROCESSOR * processors(x.device))
    return torch.empty(shape, dtype=torch.int32, device=x.device)


@custom_op(mutates=("largest",))
def float8_amax(x: Tensor, largest: Tensor) -> None:
    """Fill `largest` [programs] with magnitudes of x, as bits of fp32."""
    n = x.numel()
    run_kernel(
        amax_kernel, (len(largest),), x=x, largest=largest, n=n,
        steps=ceil_div(n, AMAX_BLOCK * len(largest)), BLOCK=AMAX_BLOCK, num_warps=CAST_WARPS,
    )  # fmt: skip


@custom_op(mutates=("y", "transposed", "inverse"))
def float8_cast(x: Tensor, largest: Tensor, y: Tensor, transposed: Tensor, inverse: Tensor) -> None:
    """Fill y [M, N], its transpose, and the inverse scale that `largest` asks for."""
    rows, columns = x.shape
    run_kernel(
        cast_kernel, _grid(rows, columns, FP8_TILE), x=x, largest=largest, y=y, y_t=transposed,
        inverse=inverse, rows=rows, columns=columns, y_stride=y.stride(0), t_stride=transposed.stride(0),
        **_of_scale(largest, y), BM=FP8_TILE[0], BN=FP8_TILE[1], num_warps=CAST_WARPS,
    )  # fmt: skip


@custom_op(mutates=("y",))
def float8_transpose(x: Tensor, y: Tensor) -> None:
    """Fill y [N, M]."""
    rows, columns = x.shape
    run_kernel(
        transpose_cast_kernel, _grid(rows, columns, FP8_TILE), x=x.view(torch.int8), y=y.view(torch.int8),
        rows=rows, columns=columns, BM=FP8_TILE[0], BN=FP8_TILE[1], num_warps=CAST_WARPS,
    )  # fmt: skip


@custom_op(mutates=("largest",))
def swiglu_amax(gate_up: Tensor, dy: Tensor | None, largest: Tensor) -> None:
    """Fill `largest` [programs] with magnitudes of silu(gate) * up, or of its gradients if there is a dy."""
    rows, columns = len(gate_up), gate_up.shape[1] // 2
    tiles = _grid(rows, columns, ROWS_TILE)[0]
    run_kernel(
        swiglu_amax_kernel, (len(largest),), gate_up=gate_up, dy=dy, largest=largest, rows=rows,
        steps=ceil_div(tiles, len(largest)), D=columns, BM=ROWS_TILE[0], BN=ROWS_TILE[1],
        BACKWARD=dy is not None, num_warps=CAST_WARPS,
    )  # fmt: skip


@custom_op(mutates=("y", "inverse"))
def swiglu_cast(gate_up: Tensor, largest: Tensor, y: Tensor, inverse: Tensor) -> None:
    """Fill y and the inverse scale."""
    rows, columns = y.shape
    run_kernel(
        swiglu_cast_kernel, _grid(rows, columns, ROWS_TILE), gate_up=gate_up, largest=largest, y=y,
        inverse=inverse, rows=rows, **_of_scale(largest, y), D=columns, BM=ROWS_TILE[0], BN=ROWS_TILE[1],
        num_warps=CAST_WARPS,
    )  # fmt: skip


@custom_op(mutates=("d", "d_transposed", "d_inverse", "y_transposed"))
def swiglu_backward_cast(
    gate_up: Tensor, dy: Tensor, inverse: Tensor, largest: Tensor,
    d: Tensor, d_transposed: Tensor, d_inverse: Tensor, y_transposed: Tensor,
) -> None:  # fmt: skip
    """Fill the gradient of gate_up, its transpose and inverse scale, and the transpose of silu(gate) * up."""
    rows, columns = dy.shape
    run_kernel(
        swiglu_backward_cast_kernel, _grid(rows, columns, SWIGLU_TILE), gate_up=gate_up, dy=dy,
        inverse=inverse, largest=largest, d=d, d_t=d_transposed, d_inverse=d_inverse, y_t=y_transposed,
        rows=rows, **_of_scale(largest, d), D=columns, BM=SWIGLU_TILE[0], BN=SWIGLU_TILE[1],
        num_warps=CAST_WARPS,
    )  # fmt: skip


def _grid(rows: int, columns: int, tile: tuple[int, int]) -> tuple[int]:
    return (ceil_div(rows, tile[0]) * ceil_div(columns, tile[1]),)


def _of_scale(largest: Tensor, y: Tensor) -> dict[str, int]:
    count = largest.numel()
    return {"COUNT": count, "PADDED": next_power_of_2(count), "TOP": TOP[y.dtype]}


@triton.jit
def magnitude_bits(b_x):
    """Return bits of |x| in fp32: as integers they order as the numbers do, NaN above infinity."""
    return b_x.to(tl.float32).to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def load_scale(largest, COUNT: tl.constexpr, PADDED: tl.constexpr, TOP: tl.constexpr):
    """Load `scale_of` the largest of all programs."""
    o = tl.arange(0, PADDED)
    exponent = tl.max(tl.load(largest + o, mask=o < COUNT, other=0), 0) >> 23
    up = tl.minimum(tl.maximum(TOP + 254 - exponent, 1), 253)
    scale = (up << 23).to(tl.float32, bitcast=True)
    inverse = tl.where(exponent == 255, 0x7FC00000, (254 - up) << 23).to(tl.float32, bitcast=True)
    return scale, inverse


@triton.jit
def store_inverse(p, inverse):
    """Store the inverse scale, by the first program."""
    if tl.program_id(0) == 0:
        tl.store(p, inverse)


@triton.jit
def narrowed(b_x, scale, p):
    """Return b_x in bf16, scaled, in the float8 format of what `p` points at."""
    return (b_x.to(tl.float32) * scale).to(p.dtype.element_ty)


@triton.jit
def store_transposed(p, b_x, scale, o_m, o_n, mask, stride):
    """Store the transpose of b_x in bf16 as float8.

    It is transposed before it is narrowed: of float8 tiles, made of fp32, Triton 3.6 and ptxas 12.8 stored
    other bytes.
    """
    p += tl.trans(o_n).to(tl.int64) * stride + tl.trans(o_m)
    tl.store(p, narrowed(tl.trans(b_x), scale, p), mask=tl.trans(mask))


@triton.jit
def from_the_end(i, steps):
    """Return which block is step `i` of this program's `steps`.

    The data written last is still in the L2 cache, and so will be the data read last when the cast begins.
    """
    return (steps - i) * tl.num_programs(0) - 1 - tl.program_id(0)


@triton.jit(do_not_specialize=["steps"])
def amax_kernel(x, largest, n, steps, BLOCK: tl.constexpr):
    b_bits = tl.zeros((BLOCK,), tl.int32)
    for i in range(0, steps):
        o = from_the_end(i, steps).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
        b_bits = tl.maximum(b_bits, magnitude_bits(tl.load(x + o, mask=o < n, other=0.0)))
    tl.store(largest + tl.program_id(0), tl.max(b_bits, 0))


@triton.jit
def cast_kernel(
    x, largest,  # [rows, columns], [COUNT]
    y, y_t, inverse,  # out: rows of y_stride, rows of t_stride, scalar
    rows, columns, y_stride, t_stride,
    COUNT: tl.constexpr, PADDED: tl.constexpr, TOP: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    o_m, o_n, mask = matrix_tile(tl.program_id(0), rows, columns, BM, BN)
    b_x = tl.load(x + o_m * columns + o_n, mask=mask, other=0.0).to(tl.bfloat16)
    scale, inverse_scale = load_scale(largest, COUNT, PADDED, TOP)
    store_inverse(inverse, inverse_scale)
    tl.store(y + o_m * y_stride + o_n, narrowed(b_x, scale, y), mask=mask)
    store_transposed(y_t, b_x, scale, o_m, o_n, mask, t_stride)


@triton.jit
def transpose_cast_kernel(
    x, y, rows, columns, BM: tl.constexpr, BN: tl.constexpr  # [rows, columns], out [columns, rows]
):  # fmt: skip
    o_m, o_n, mask = matrix_tile(tl.program_id(0), rows, columns, BM, BN)
    b_x = tl.load(x + o_m * columns + o_n, mask=mask)
    tl.store(y + tl.trans(o_n).to(tl.int64) * rows + tl.trans(o_m), tl.trans(b_x), mask=tl.trans(mask))


@triton.jit
def load_gate_up(gate_up, o_m, o_n, mask, D: tl.constexpr):
    """Load both in fp32."""
    o = o_m * (2 * D) + o_n
    return load_tile(gate_up, o, mask), load_tile(gate_up, o + D, mask)


@triton.jit(do_not_specialize=["steps"])
def swiglu_amax_kernel(
    gate_up, dy, largest,  # [rows, 2 D]; [rows, D] with BACKWARD; out [programs]
    rows, steps,
    D: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BACKWARD: tl.constexpr,
):  # fmt: skip
    b_bits = tl.zeros((BM, BN), tl.int32)
    for i in range(0, steps):
        o_m, o_n, mask = matrix_tile(from_the_end(i, steps), rows, D, BM, BN)
        b_gate, b_up = load_gate_up(gate_up, o_m, o_n, mask, D)
        if BACKWARD:
            b_dy = load_tile(dy, o_m * D + o_n, mask)
            b_dgate, b_dup, _ = swiglu_gradients(b_gate, b_up, b_dy)
            b_bits = tl.maximum(b_bits, tl.maximum(magnitude_bits(b_dgate), magnitude_bits(b_dup)))
        else:
            b_bits = tl.maximum(b_bits, magnitude_bits(b_gate * sigmoid(b_gate) * b_up))
    tl.store(largest + tl.program_id(0), tl.max(tl.max(b_bits, 1), 0))


@triton.jit
def swiglu_cast_kernel(
    gate_up, largest, y, inverse,  # [rows, 2 D], [COUNT], out [rows, D], out scalar
    rows,
    COUNT: tl.constexpr, PADDED: tl.constexpr, TOP: tl.constexpr,
    D: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    o_m, o_n, mask = matrix_tile(tl.program_id(0), rows, D, BM, BN)
    b_gate, b_up = load_gate_up(gate_up, o_m, o_n, mask, D)
    scale, inverse_scale = load_scale(largest, COUNT, PADDED, TOP)
    store_inverse(inverse, inverse_scale)
    b_y = (b_gate * sigmoid(b_gate) * b_up).to(tl.bfloat16)
    tl.store(y + o_m * D + o_n, narrowed(b_y, scale, y), mask=mask)


@triton.jit
def swiglu_backward_cast_kernel(
    gate_up, dy, inverse, largest,  # [rows, 2 D], [rows, D], scalar of the forward pass, [COUNT]
    d, d_t, d_inverse, y_t,  # out: [rows, 2 D], [2 D, rows], scalar, [D, rows]
    rows,
    COUNT: tl.constexpr, PADDED: tl.constexpr, TOP: tl.constexpr,
    D: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    o_m, o_n, mask = matrix_tile(tl.program_id(0), rows, D, BM, BN)
    b_gate, b_up = load_gate_up(gate_up, o_m, o_n, mask, D)
    b_dy = load_tile(dy, o_m * D + o_n, mask)
    scale, inverse_scale = load_scale(largest, COUNT, PADDED, TOP)
    store_inverse(d_inverse, inverse_scale)
    y_scale = ((254 << 23) - tl.load(inverse).to(tl.int32, bitcast=True)).to(tl.float32, bitcast=True)
    b_dgate, b_dup, b_y = swiglu_gradients(b_gate, b_up, b_dy)
    store_transposed(y_t, b_y.to(tl.bfloat16), y_scale, o_m, o_n, mask, rows)
    p_d = d + o_m * (2 * D) + o_n
    b_dgate, b_dup = b_dgate.to(tl.bfloat16), b_dup.to(tl.bfloat16)
    tl.store(p_d, narrowed(b_dgate, scale, d), mask=mask)
    store_transposed(d_t, b_dgate, scale, o_m, o_n, mask, rows)
    tl.store(p_d + D, narrowed(b_dup, scale, d), mask=mask)
    store_transposed(d_t, b_dup, scale, o_m, o_n + D, mask, rows)
