"""silu(gate) * up, the product inside a gated MLP."""

import torch.nn.functional as F
from torch import Tensor

from fla_train.kernels.neighbours.backend import resolve_backend


def swiglu(gate: Tensor, up: Tensor, *, backend: str = "auto") -> Tensor:
    """silu(gate) * up, elementwise and differentiable in both; the triton backend computes in float32.

    Args:
        gate, up: of one shape and dtype.
        backend: "torch", "triton" or "auto" (see `resolve_backend`).

    Raises:
        ValueError: when the shapes or dtypes differ, or for a backend that cannot run.
    """
    if gate.shape != up.shape or gate.dtype != up.dtype:
        raise ValueError(
            f"gate is {gate.dtype} {list(gate.shape)}, up is {up.dtype} {list(up.shape)}: expected alike"
        )
    if resolve_backend(backend, gate) == "triton":
        from fla_train.kernels.neighbours.swiglu_triton import triton_swiglu

        return triton_swiglu(gate, up)
    return F.silu(gate) * up
