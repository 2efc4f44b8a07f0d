"""Parts of the Gluon kernels: which calls they take, where a chunk lies, and the copies of its tiles."""

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from fla_train.kernels.delta_product.triton.common import TINY
from fla_train.kernels.delta_product.triton.launch_table import GLUON_DIMS, architecture

# What triton 3.6 calls thread_barrier.
barrier = getattr(gl, "barrier", None) or gl.thread_barrier

ROWS = gl.constexpr(64)  # sub-steps per chunk, and rows of every tile of q, o and k

LEAST = gl.constexpr(TINY.value)  # `triton.common.TINY`, for Gluon

ALIGNMENT = 16  # bytes, of what the copy engine reads
# Of tiles of 16-bit numbers, as the copy engine writes them and matrix products read them.
TILE = gl.constexpr(gl.NVMMASharedLayout(128, 16, 2))
# Of 64 scalars in shared memory.
FLAT = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [0]))


def on_hopper(arguments: Mapping[str, Any]) -> bool:
    """Whether these run on a Hopper GPU with 16-bit keys of 64 or 128 numbers."""
    q = arguments["q"]
    if q.dtype not in (torch.bfloat16, torch.float16) or arguments["K"] not in GLUON_DIMS:
        return False
    return architecture(q.device).startswith("9.")


class Described(TensorDescriptor):
    """A matrix as the copy engine has it, without the checks of one that anybody may have made."""

    def __post_init__(self) -> None:
        """These take the host as long as a quarter of a launch."""


def described(
    arguments: Mapping[str, Any], rows: Iterable[str], blocks: Iterable[str] = ()
) -> dict[str, Any]:
    """The arguments of the Triton kernel, with matrices as the copy engine has them.

    `rows` are tensors [..., heads, columns] that it reads in tiles of 64 rows of one head, `blocks` tensors
    [..., V, K] that it reads in tiles of V x K. One that begins off the copy engine's alignment is copied.
    """
    matrices = {}
    for name in rows:
        *_, heads, width = arguments[name].shape
        matrices[name] = _matrix(arguments[name], heads * width, [ROWS.value, width])
    for name in blocks:
        *_, height, width = arguments[name].shape
        matrices[name] = _matrix(arguments[name], width, [height, width])
    return {**arguments, **matrices}


def _matrix(tensor: Tensor, columns: int, tile: list[int]) -> Described:
    """A contiguous tensor as a matrix of so many columns, to be read in tiles."""
    tensor = tensor.clone() if tensor.data_ptr() % ALIGNMENT else tensor
    return Described(tensor, [tensor.numel() // columns, columns], [columns, 1], tile, TILE.value)


@gluon.jit
def span(i_c, cu_seqlens, chunk_offsets, chunk_segment, T, NT, C: gl.constexpr, PACKED: gl.constexpr):
    """`triton.common.chunk_span`, with no tokens where a packed row has fewer chunks."""
    if PACKED:
        i_s = gl.load(chunk_segment + i_c)
        i_first = gl.load(chunk_offsets + i_s)
        i_start = gl.load(cu_seqlens + i_s).to(gl.int64) + (i_c - i_first).to(gl.int64) * C
        i_end = gl.load(cu_seqlens + i_s + 1).to(gl.int64)
    else:
        i_s = i_c // NT
        i_start = i_s.to(gl.int64) * T + (i_c - i_s * NT) * C
        i_end = (i_s + 1).to(gl.int64) * T
    return i_start, gl.maximum(gl.minimum(i_end - i_start, C), 0).to(gl.int32)


@gluon.jit
def segment(i_s, cu_seqlens, chunk_offsets, T, NT, PACKED: gl.constexpr):
    """`triton.common.segment_span` in 32 bits, as the copy engine counts rows."""
    if PACKED:
        i_start = gl.load(cu_seqlens + i_s).to(gl.int32)
        length = gl.load(cu_seqlens + i_s + 1).to(gl.int32) - i_start
        i_chunk = gl.load(chunk_offsets + i_s).to(gl.int32)
    else:
        i_start, length, i_chunk = i_s * T, T, i_s * NT
    return i_start, length, i_chunk


@gluon.jit
def nothing(count):
    """`triton.common.nothing`."""
    return (count >> 30) * 1.0


@gluon.jit
def rows_of(p, n_rows, stride, layout: gl.constexpr):
    """[64] scalars in fp32, zeros past `n_rows`."""
    o = gl.arange(0, ROWS, layout)
    return gl.load(p + o * stride, mask=o < n_rows, other=0.0)


@gluon.jit
def copy_pair(a, b, s_a, s_b, bar, i_a, i_b, i_column, pred, BYTES: gl.constexpr):
    """Tiles of two matrices, from the same column on; `bar` completes when BYTES have come."""
    mbarrier.expect(bar, BYTES, pred=pred)
    tma.async_copy_global_to_shared(a, [i_a, i_column], bar, s_a, pred=pred)
    tma.async_copy_global_to_shared(b, [i_b, i_column], bar, s_b, pred=pred)


@gluon.jit
def anew(step, part: gl.constexpr, H: gl.constexpr):
    """0 and the program's head, by an instruction that the compiler can't see through; steps stay below 2^30.

    With the same indices all over the loop it would keep the addresses of all tiles, and spill them; so each
    part of a chunk has its own. Not pure, the instruction keeps its place among barriers and products: Triton
    3.7 moves a plain shift ahead of the part in front, and then the kernel spills three times as much.
    """
    shift: gl.constexpr = "shr.s32 $0, $1, 30;"
    zero = gl.inline_asm_elementwise(shift, "=r,r", [step + part], gl.int32, is_pure=False, pack=1)
    return zero, (gl.program_id(0) + zero) % H


@gluon.jit
def make_bar():
    """A barrier for copies, at its first phase."""
    bar = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(bar, count=1)
    return bar


@gluon.jit
def copy_rows(matrix, tile, bar, i_row, i_column, pred, BYTES: gl.constexpr):
    """A tile of k or q, with which `bar` completes."""
    mbarrier.expect(bar, BYTES, pred=pred)
    tma.async_copy_global_to_shared(matrix, [i_row, i_column], bar, tile, pred=pred)


@gluon.jit
def store_tile(p, tile, n_rows, i_row, STRIDE: gl.constexpr, COLUMNS: gl.constexpr, LAYOUT: gl.constexpr):
    """The first `n_rows` of a tile in shared memory, to `p` on; `i_row` is 0 of `anew`."""
    o_r, o_c = gl.arange(0, ROWS, gl.SliceLayout(1, LAYOUT)), gl.arange(0, COLUMNS, gl.SliceLayout(0, LAYOUT))
    o_r += i_row
    gl.store(p + o_r[:, None] * STRIDE + o_c[None, :], tile.load(LAYOUT), mask=(o_r < n_rows)[:, None])


@gluon.jit
def expect_values(bar_do, bar_e, bar_s, pred, K: gl.constexpr, V: gl.constexpr):
    """Tell the barriers of `copy_values` what will come.

    Before a barrier of all threads: the compiler has them meet between this and the copies in any case.
    """
    mbarrier.expect(bar_do, 2 * ROWS * V, pred=pred)
    mbarrier.expect(bar_e, 2 * ROWS * V, pred=pred)
    mbarrier.expect(bar_s, 2 * V * K, pred=pred)


@gluon.jit
def copy_values(do, errors, states, s_do, s_e, s_s, bar_do, bar_e, bar_s, i_m, i_t, i_s, i_column, pred):
    """dO, E and the state of a chunk and head; a barrier completes with each."""
    tma.async_copy_global_to_shared(do, [i_t, i_column], bar_do, s_do, pred=pred)
    tma.async_copy_global_to_shared(errors, [i_m, i_column], bar_e, s_e, pred=pred)
    tma.async_copy_global_to_shared(states, [i_s, 0], bar_s, s_s, pred=pred)


@gluon.jit
def expect_inverse(bar_x, bar_p, pred):
    """The same for `copy_inverse`."""
    mbarrier.expect(bar_x, 2 * ROWS * ROWS, pred=pred)
    mbarrier.expect(bar_p, 2 * ROWS * ROWS, pred=pred)


@gluon.jit
def copy_inverse(x, p, s_x, s_p, bar_x, bar_p, i_m, i_t, i_column, pred):
    """X and P D of a chunk and head, in the same way."""
    tma.async_copy_global_to_shared(p, [i_t, i_column], bar_p, s_p, pred=pred)
    tma.async_copy_global_to_shared(x, [i_m, i_column], bar_x, s_x, pred=pred)


@gluon.jit
def make_operand(s_kept, s_p, n_rows, peak, DTYPE: gl.constexpr, LAYOUT: gl.constexpr):
    """P D from what is kept of it, which may lie in the same place; zeros past the chunk."""
    o_r = gl.arange(0, ROWS, gl.SliceLayout(1, LAYOUT))
    b_p = s_kept.load(LAYOUT).to(gl.float32) * peak
    s_p.store(gl.where((o_r < n_rows)[:, None], b_p, 0.0).to(DTYPE))
    fence_async_shared()
    barrier()
