"""Helpers that several Gluon kernels share: TMA descriptors, spans and tiles of chunks, scalars of rows."""

from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma, warpgroup_mma
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from fla_train.kernels.delta_product.triton import shared_heads
from fla_train.kernels.delta_product.triton.chunk_fwd import MIN_LOG_DECAY
from fla_train.kernels.delta_product.triton.common import TINY
from fla_train.kernels.sizes import ceil_div, processors

# Triton 3.6 calls it thread_barrier.
barrier = getattr(gl, "barrier", None) or gl.thread_barrier
# Triton before 3.8 calls it async_copy_global_to_shared, and before 3.9 _reinterpret.
async_load = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
reinterpret = (
    getattr(gl.shared_memory_descriptor, "reinterpret", None) or gl.shared_memory_descriptor._reinterpret
)
# Factor of `opaque_zero`. Triton 3.8 and later know that rounding a small integer to 16 bits leaves 0.
FACTOR = gl.constexpr(1.1 if hasattr(tma, "async_load") else 1.0)

ROWS = gl.constexpr(64)  # Householder steps per chunk, and rows of every tile of q, o and k
SLICED = gl.constexpr(96)  # sums over 65 to 96 columns stop here, not at the padded 128

LEAST = gl.constexpr(TINY.value)  # `triton.common.TINY`, for Gluon
PAIR = gl.constexpr(shared_heads.PAIR)  # `triton.shared_heads.PAIR`, for Gluon
LEAST_GATE = gl.constexpr(MIN_LOG_DECAY.value)  # the same as in `triton.chunk_fwd`

ALIGNMENT = 16  # bytes, alignment of the copy engine's reads
# Layout of tiles of 16-bit numbers, as the copy engine writes them and matrix products read them.
TILE = gl.constexpr(gl.NVMMASharedLayout(128, 16, 2))
TILE_IN_3D = gl.NVMMASharedLayout(128, 16, 3)  # the same in memory, with a dimension of one
# Of 64 scalars in shared memory.
FLAT = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [0]))
# Lines of a table: beta, reciprocal norms; factors of k where it reads a state and where it is written, and
# of q; cumulative gates by step and by token, and the gates as given. Without gates the last three are not
# filled. `inside_chunk` puts sums into lines that nobody needs again.
BETA, RK, RQ, READ, WRITE, QUERY, GM, GT, RAW = (gl.constexpr(i) for i in range(9))
LINES = gl.constexpr(9)


class TmaDescriptor(TensorDescriptor):
    """A matrix as the copy engine has it, without the checks of one that anybody may have made."""

    def __post_init__(self) -> None:
        """Skip the checks, which cost the host a quarter of a launch."""


def persistent_programs(work: int, device: torch.device) -> int:
    """Return the number of programs for `work` chunks x heads: four per SM, one after the other.

    A single one would leave no room for NCCL's kernels to start.
    """
    return min(work, 4 * processors(device))


def with_tma_descriptors(
    arguments: Mapping[str, Any],
    rows: Iterable[str],
    states: Iterable[str] = (),
    slices: Mapping[str, int] = MappingProxyType({}),
) -> dict[str, Any]:
    """Return the arguments with TMA descriptors in place of some tensors.

    `rows` are tensors [..., heads, columns], read in tiles of 64 rows of one head; `states` are tensors
    [..., V, K], read in tiles of V x K. If the arguments have TILES, V is split into TILES tiles, each like a
    separate head. `slices` maps names among them to the width of their tiles, which have 64 rows.
    """
    tiles = arguments.get("TILES", 1)
    matrices = {}
    for name, width in slices.items():
        *_, heads, columns = arguments[name].shape
        columns *= 1 if name in states else heads
        matrices[name] = _matrix(arguments[name], [-1, columns], [ROWS.value, width])
    rows, states = ([name for name in names if name not in slices] for names in (rows, states))
    for name in rows:
        *_, heads, width = arguments[name].shape
        count = 1 if name in ("q", "k", "wy", "p") else tiles
        matrices[name] = _rows(arguments[name], heads * count, width // count)
    for name in states:
        *_, height, width = arguments[name].shape
        matrices[name] = _states(arguments[name], height // tiles, width)
    return {**arguments, **matrices}


def _rows(tensor: Tensor, heads: int, width: int) -> TmaDescriptor:
    """Describe a tensor as [rows, heads x width]; as [rows, heads, width] if tiles are wider, or heads apart.

    Elements of a tile beyond its head are zero then.
    """
    if width == _padded(width) and tensor.is_contiguous():
        return _matrix(tensor, [-1, heads * width], [ROWS.value, width])
    return _matrix(tensor, [-1, heads, width], [ROWS.value, 1, _padded(width)])


def _states(tensor: Tensor, height: int, width: int) -> TmaDescriptor:
    """Describe states, each of `rows` rows."""
    tile = [_padded(height), _padded(width)]
    if tile == [height, width] and tensor.is_contiguous():
        return _matrix(tensor, [-1, width], tile)
    return _matrix(tensor, [-1, height, width], [1, *tile])


def _matrix(tensor: Tensor, shape: list[int], tile: list[int]) -> TmaDescriptor:
    """Describe a tensor in tiles. Copy it first if it lacks the copy engine's alignment."""
    tensor = tensor.clone() if tensor.data_ptr() % ALIGNMENT else tensor
    view = tensor.view(shape)
    layout = TILE.value if len(tile) == 2 else TILE_IN_3D
    return TmaDescriptor(tensor, list(view.shape), list(view.stride()), tile, layout)


def _padded(width: int) -> int:
    """Return `width` rounded up to the width of a tile, for K and for tiles of V up to 128."""
    return ROWS.value * ceil_div(width, ROWS.value)


@gluon.constexpr_function
def accumulator(columns, num_warps, down=4):
    """Return the layout of a matrix product with `columns` columns; `down` warps take 16 rows each."""
    instruction = [16, columns * down // num_warps, 16]
    return gl.NVMMADistributedLayout([3, 0], [down, num_warps // down], instruction)


@gluon.jit
def chunk_span(i_c, cu_seqlens, chunk_offsets, chunk_sequence, T, NT, C: gl.constexpr, PACKED: gl.constexpr):
    """Return `triton.common.chunk_span`, with no tokens where a packed row has fewer chunks."""
    if PACKED:
        i_s = gl.load(chunk_sequence + i_c)
        i_first = gl.load(chunk_offsets + i_s)
        i_start = gl.load(cu_seqlens + i_s).to(gl.int64) + (i_c - i_first).to(gl.int64) * C
        i_end = gl.load(cu_seqlens + i_s + 1).to(gl.int64)
    else:
        i_s = i_c // NT
        i_start = i_s.to(gl.int64) * T + (i_c - i_s * NT) * C
        i_end = (i_s + 1).to(gl.int64) * T
    return i_start, gl.maximum(gl.minimum(i_end - i_start, C), 0).to(gl.int32)


@gluon.jit
def sequence_span(i_s, cu_seqlens, chunk_offsets, T, NT, PACKED: gl.constexpr):
    """Return `triton.common.sequence_span` in 32 bits, as the copy engine counts rows."""
    if PACKED:
        i_start = gl.load(cu_seqlens + i_s).to(gl.int32)
        length = gl.load(cu_seqlens + i_s + 1).to(gl.int32) - i_start
        i_chunk = gl.load(chunk_offsets + i_s).to(gl.int32)
    else:
        i_start, length, i_chunk = i_s * T, T, i_s * NT
    return i_start, length, i_chunk


@gluon.jit
def opaque_zero(count):
    """Return `triton.common.opaque_zero`."""
    return (count >> 30) * FACTOR


@gluon.jit
def rows_of(p, n_rows, stride, layout: gl.constexpr):
    """Return [64] scalars in fp32, zeros past `n_rows`."""
    o = gl.arange(0, ROWS, layout)
    return gl.load(p + o * stride, mask=o < n_rows, other=0.0)


@gluon.jit
def copy_tile(matrix, tile, bar, i_row, i_head, pred):
    """Copy 64 rows of a head, expected by `bar`; in three dimensions elements beyond it are zero."""
    if len(matrix.block_shape) == 2:
        i_column = i_head * matrix.block_shape[1]
        async_load(matrix, [i_row, i_column], bar, tile, pred=pred)
    else:
        tile = reinterpret(tile, matrix.dtype, matrix.block_shape, matrix.layout)
        async_load(matrix, [i_row, i_head, 0], bar, tile, pred=pred)


@gluon.jit
def copy_state(matrix, tile, bar, i_state, pred):
    """Copy state `i_state`: a block of rows in 2D, or one entry of the first dimension in 3D."""
    copy_tile(matrix, tile, bar, i_state * matrix.block_shape[0], 0, pred)


@gluon.jit
def copy_pair(a, b, s_a, s_b, bar, i_a, i_b, i_head, pred, BYTES: gl.constexpr):
    """Copy tiles of two matrices, of the same head; `bar` completes when BYTES have come."""
    mbarrier.expect(bar, BYTES, pred=pred)
    copy_tile(a, s_a, bar, i_a, i_head, pred)
    copy_tile(b, s_b, bar, i_b, i_head, pred)


@gluon.jit
def rebuild(step, part: gl.constexpr, COUNT: gl.constexpr):
    """Return (0, the program's number of COUNT) via inline assembly, so that no tile's address is hoisted.

    The compiler would keep the addresses of all tiles over the loop, and spill them; so each part of a chunk
    gets its own zero. Steps stay below 2^30. Not pure, the instruction keeps its place among barriers and
    products: Triton 3.7 moves a plain shift ahead of the part in front, and then spills are three times more.
    """
    shift: gl.constexpr = "shr.s32 $0, $1, 30;"
    zero = gl.inline_asm_elementwise(shift, "=r,r", [step + part], gl.int32, is_pure=False, pack=1)
    return zero, (gl.program_id(0) + zero) % COUNT


@gluon.jit
def products(a, b, total, SIZE: gl.constexpr):
    """Begin total + a b for tiles in shared memory. Columns of a and rows of b from SIZE on are zero.

    Issues one asynchronous product. If SIZE is 65 to 96 it issues two, which skip the last 32 columns.
    """
    if SIZE > ROWS and SIZE <= SLICED:
        total = warpgroup_mma(a.slice(0, ROWS, dim=1), b.slice(0, ROWS), total, is_async=True)
        total = warpgroup_mma(
            a.slice(ROWS, SLICED - ROWS, dim=1), b.slice(ROWS, SLICED - ROWS), total, is_async=True
        )
    else:
        total = warpgroup_mma(a, b, total, is_async=True)
    return total


@gluon.jit
def make_bar():
    """Return a barrier for copies, at its first phase."""
    bar = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(bar, count=1)
    return bar


@gluon.jit
def store(pointers, values, mask, ADD: gl.constexpr):
    """Store the values; with ADD, add them to the stored values, by atomics in the L2 cache."""
    if ADD:
        gl.atomic_add(pointers, values, mask=mask, sem="relaxed")
    else:
        gl.store(pointers, values, mask=mask)


@gluon.jit
def store_tile(
    p, tile, n_rows, i_row,
    STRIDE: gl.constexpr, WIDTH: gl.constexpr, LAYOUT: gl.constexpr, ADD: gl.constexpr = False,
):  # fmt: skip
    """Store `n_rows` and WIDTH columns of a tile in shared memory from `p` on; `i_row` is 0 of `rebuild`."""
    COLUMNS: gl.constexpr = tile.shape[1]
    o_r, o_c = gl.arange(0, ROWS, gl.SliceLayout(1, LAYOUT)), gl.arange(0, COLUMNS, gl.SliceLayout(0, LAYOUT))
    o_r += i_row
    mask = (o_r < n_rows)[:, None]
    if WIDTH < COLUMNS:
        mask = mask & (o_c < WIDTH)[None, :]
    store(p + o_r[:, None] * STRIDE + o_c[None, :], tile.load(LAYOUT), mask, ADD)


@gluon.jit
def make_lines(count: gl.constexpr):
    """Allocate lines of 64. In one array each store would wait for the one before."""
    lines = ()
    for _ in gl.static_range(count):
        lines += (gl.allocate_shared_memory(gl.float32, [ROWS], FLAT),)
    return lines


@gluon.jit
def gates_of(p, n_t, g_last, N: gl.constexpr, layout: gl.constexpr):
    """Load [64] cumulative gates, one per N rows; past the chunk the last, so that no decay is infinite."""
    o = gl.arange(0, ROWS, layout) // N
    return gl.load(p + o, mask=o < n_t, other=g_last)


@gluon.jit
def fetch_scalars(
    rows, i_t, n_t, i_h, n_total,
    H: gl.constexpr, N: gl.constexpr, GATED: gl.constexpr, L2NORM: gl.constexpr, num_warps: gl.constexpr,
):  # fmt: skip
    """Load a chunk's beta, reciprocal norms of k and q, and gates by step, by token, last, and raw."""
    beta, g, g_cum, q_rnorm, k_rnorm = rows
    LINE: gl.constexpr = gl.BlockedLayout([1], [32], [num_warps], [0])
    i_m, n_m = i_t * N, n_t * N
    b_beta = rows_of(beta + i_m * H + i_h, n_m, H, LINE)
    if L2NORM:
        b_rk = rows_of(k_rnorm + i_h.to(gl.int64) * n_total * N + i_m, n_m, 1, LINE)
        b_rq = rows_of(q_rnorm + i_h.to(gl.int64) * n_total + i_t, n_t, 1, LINE)
    else:
        o = gl.arange(0, ROWS, LINE)
        b_rk, b_rq = gl.where(o < n_m, 1.0, 0.0), gl.where(o < n_t, 1.0, 0.0)
    b_gm, b_gt, g_last, b_g = b_beta, b_beta, 0.0, b_beta
    if GATED:
        p_g = g_cum + i_h.to(gl.int64) * n_total + i_t
        g_last = gl.load(p_g + n_t - 1, mask=n_t > 0, other=0.0)
        b_gm, b_gt = gates_of(p_g, n_t, g_last, N, LINE), gates_of(p_g, n_t, g_last, 1, LINE)
        b_g = rows_of(g + i_t * H + i_h, n_t, H, LINE)
    return b_beta, b_rk, b_rq, b_gm, b_gt, g_last, b_g


@gluon.jit
def keep_scalars(table, scalars, scale, GATED: gl.constexpr):
    """Write what `fetch_scalars` returned, and the factors made of it; return the last gate."""
    b_beta, b_rk, b_rq, b_gm, b_gt, g_last, b_g = scalars
    table[BETA].store(b_beta)
    table[RK].store(b_rk)
    table[RQ].store(b_rq)
    if GATED:
        table[READ].store(b_rk * gl.exp2(b_gm))
        table[WRITE].store(b_rk * gl.exp2(g_last - b_gm))
        table[QUERY].store(b_rq * scale * gl.exp2(b_gt))
        table[GM].store(b_gm)
        table[GT].store(b_gt)
        table[RAW].store(b_g)
    else:
        table[READ].store(b_rk)
        table[WRITE].store(b_rk)
        table[QUERY].store(b_rq * scale)
    return g_last


@gluon.jit
def add(a, b):
    return a + b
