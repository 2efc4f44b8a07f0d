"""Sums for the Gluon kernels: what crosses warps waits in shared memory for a barrier."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from fla_train.kernels.delta_product.hopper.common import FLAT, ROWS

PARTS = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))  # of several times 64 scalars


@gluon.jit
def add(a, b):
    return a + b


@gluon.jit
def suffix_sums(x):
    """Of each number and all after it."""
    return gl.sum(x, 0) - gl.associative_scan(x, 0, add) + x


@gluon.jit
def widened(x):
    """In fp32; of bf16 by one instruction a number, where the compiler takes two."""
    if x.dtype == gl.bfloat16:
        halves: gl.constexpr = "shl.b32 $0, $2, 16;\nand.b32 $1, $2, 0xffff0000;"
        return gl.inline_asm_elementwise(halves, "=r,=r,r", [x], gl.float32, is_pure=True, pack=2)
    else:
        return x.to(gl.float32)


@gluon.jit
def make_sums(parts: gl.constexpr):
    """Shared memory for 64 sums, each in so many parts."""
    return gl.allocate_shared_memory(gl.float32, [1, parts * ROWS], FLAT)


@gluon.jit
def in_parts(x):
    """[rows, parts, columns / parts] of x [64 or 128, columns], so that a warp has whole parts."""
    parts: gl.constexpr = 2 * ROWS // x.shape[0]
    return gl.reshape(x, [x.shape[0], parts, x.shape[1] // parts])


@gluon.jit
def row_sums(x):
    """[rows, parts] sums of the rows of a matrix product of eight warps: of 64 rows two parts, else one.

    What crosses warps goes through shared memory, by `keep_row_sums` and `load_sums`, with a barrier between
    that is there anyway.
    """
    return gl.sum(in_parts(x), 2)


@gluon.jit
def keep_row_sums(sums, parts, zero):
    """Write the result of `row_sums`; `zero` is that of `anew`, since stores keep addresses, too."""
    columns = sums.index(zero)._reinterpret(gl.float32, [parts.shape[1], parts.shape[0]], PARTS)
    columns.permute((1, 0)).store(parts)


@gluon.jit
def keep_column_sums(sums, x, zero):
    """Write sums of the columns of x [64, 64], of each warp's 16 rows."""
    sums.index(zero)._reinterpret(gl.float32, [4, ROWS], PARTS).store(gl.sum(gl.reshape(x, [4, 16, ROWS]), 1))


@gluon.jit
def load_sums(sums, layout: gl.constexpr):
    """[64] sums of all parts."""
    LENGTH: gl.constexpr = sums.shape[1]
    parts = sums.index(0)
    total = parts.slice(0, ROWS).load(layout)
    for i in gl.static_range(ROWS, LENGTH, ROWS):
        total += parts.slice(i, ROWS).load(layout)
    return total
