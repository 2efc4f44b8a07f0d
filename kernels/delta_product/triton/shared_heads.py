"""Gradients that several programs share: each program writes its share, and `sum_shares` adds them up.

A head of q and k serves G value heads, whose programs each find a dq and a dk. Hopper's fused backward kernel
also splits wide values into tiles of V, and each tile has its share of dq, dk, dbeta and dg. Shares are
summed in fp32 and in a fixed order, so that results are equal to the bit from run to run.

Where two programs share a dq and a dk, Hopper's kernel adds both shares to zeros instead: 0 + a + b and
0 + b + a are equal to the bit. Two launches have no shares: the second adds to the result of the first.
"""

from torch import Tensor

from fla_train.kernels.cached_launch import run_kernel
from fla_train.kernels.optional_triton import tl, triton
from fla_train.kernels.sizes import ceil_div

PAIR = 2  # shares whose sum does not depend on which one is added first
BLOCK = 1024  # elements of a program: 16 bytes of bf16 for each thread of four warps


@triton.jit  # which knows that 16 divides n: the mask would forbid wide loads otherwise
def delta_product_sum_shares_kernel(
    shares, total, n, COUNT: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr
):
    """Sum to [rows, WIDTH] the shares [rows, COUNT, WIDTH]; `n` is rows x WIDTH."""
    o = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    p = shares + o // WIDTH * (COUNT * WIDTH) + o % WIDTH
    b_total = tl.zeros((BLOCK,), tl.float32)
    for i in tl.static_range(COUNT):
        b_total += tl.load(p + i * WIDTH, mask=o < n, other=0.0)
    tl.store(total + o, b_total.to(total.dtype.element_ty), mask=o < n)


def make_shares(total: Tensor, count: int, added: bool = False) -> Tensor:
    """Allocate `count` shares of `total` [..., W]: [..., count, W], or `total` itself if count is 1.

    If `added`, return `total` filled with zeros, for programs that add to it.
    """
    if added:
        return total.zero_()
    return total if count == 1 else total.new_empty(*total.shape[:-1], count, total.shape[-1])


def sum_shares(shares: Tensor, total: Tensor) -> None:
    """Fill `total` [..., W] from what `make_shares` made for it."""
    if shares is not total:
        run_kernel(
            delta_product_sum_shares_kernel, (ceil_div(total.numel(), BLOCK),), shares=shares, total=total,
            n=total.numel(), COUNT=shares.shape[-2], WIDTH=shares.shape[-1], BLOCK=BLOCK, num_warps=4,
        )  # fmt: skip
