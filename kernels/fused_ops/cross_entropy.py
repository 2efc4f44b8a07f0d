"""Cross-entropy with its gradient in one pass, overwriting the logits: PyTorch definition and Triton kernel.

Triton: a program reads its row for the log-sum-exp, then overwrites it by its gradient. The second reading
may find the row in the L2 cache (32 thousand logits in bf16 are 64 KiB). Each thread has its own maximum and
sum, so that none waits for another while it reads.
"""

import torch
from torch import Tensor

from fla_train.kernels.custom_op import custom_op
from fla_train.kernels.fused_ops.backend import resolve_backend
from fla_train.kernels.optional_triton import tl, triton
from fla_train.kernels.sizes import next_power_of_2

IGNORE = -100  # target of a row that has none, as in torch and transformers
LOGITS_BLOCK = 4096  # logits of a row that a program of the Triton kernel holds at once
LOGITS_PER_WARP = 256


def consume_logits(
    logits: Tensor, targets: Tensor, *, with_gradient: bool, backend: str = "auto"
) -> tuple[Tensor, Tensor | None]:
    """Return -log softmax(logits)[target] of each row, and the gradient of their sum; not differentiable.

    Args:
        logits: [M, V]; may be overwritten, so the caller must not use them afterwards.
        targets: [M] int64; a row of IGNORE has no loss and no gradient.
        with_gradient: also return softmax(logits) - onehot(target).
        backend: "torch", "triton" or "auto" (see `resolve_backend`).

    Returns:
        Losses [M] in float32 (float64 for float64 logits); the gradient [M, V] in the dtype of the logits, or
        None. Both are computed in the dtype of the losses.

    Raises:
        ValueError: a backend that is unknown or cannot run.
    """
    assert targets.shape == logits.shape[:-1] and logits.dim() == 2
    if resolve_backend(backend, logits) == "triton":
        logits = logits.contiguous()
        losses = torch.empty(logits.shape[0], dtype=torch.float32, device=logits.device)
        consume_logits_forward(logits, targets.contiguous(), losses, with_gradient)
        return losses, logits if with_gradient else None
    wide = torch.promote_types(logits.dtype, torch.float32)
    absent = targets == IGNORE
    index = targets.masked_fill(absent, 0)[:, None]
    if not with_gradient:
        logits = logits.to(wide)
        logits -= logits.amax(-1, keepdim=True)  # in place, which saves a copy
        chosen = logits.gather(1, index)[:, 0]
        return (logits.exp_().sum(-1).log_() - chosen).masked_fill_(absent, 0.0), None
    log_probs = torch.log_softmax(logits, -1, dtype=wide)
    losses = -log_probs.gather(1, index)[:, 0].masked_fill(absent, 0.0)
    gradient = log_probs.exp_()
    gradient.scatter_add_(1, index, gradient.new_full(index.shape, -1.0))
    return losses, gradient.masked_fill_(absent[:, None], 0.0).to(logits.dtype)


@custom_op(mutates=("logits", "losses"))
def consume_logits_forward(logits: Tensor, targets: Tensor, losses: Tensor, with_gradient: bool) -> None:
    """Fill the losses and overwrite the logits by their gradient, if asked."""
    block = min(LOGITS_BLOCK, next_power_of_2(logits.shape[1]))
    consume_kernel[(logits.shape[0],)](
        logits, targets, losses, V=logits.shape[1], BV=block, IGNORE=IGNORE, GRADIENT=with_gradient,
        num_warps=max(1, block // LOGITS_PER_WARP),
    )  # fmt: skip


@triton.jit
def consume_kernel(
    logits, targets, losses,  # [M, V], overwritten with GRADIENT; [M]; out, fp32 [M]
    V: tl.constexpr, BV: tl.constexpr, IGNORE: tl.constexpr, GRADIENT: tl.constexpr,
):  # fmt: skip
    i_row = tl.program_id(0).to(tl.int64)
    p_row = logits + i_row * V
    target = tl.load(targets + i_row)
    has_target = target != IGNORE
    # Loaded before the reductions, whose barriers keep any warp from overwriting it too early.
    # A target outside the vocabulary makes the loss NaN.
    in_range = (target >= 0) & (target < V)
    chosen = tl.load(p_row + target, mask=in_range, other=float("nan")).to(tl.float32)

    b_max, b_sum = tl.full((BV,), -float("inf"), tl.float32), tl.zeros((BV,), tl.float32)
    for i_v in range(0, V, BV):
        o_v = i_v + tl.arange(0, BV)
        b_x = tl.load(p_row + o_v, mask=o_v < V, other=-float("inf")).to(tl.float32)
        b_higher = tl.maximum(b_max, b_x)
        b_shift = tl.where(b_higher == -float("inf"), 0.0, b_higher)  # only -inf so far
        b_sum = b_sum * tl.exp(b_max - b_shift) + tl.exp(b_x - b_shift)
        b_max = b_higher
    highest = tl.max(b_max, 0)
    shift = tl.where(highest == -float("inf"), 0.0, highest)
    log_sum = highest + tl.log(tl.sum(b_sum * tl.exp(b_max - shift), 0))
    tl.store(losses + i_row, tl.where(has_target, log_sum - chosen, 0.0))

    if GRADIENT:
        for i_v in range(0, V, BV):
            o_v = i_v + tl.arange(0, BV)
            b_x = tl.load(p_row + o_v, mask=o_v < V, other=0.0).to(tl.float32)
            b_dx = tl.exp(b_x - log_sum) - tl.where(o_v == target, 1.0, 0.0)
            b_dx = tl.where(has_target, b_dx, 0.0)
            tl.store(p_row + o_v, b_dx.to(logits.dtype.element_ty), mask=o_v < V)
