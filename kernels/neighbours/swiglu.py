"""The end of a gated MLP: silu(gate) * up, and the linear layer that takes it."""

import torch
import torch.nn.functional as F
from torch import Tensor

from fla_train.kernels.neighbours.backend import resolve_backend


def swiglu_linear(gate: Tensor, up: Tensor, weight: Tensor, *, backend: str = "auto") -> Tensor:
    """(silu(gate) * up) weight^T, differentiable in all three.

    The triton backend computes the product in float32 and keeps only its factors: the backward pass, which
    reads them anyway, makes it anew for the gradient of `weight`. That saves a third of what an MLP keeps.

    Args:
        gate, up: [..., D], of one shape and dtype.
        weight: [D_out, D]; taken in the dtype of `gate`.
        backend: "torch", "triton" or "auto" (see `resolve_backend`).

    Returns:
        [..., D_out] in the dtype of `gate`.

    Raises:
        ValueError: when shapes or dtypes do not fit, or for a backend that cannot run.
    """
    if gate.shape != up.shape or gate.dtype != up.dtype:
        raise ValueError(
            f"gate is {gate.dtype} {list(gate.shape)}, up is {up.dtype} {list(up.shape)}: expected alike"
        )
    if weight.dim() != 2 or weight.shape[1] != gate.shape[-1]:
        raise ValueError(f"weight has shape {list(weight.shape)}: expected [D_out, {gate.shape[-1]}]")
    if resolve_backend(backend, gate) == "triton":
        from fla_train.kernels.neighbours.swiglu_triton import triton_swiglu_linear

        return triton_swiglu_linear(gate, up, weight)
    with torch.autocast(gate.device.type, enabled=False):
        return F.linear(F.silu(gate) * up, weight.to(gate.dtype))
