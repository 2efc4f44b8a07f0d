"""SwiGLU with the linear layer after it, (silu(gate) * up) W^T: PyTorch definition and Triton kernels.

The Triton version keeps nothing but its inputs for the backward pass.
"""

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from fla_train.kernels.custom_op import custom_op
from fla_train.kernels.fused_ops.backend import resolve_backend
from fla_train.kernels.optional_triton import tl, triton
from fla_train.kernels.sizes import ceil_div

BLOCK = 2048  # elements per program of the Triton kernels


def swiglu_linear(gate: Tensor, up: Tensor, weight: Tensor, *, backend: str = "auto") -> Tensor:
    """(silu(gate) * up) weight^T, differentiable in all three.

    The triton backend computes the product in float32 and keeps only its factors. The backward pass reads
    them anyway and recomputes the product for the gradient of `weight`: a third less memory for an MLP.

    Args:
        gate, up: [..., D], of the same shape and dtype.
        weight: [D_out, D]; taken in the dtype of `gate`.
        backend: "torch", "triton" or "auto" (see `resolve_backend`).

    Returns:
        [..., D_out] in the dtype of `gate`.

    Raises:
        ValueError: when shapes or dtypes do not fit, or for a backend that cannot run.
    """
    if gate.shape != up.shape or gate.dtype != up.dtype:
        raise ValueError(
            f"gate is {gate.dtype} {list(gate.shape)}, up is {up.dtype} {list(up.shape)}: expected the same"
        )
    if weight.dim() != 2 or weight.shape[1] != gate.shape[-1]:
        raise ValueError(f"weight has shape {list(weight.shape)}: expected [D_out, {gate.shape[-1]}]")
    if resolve_backend(backend, gate) == "triton":
        return _SwiGLULinear.apply(gate, up, weight)
    with torch.autocast(gate.device.type, enabled=False):
        return F.linear(F.silu(gate) * up, weight.to(gate.dtype))


class _SwiGLULinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, gate, up, weight):
        gate, up, narrow = gate.contiguous(), up.contiguous(), weight.to(gate.dtype)
        y = torch.empty_like(gate)
        swiglu_forward(gate, up, y)
        ctx.save_for_backward(gate, up, narrow)
        ctx.weight_dtype = weight.dtype
        with torch.autocast(gate.device.type, enabled=False):
            return F.linear(y, narrow)

    @staticmethod
    @once_differentiable
    def backward(ctx, dz):
        gate, up, weight = ctx.saved_tensors
        dweight = None
        with torch.autocast(gate.device.type, enabled=False):
            dgate, dup, product = torch.empty_like(gate), torch.empty_like(up), dz @ weight
            swiglu_backward(gate, up, product, dgate, dup)
            if ctx.needs_input_grad[2]:
                rows = dz.reshape(-1, dz.shape[-1]), product.reshape(-1, product.shape[-1])
                dweight = (rows[0].t() @ rows[1]).to(ctx.weight_dtype)
        return dgate, dup, dweight


@custom_op(mutates=("y",))
def swiglu_forward(gate: Tensor, up: Tensor, y: Tensor) -> None:
    """Fill y."""
    with torch.cuda.device_of(gate):
        forward_kernel[(ceil_div(y.numel(), BLOCK),)](gate, up, y, y.numel(), BLOCK)


@custom_op(mutates=("product", "dgate", "dup"))
def swiglu_backward(gate: Tensor, up: Tensor, product: Tensor, dgate: Tensor, dup: Tensor) -> None:
    """Fill the gradients; `product` enters as the gradient of silu(gate) * up and leaves as that product."""
    with torch.cuda.device_of(gate):
        n = product.numel()
        backward_kernel[(ceil_div(n, BLOCK),)](gate, up, product, dgate, dup, n, BLOCK)


@triton.jit
def block(n, BLOCK: tl.constexpr):
    """Offsets and mask of this program's elements."""
    o = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    return o, o < n


@triton.jit
def forward_kernel(gate, up, y, n, BLOCK: tl.constexpr):
    o, mask = block(n, BLOCK)
    b_gate = tl.load(gate + o, mask=mask, other=0.0).to(tl.float32)
    b_up = tl.load(up + o, mask=mask, other=0.0).to(tl.float32)
    tl.store(y + o, (b_gate * tl.sigmoid(b_gate) * b_up).to(y.dtype.element_ty), mask=mask)


@triton.jit
def backward_kernel(gate, up, product, dgate, dup, n, BLOCK: tl.constexpr):
    o, mask = block(n, BLOCK)
    b_gate = tl.load(gate + o, mask=mask, other=0.0).to(tl.float32)
    b_up = tl.load(up + o, mask=mask, other=0.0).to(tl.float32)
    b_dy = tl.load(product + o, mask=mask, other=0.0).to(tl.float32)
    b_sigmoid = tl.sigmoid(b_gate)
    b_silu = b_gate * b_sigmoid
    b_slope = b_sigmoid + b_silu * (1.0 - b_sigmoid)
    tl.store(dgate + o, (b_dy * b_up * b_slope).to(dgate.dtype.element_ty), mask=mask)
    tl.store(dup + o, (b_dy * b_silu).to(dup.dtype.element_ty), mask=mask)
    tl.store(product + o, (b_silu * b_up).to(product.dtype.element_ty), mask=mask)
