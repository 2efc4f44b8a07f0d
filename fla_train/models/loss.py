"""Cross-entropy of a linear head, in token chunks: the full [tokens, vocabulary] logits are never made."""

import torch
import torch.nn.functional as F
from torch import Tensor

from fla_train.kernels.fused_ops.backend import resolve_backend, without_autocast
from fla_train.kernels.fused_ops.cross_entropy import IGNORE, consume_logits
from fla_train.kernels.weight_gradient import add_weight_gradient
from fla_train.models.layer_sizes import CHUNK_ELEMENTS


def next_tokens(labels: Tensor) -> Tensor:
    """Return the target of each position: labels [B, T] shifted by one to the left, IGNORE at the end."""
    return F.pad(labels[:, 1:], (0, 1), value=IGNORE)


def target_count(targets: Tensor, count: int | Tensor | None = None) -> int | Tensor:
    """Return the divisor of a summed loss: `count` of the caller, or the number of `targets`.

    0 becomes 1, so that a batch without targets has loss and gradients 0 instead of NaN.
    """
    count = (targets != IGNORE).sum() if count is None else count
    return count + (count == 0)  # not a clamp: ranks that average gradients may pass a count below 1


def token_losses(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    """Compute -log softmax(hidden @ weight^T)[target] per row, in fp32 and without gradients; 0 at IGNORE.

    Args:
        hidden: [M, D]; weight: [vocabulary, D]; targets: [M] int64.
    """
    head = weight.to(hidden.dtype)
    with torch.no_grad(), without_autocast(hidden):
        chunks = _chunks(hidden, targets, weight.shape[0])
        return torch.cat([consume_logits(h @ head.t(), t, with_gradient=False)[0] for h, t in chunks])


def losses_of_logits(logits: Tensor, targets: Tensor) -> Tensor:
    """Return the [M] losses of logits [M, vocabulary], in fp32 or fp64; 0 at IGNORE."""
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return F.cross_entropy(logits, targets.to(logits.device), reduction="none", ignore_index=IGNORE)


def linear_cross_entropy(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    """Sum -log softmax(hidden @ weight^T)[target] over the rows, a scalar in fp32 (fp64 for fp64 input).

    The forward pass computes the gradients from each chunk's logits, so the head costs three matrix products
    and its logits are never recomputed. Products run in the dtype of `hidden`; log-sum-exp, and the sum of
    the weight's gradient over chunks, in fp32.

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
        with without_autocast(hidden):
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
        # In fp32, because the factor (usually 1 / targets) rounded to bf16 would bias all gradients.
        grad_hidden, grad_weight = (
            (grad.to(grad_total.dtype) * grad_total).to(grad.dtype) for grad in ctx.saved_tensors
        )
        return grad_hidden, grad_weight, None


def _chunks(hidden: Tensor, targets: Tensor, vocabulary: int) -> list[tuple[Tensor, Tensor]]:
    elements = CHUNK_ELEMENTS
    if resolve_backend("auto", hidden) == "triton":  # works in place: more logits in the same memory
        elements *= 8 // hidden.element_size()
    rows = max(1, elements // vocabulary)
    return list(zip(hidden.split(rows), targets.split(rows), strict=True))
