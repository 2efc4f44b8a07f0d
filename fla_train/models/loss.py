"""Cross-entropy of a linear head, in token chunks: the full [tokens, vocabulary] logits are never made."""

import torch
import torch.nn.functional as F
from torch import Tensor

from fla_train.kernels.fused_ops import IGNORE, consume_logits, resolve_backend
from fla_train.kernels.weight_gradient import add_weight_gradient
from fla_train.models.layer_sizes import CHUNK_ELEMENTS


def next_tokens(labels: Tensor) -> Tensor:
    """The target of each position: labels [B, T] moved one to the left, IGNORE at the end."""
    return F.pad(labels[:, 1:], (0, 1), value=IGNORE)


def target_count(targets: Tensor, given: int | Tensor | None = None) -> int | Tensor:
    """Return the divisor of a summed loss: `given` by the caller, or the number of `targets`.

    Without any target it is 1, not 0: the loss and its gradients are then 0, where 0 / 0 would be NaN.
    """
    count = (targets != IGNORE).sum() if given is None else given
    return count + (count == 0)  # not a clamp: ranks that average gradients may give a count below 1


def token_losses(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    """-log softmax(hidden @ weight^T)[target] for each row, in fp32 and without gradients; 0 at IGNORE.

    Args:
        hidden: [M, D]; weight: [vocabulary, D]; targets: [M] int64.
    """
    head = weight.to(hidden.dtype)
    with torch.no_grad(), torch.autocast(hidden.device.type, enabled=False):
        chunks = _chunks(hidden, targets, weight.shape[0])
        return torch.cat([consume_logits(h @ head.t(), t, with_gradient=False)[0] for h, t in chunks])


def losses_of_logits(logits: Tensor, targets: Tensor) -> Tensor:
    """[M] losses of logits [M, vocabulary] that a head has made, in fp32 or fp64; 0 at IGNORE."""
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return F.cross_entropy(logits, targets.to(logits.device), reduction="none", ignore_index=IGNORE)


def linear_cross_entropy(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    """Sum over the rows of -log softmax(hidden @ weight^T)[target], a scalar in fp32 (fp64 for fp64 input).

    Gradients are computed in the forward pass from a chunk's logits, so the head costs three matmuls and its
    logits are never recomputed. Matmuls run in the dtype of `hidden`; log-sum-exp, and the
    sum of the weight's gradient over chunks, in fp32.

    Args:
        hidden: [M, D]; weight: [vocabulary, D]; targets: [M] int64, IGNORE where there is none.
    """
    if torch.is_grad_enabled() and (hidden.requires_grad or weight.requires_grad):
        return _LinearCrossEntropy.apply(hidden, weight, targets)
    return token_losses(hidden, weight, targets).sum()


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
        head = weight.to(hidden.dtype)
        wide = torch.promote_types(hidden.dtype, torch.float32)
        grad_hidden = torch.empty_like(hidden)
        grad_weight = torch.zeros_like(weight, dtype=wide)
        total = torch.zeros((), dtype=wide, device=hidden.device)
        start = 0
        with torch.autocast(hidden.device.type, enabled=False):
            for h, t in _chunks(hidden, targets, weight.shape[0]):
                losses, slope = consume_logits(h @ head.t(), t, with_gradient=True)
                total = total + losses.sum()  # torch.compile of torch 2.11 gives += no gradient
                torch.mm(slope, head, out=grad_hidden[start : start + len(h)])
                add_weight_gradient(grad_weight, slope, h)
                start += len(h)
        ctx.save_for_backward(grad_hidden, grad_weight.to(weight.dtype))
        return total

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad_total: Tensor) -> tuple[Tensor, Tensor, None]:
        # In fp32: the factor, usually 1 / targets, rounded to bf16 would bias every gradient of the backbone.
        grad_hidden, grad_weight = (
            (grad.to(grad_total.dtype) * grad_total).to(grad.dtype) for grad in ctx.saved_tensors
        )
        return grad_hidden, grad_weight, None


def _chunks(hidden: Tensor, targets: Tensor, vocabulary: int) -> list[tuple[Tensor, Tensor]]:
    elements = CHUNK_ELEMENTS
    if resolve_backend("auto", hidden) == "triton":  # in place: more logits in as many bytes
        elements *= 8 // hidden.element_size()
    rows = max(1, elements // vocabulary)
    return list(zip(hidden.split(rows), targets.split(rows), strict=True))
