"""Gradient of a linear layer's weight as one matrix product that writes the weight's dtype."""

import torch
from torch import Tensor


def weight_gradient(dy: Tensor, x: Tensor, dtype: torch.dtype) -> Tensor:
    """Return dy^T x of dy [rows, out] and x [rows, in], as [out, in] in `dtype`.

    For a float32 weight under autocast a GPU's product writes its fp32 sums directly. They are not rounded to
    16 bits, and no second pass casts them.
    """
    if _writes_float32(dy, dtype):
        return torch.mm(dy.t(), x, out_dtype=dtype)
    return (dy.t() @ x).to(dtype)


def add_weight_gradient(total: Tensor, dy: Tensor, x: Tensor) -> None:
    """Add dy^T x to `total` [out, in]. A GPU's product adds its fp32 sums to it directly."""
    if _writes_float32(dy, total.dtype):
        torch.addmm(total, dy.t(), x, out_dtype=total.dtype, out=total)
    else:
        total += dy.t() @ x


def _writes_float32(dy: Tensor, dtype: torch.dtype) -> bool:
    half = dy.dtype in (torch.bfloat16, torch.float16)
    return dy.is_cuda and half and dtype == torch.float32 and not torch.compiler.is_compiling()
