"""Sum of the rows of an fp32 matrix: the parts of a weight's gradient that a kernel's programs have left.

A program sums a few columns, so that a matrix of 512 x 1024 keeps a whole device busy; `torch.sum` gives it
to 8 blocks, which take 16 us on an H100. The order of the sum depends on the shape only.
"""

from torch import Tensor

from fla_train.kernels.optional_triton import tl, triton
from fla_train.kernels.sizes import ceil_div

ROWS, COLUMNS = 256, 8  # sizes of a tile


def sum_rows(parts: Tensor, total: Tensor) -> None:
    """Fill `total`, fp32, with the sum over the first axis of contiguous `parts` [rows, *total.shape].

    Both are on the current device.
    """
    columns = total.numel()
    sum_rows_kernel[(ceil_div(columns, COLUMNS),)](
        parts, total, len(parts), D=columns, BR=ROWS, BD=COLUMNS, num_warps=4
    )


@triton.jit(do_not_specialize=["n_rows"])
def sum_rows_kernel(
    parts, total,  # [n_rows, D]; out [D]
    n_rows,
    D: tl.constexpr, BR: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    o_d = tl.program_id(0) * BD + tl.arange(0, BD)
    b_sum = tl.zeros((BR, BD), tl.float32)
    for i in range(0, n_rows, BR):
        o_r = i + tl.arange(0, BR)
        mask = (o_r < n_rows)[:, None] & (o_d < D)[None, :]
        b_sum += tl.load(parts + o_r[:, None] * D + o_d[None, :], mask=mask, other=0.0)
    tl.store(total + o_d, tl.sum(b_sum, 0), mask=o_d < D)
