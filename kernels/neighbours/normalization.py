"""RMSNorm in its three places: alone, after a residual addition, and gated per head."""

import torch
import torch.nn.functional as F
from torch import Tensor

from fla_train.kernels.neighbours.backend import resolve_backend

MAX_SIZE = 16384  # of the Triton kernels, which hold a row in registers


def rms_norm(
    x: Tensor,
    weight: Tensor,
    eps: float,
    *,
    gate: Tensor | None = None,
    dtype: torch.dtype | None = None,
    backend: str = "auto",
) -> Tensor:
    """weight * x / sqrt(mean(x^2) + eps) over the last axis, times silu(gate) if there is one, in fp32.

    Args:
        x: [..., D].
        weight: [D].
        gate: of the shape of `x`.
        dtype: of the result, default that of `x`.
        backend: "torch", "triton" or "auto" (see `resolve_backend`).

    Returns:
        [..., D], differentiable in all tensors (float64 input is computed in float64, by torch).

    Raises:
        ValueError: for shapes that do not fit, or a backend that cannot run.
    """
    dtype = x.dtype if dtype is None else dtype
    if _resolve(backend, x, weight, "gate", gate) == "triton":
        from fla_train.kernels.neighbours.normalization_triton import triton_rms_norm

        return triton_rms_norm(x, weight, eps, gate, dtype)
    wide = torch.promote_types(x.dtype, torch.float32)
    y = F.rms_norm(x.to(wide), weight.shape, weight.to(wide), eps)
    if gate is not None:
        y = y * F.silu(gate.to(wide))
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
    """`rms_norm` of residual + x, and that sum: the next residual, in the dtype both promote to.

    Arguments and errors are those of `rms_norm`; `residual` has the shape of `x`. The norm sees the sum as it
    is rounded to its dtype; `dtype` defaults to that.
    """
    if _resolve(backend, x, weight, "residual", residual) == "triton":
        from fla_train.kernels.neighbours.normalization_triton import triton_add_rms_norm

        return triton_add_rms_norm(x, residual, weight, eps, dtype)
    total = residual + x
    return rms_norm(total, weight, eps, dtype=dtype, backend="torch"), total


def _resolve(backend: str, x: Tensor, weight: Tensor, name: str, other: Tensor | None) -> str:
    size = x.shape[-1]
    if weight.shape != (size,):
        raise ValueError(f"weight has shape {list(weight.shape)}, expected [D] = {[size]}")
    if other is not None and other.shape != x.shape:
        raise ValueError(f"{name} has shape {list(other.shape)}, expected that of x, {list(x.shape)}")
    return resolve_backend(
        backend, x, None if size <= MAX_SIZE else f"takes at most {MAX_SIZE} channels, got {size}"
    )
