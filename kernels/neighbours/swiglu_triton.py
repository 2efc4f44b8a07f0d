"""SwiGLU in Triton. The backward recomputes silu(gate), so that nothing but the two inputs is kept."""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from fla_train.kernels.opaque import opaque
from fla_train.kernels.sizes import ceil_div

BLOCK = 2048  # elements per program


def triton_swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """`swiglu` on checked inputs."""
    return _SwiGLU.apply(gate, up)


class _SwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        gate, up = gate.contiguous(), up.contiguous()
        y = torch.empty_like(gate)
        swiglu_forward(gate, up, y)
        ctx.save_for_backward(gate, up)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor]:
        gate, up = ctx.saved_tensors
        dgate, dup = torch.empty_like(gate), torch.empty_like(up)
        swiglu_backward(gate, up, dy.contiguous(), dgate, dup)
        return dgate, dup


@opaque(mutates=("y",))
def swiglu_forward(gate: Tensor, up: Tensor, y: Tensor) -> None:
    """Fill y."""
    with torch.cuda.device_of(gate):
        forward_kernel[(ceil_div(y.numel(), BLOCK),)](gate, up, y, y.numel(), BLOCK)


@opaque(mutates=("dgate", "dup"))
def swiglu_backward(gate: Tensor, up: Tensor, dy: Tensor, dgate: Tensor, dup: Tensor) -> None:
    """Fill the gradients."""
    with torch.cuda.device_of(gate):
        backward_kernel[(ceil_div(dy.numel(), BLOCK),)](gate, up, dy, dgate, dup, dy.numel(), BLOCK)


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
def backward_kernel(gate, up, dy, dgate, dup, n, BLOCK: tl.constexpr):
    o, mask = block(n, BLOCK)
    b_gate = tl.load(gate + o, mask=mask, other=0.0).to(tl.float32)
    b_up = tl.load(up + o, mask=mask, other=0.0).to(tl.float32)
    b_dy = tl.load(dy + o, mask=mask, other=0.0).to(tl.float32)
    b_sigmoid = tl.sigmoid(b_gate)
    b_silu = b_gate * b_sigmoid
    b_slope = b_sigmoid + b_silu * (1.0 - b_sigmoid)
    tl.store(dgate + o, (b_dy * b_up * b_slope).to(dgate.dtype.element_ty), mask=mask)
    tl.store(dup + o, (b_dy * b_silu).to(dup.dtype.element_ty), mask=mask)
