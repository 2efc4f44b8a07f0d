"""The recurrence's scalars from their projections: step sizes beta and log decays g, in fp32."""

import torch
import torch.nn.functional as F
from torch import Tensor

from fla_train.kernels.neighbours.backend import resolve_backend


def recurrence_gates(
    b: Tensor,
    a: Tensor | None,
    A_log: Tensor | None,
    dt_bias: Tensor | None,
    *,
    beta_max: float,
    backend: str = "auto",
) -> tuple[Tensor, Tensor | None]:
    """beta = beta_max sigmoid(b) and g = -exp(A_log) softplus(a + dt_bias), differentiable in all tensors.

    Args:
        b: [..., steps]; a: [..., heads], or None without forget gate.
        A_log, dt_bias: [heads], None with `a`.
        beta_max: 1, or 2 for eigenvalues in [-1, 1].
        backend: "torch", "triton" or "auto" (see `resolve_backend`).

    Returns:
        beta and g (or None) in the shapes of `b` and `a`, float32 (float64 for float64 input).

    Raises:
        ValueError: when only some of `a`, `A_log` and `dt_bias` are given, for shapes that do not fit, or a
            backend that cannot run.
    """
    if len({x is None for x in (a, A_log, dt_bias)}) > 1:
        raise ValueError("a, A_log and dt_bias make the forget gate together: give all of them or none")
    if a is not None:
        heads = a.shape[-1]
        if a.shape[:-1] != b.shape[:-1] or {A_log.shape, dt_bias.shape} != {(heads,)}:
            shapes = ", ".join(str(list(x.shape)) for x in (b, a, A_log, dt_bias))
            raise ValueError(
                f"b, a, A_log, dt_bias have shapes {shapes}: "
                "expected [..., steps], [..., heads], [heads], [heads]"
            )
    if resolve_backend(backend, b) == "triton":
        from fla_train.kernels.neighbours.gates_triton import triton_recurrence_gates

        return triton_recurrence_gates(b, a, A_log, dt_bias, beta_max)
    wide = torch.promote_types(b.dtype, torch.float32)
    beta = beta_max * torch.sigmoid(b.to(wide))
    if a is None:
        return beta, None
    return beta, -A_log.to(wide).exp() * F.softplus(a.to(wide) + dt_bias.to(wide))
