"""Cross-entropy of logits that nobody needs afterwards, with its gradient while they are at hand."""

import torch
from torch import Tensor

from fla_train.kernels.neighbours.backend import resolve_backend

IGNORE = -100  # target of a row that has none, as in torch and transformers


def consume_logits(
    logits: Tensor, targets: Tensor, *, with_gradient: bool, backend: str = "auto"
) -> tuple[Tensor, Tensor | None]:
    """-log softmax(logits)[target] of each row, and the gradient of their sum; not differentiable itself.

    Args:
        logits: [M, V]; the caller gives them up: they may be overwritten, by the gradient if it is asked for.
        targets: [M] int64; a row of IGNORE has no loss and no gradient.
        with_gradient: also return softmax(logits) - onehot(target).
        backend: "torch", "triton" or "auto" (see `resolve_backend`).

    Returns:
        Losses [M] in float32 (float64 for float64 logits), which is also what both are computed in; the
        gradient [M, V] in the dtype of the logits, or None.

    Raises:
        ValueError: for shapes that do not fit, or a backend that cannot run.
    """
    if logits.dim() != 2 or targets.shape != logits.shape[:1]:
        raise ValueError(
            f"logits have shape {list(logits.shape)}, targets {list(targets.shape)}: expected [M, V] and [M]"
        )
    if resolve_backend(backend, logits) == "triton":
        from fla_train.kernels.neighbours.cross_entropy_triton import triton_consume_logits

        return triton_consume_logits(logits, targets, with_gradient)
    wide = torch.promote_types(logits.dtype, torch.float32)
    absent = targets == IGNORE
    index = targets.masked_fill(absent, 0)[:, None]
    if not with_gradient:
        logits = logits.to(wide)
        logits -= logits.amax(-1, keepdim=True)  # in place: there is no second copy
        chosen = logits.gather(1, index)[:, 0]
        return (logits.exp_().sum(-1).log_() - chosen).masked_fill_(absent, 0.0), None
    log_probs = torch.log_softmax(logits, -1, dtype=wide)
    losses = -log_probs.gather(1, index)[:, 0].masked_fill(absent, 0.0)
    gradient = log_probs.exp_()
    gradient.scatter_add_(1, index, gradient.new_full(index.shape, -1.0))
    return losses, gradient.mul_(~absent[:, None]).to(logits.dtype)
