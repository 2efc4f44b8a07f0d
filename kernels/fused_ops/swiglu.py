"""SwiGLU with the linear layer after it, (silu(gate) * up) W^T: PyTorch definition and Triton kernels.

The Triton version keeps nothing but its inputs for the backward pass.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from fla_train.kernels.custom_op import custom_op
from fla_train.kernels.fused_ops.backend import resolve_backend, without_autocast
from fla_train.kernels.fused_ops.rms_norm import load_tile, store_tile
from fla_train.kernels.fused_ops.side_by_side import as_rows, empty_gradient, row_stride
from fla_train.kernels.fused_ops.sigmoid import sigmoid
from fla_train.kernels.optional_triton import tl, triton
from fla_train.kernels.sizes import ceil_div, next_power_of_2
from fla_train.kernels.weight_gradient import weight_gradient

SWIGLU_ELEMENTS = 2048  # elements per program of the Triton kernels
MAX_COLUMNS = 256  # columns of a program's tile, at most
SWIGLU_WARPS = 4


def swiglu_linear(gate: Tensor, up: Tensor, weight: Tensor, *, backend: str = "auto") -> Tensor:
    """Return (silu(gate) * up) weight^T, differentiable in all three.

    The triton backend computes the product in float32 and keeps only its factors. The backward pass reads
    them anyway and recomputes the product for the gradient of `weight`: a third less memory for an MLP.

    Args:
        gate, up: [..., D], of the same shape and dtype.
        weight: [D_out, D]; cast to the dtype of `gate`.
        backend: "torch", "triton" or "auto" (see `resolve_backend`).

    Returns:
        [..., D_out] in the dtype of `gate`.

    Raises:
        ValueError: a backend that is unknown or cannot run.
    """
    assert gate.shape == up.shape and gate.dtype == up.dtype and weight.shape[1] == gate.shape[-1]
    if resolve_backend(backend, gate) == "triton":
        return _SwiGLULinear.apply(gate, up, weight)
    with without_autocast(gate):
        return F.linear(F.silu(gate) * up, weight.to(gate.dtype))


class _SwiGLULinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, gate, up, weight):
        gate, up, narrow = as_rows(gate), as_rows(up), weight.to(gate.dtype)
        y = gate.new_empty(gate.shape)
        swiglu_forward(gate, up, y)
        ctx.save_for_backward(gate, up, narrow)
        ctx.weight_dtype = weight.dtype
        with without_autocast(gate):
            return F.linear(y, narrow)

    @staticmethod
    @once_differentiable
    def backward(ctx, dz):
        gate, up, weight = ctx.saved_tensors
        dweight = None
        with without_autocast(gate):
            dgate, dup, product = empty_gradient(gate), empty_gradient(up), dz @ weight
            swiglu_backward(gate, up, product, dgate, dup)
            if ctx.needs_input_grad[2]:
                rows = dz.reshape(-1, dz.shape[-1]), product.reshape(-1, product.shape[-1])
                dweight = weight_gradient(*rows, ctx.weight_dtype)
        return dgate, dup, dweight


@custom_op(mutates=("y",))
def swiglu_forward(gate: Tensor, up: Tensor, y: Tensor) -> None:
    """Fill y."""
    grid, sizes = _swiglu_launch(y, gate=gate, up=up)
    swiglu_forward_kernel[grid](gate, up, y, **sizes)


@custom_op(mutates=("product", "dgate", "dup"))
def swiglu_backward(gate: Tensor, up: Tensor, product: Tensor, dgate: Tensor, dup: Tensor) -> None:
    """Fill the gradients; `product` enters as the gradient of silu(gate) * up and leaves as that product."""
    grid, sizes = _swiglu_launch(product, gate=gate, up=up, dgate=dgate, dup=dup)
    swiglu_backward_kernel[grid](gate, up, product, dgate, dup, **sizes)


def _swiglu_launch(y: Tensor, **others: Tensor) -> tuple[tuple[int], dict[str, Any]]:
    """Return grid (blocks of columns fastest) and sizes for y [..., D]; others have separate row strides."""
    size = y.shape[-1]
    columns = min(MAX_COLUMNS, next_power_of_2(size))
    tile_rows, rows = SWIGLU_ELEMENTS // columns, y.numel() // size
    sizes = {"n_rows": rows, "D": size, "BR": tile_rows, "BD": columns, "num_warps": SWIGLU_WARPS}
    strides = {f"S_{name}": row_stride(x) for name, x in others.items()}
    return (ceil_div(rows, tile_rows) * ceil_div(size, columns),), sizes | strides


@triton.jit
def matrix_tile(i_tile, rows, columns, BM: tl.constexpr, BN: tl.constexpr):
    """Return rows [BM, 1] and columns [1, BN] of tile `i_tile`, and which of them exist [BM, BN]."""
    n_across = tl.cdiv(columns, BN)
    o_m = (i_tile // n_across).to(tl.int64) * BM + tl.arange(0, BM)
    o_n = (i_tile % n_across) * BN + tl.arange(0, BN)
    return o_m[:, None], o_n[None, :], (o_m < rows)[:, None] & (o_n < columns)[None, :]


@triton.jit
def swiglu_gradients(b_gate, b_up, b_dy):
    """Return gradients of gate and up, and silu(gate) * up."""
    b_sigmoid = sigmoid(b_gate)
    b_silu = b_gate * b_sigmoid
    return b_dy * b_up * (b_sigmoid + b_silu * (1.0 - b_sigmoid)), b_dy * b_silu, b_silu * b_up


@triton.jit(do_not_specialize=["n_rows"])
def swiglu_forward_kernel(
    gate, up, y,  # [rows, D], [rows, D], out [rows, D]
    n_rows,
    D: tl.constexpr, BR: tl.constexpr, BD: tl.constexpr, S_gate: tl.constexpr, S_up: tl.constexpr,
):  # fmt: skip
    o_r, o_d, mask = matrix_tile(tl.program_id(0), n_rows, D, BR, BD)
    b_gate, b_up = load_tile(gate + o_r * S_gate, o_d, mask), load_tile(up + o_r * S_up, o_d, mask)
    store_tile(y + o_r * D, o_d, b_gate * sigmoid(b_gate) * b_up, mask)


@triton.jit(do_not_specialize=["n_rows"])
def swiglu_backward_kernel(
    gate, up, product, dgate, dup,  # [rows, D]; product is read and written, dgate and dup are written
    n_rows,
    D: tl.constexpr, BR: tl.constexpr, BD: tl.constexpr,
    S_gate: tl.constexpr, S_up: tl.constexpr, S_dgate: tl.constexpr, S_dup: tl.constexpr,
):  # fmt: skip
    o_r, o_d, mask = matrix_tile(tl.program_id(0), n_rows, D, BR, BD)
    p_product = product + o_r * D
    b_gate, b_up = load_tile(gate + o_r * S_gate, o_d, mask), load_tile(up + o_r * S_up, o_d, mask)
    b_dgate, b_dup, b_y = swiglu_gradients(b_gate, b_up, load_tile(p_product, o_d, mask))
    store_tile(dgate + o_r * S_dgate, o_d, b_dgate, mask)
    store_tile(dup + o_r * S_dup, o_d, b_dup, mask)
    store_tile(p_product, o_d, b_y, mask)
