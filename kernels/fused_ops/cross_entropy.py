"""Cross-entropy in Triton: a program reads its row for the log-sum-exp, then overwrites it by its gradient.

The second reading finds the row in the L2 cache (32 thousand logits in bf16 are 64 KiB), so that the logits
cross the memory bus once in each direction.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from fla_train.kernels.neighbours.cross_entropy import IGNORE
from fla_train.kernels.opaque import opaque
from fla_train.kernels.sizes import next_power_of_2

BLOCK = 4096  # logits of a row held at once
ELEMENTS_PER_WARP = 512


def triton_consume_logits(
    logits: Tensor, targets: Tensor, with_gradient: bool
) -> tuple[Tensor, Tensor | None]:
    """`consume_logits` on checked inputs; the gradient lies in the memory of the logits."""
    logits = logits.contiguous()
    losses = torch.empty(logits.shape[0], dtype=torch.float32, device=logits.device)
    consume_logits_forward(logits, targets.contiguous(), losses, with_gradient)
    return losses, logits if with_gradient else None


@opaque(mutates=("logits", "losses"))
def consume_logits_forward(logits: Tensor, targets: Tensor, losses: Tensor, with_gradient: bool) -> None:
    """Fill the losses and overwrite the logits by their gradient, if asked."""
    block = min(BLOCK, next_power_of_2(logits.shape[1]))
    with torch.cuda.device_of(logits):
        consume_kernel[(logits.shape[0],)](
            *(logits, targets, losses),
            V=logits.shape[1],
            BV=block,
            IGNORE=IGNORE,
            GRADIENT=with_gradient,
            num_warps=max(1, block // ELEMENTS_PER_WARP),
        )


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

    highest, total = -float("inf"), 0.0
    for i_v in range(0, V, BV):
        o_v = i_v + tl.arange(0, BV)
        b_x = tl.load(p_row + o_v, mask=o_v < V, other=-float("inf")).to(tl.float32)
        higher = tl.maximum(highest, tl.max(b_x, 0))
        shift = tl.where(higher == -float("inf"), 0.0, higher)  # no logit yet but -inf
        total = total * tl.exp(highest - shift) + tl.sum(tl.exp(b_x - shift), 0)
        highest = higher
    log_sum = highest + tl.log(total)
    tl.store(losses + i_row, tl.where(has_target, log_sum - chosen, 0.0))

    if GRADIENT:
        for i_v in range(0, V, BV):
            o_v = i_v + tl.arange(0, BV)
            b_x = tl.load(p_row + o_v, mask=o_v < V, other=0.0).to(tl.float32)
            b_dx = tl.exp(b_x - log_sum) - tl.where(o_v == target, 1.0, 0.0)
            b_dx = tl.where(has_target, b_dx, 0.0)
            tl.store(p_row + o_v, b_dx.to(logits.dtype.element_ty), mask=o_v < V)
