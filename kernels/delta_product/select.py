"""`select_kernel` decides which Triton or Hopper kernels run a call of `delta_product`, and says why.

Everything follows from the device and from sizes: no call is timed, and none waits for the device.
`fla-doctor` prints the decisions; `override` replaces some of them in checks, tests and tuning.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import lru_cache
from importlib.util import find_spec
from typing import NamedTuple

import torch
from torch import Tensor

from fla_train.kernels.delta_product.triton.launch_table import (
    HOPPER_TILE,
    MIN_TILE,
    Key,
    LaunchOptions,
    Options,
    architecture,
    gluon_obstacle,
    lookup,
    value_tiles,
)
from fla_train.kernels.sizes import ceil_div, next_power_of_2, processors

CHUNK_STEPS = 64  # Householder steps of a chunk: the row count of a Hopper matrix instruction
# Beyond these key dimensions the tiles of a chunk do not fit in shared memory.
MAX_KEY_DIM = {torch.float32: 128, torch.bfloat16: 256, torch.float16: 256}
# Limits of `fused_recurrent`: elements of a state (K and V rounded up) that a warp holds in 32 registers a
# thread, and Householder steps of a row; timed were up to 256.
RECURRENT_STATE, RECURRENT_STEPS = 1024, 4096
# Programs of the serial kernels, with tiles of 64 columns of V, that share a multiprocessor.
PROGRAMS_PER_PROCESSOR = 2
# The Python files of an export are without these kernels: see fla_train/hub/remote_code.py.
HAS_HOPPER_KERNELS = find_spec(f"{__package__}.hopper") is not None
# Measured on an H100 (docs/dev/kernels.md): the extra pass over two or three segments costs as much as it
# saves, and on shorter rows the host takes longer for five more launches than the device for the rows as they
# are.
MIN_SEGMENTS, MIN_SEGMENT_CHUNKS, MIN_ROW_CHUNKS = 4, 8, 128
# The share of the multiprocessors that `chunk_bwd_fused` keeps at work, with a program per sequence and head,
# below which two kernels are faster.
MIN_BUSY = 0.75


@dataclass(frozen=True)
class KernelChoice:
    """One chunk kernel: the Gluon version for Hopper or the Triton one, the latter's options, and why."""

    hopper: bool
    options: Options
    reason: str


@dataclass(frozen=True)
class Selection:
    """Describe how Triton runs a call. The kernels are None for `fused_recurrent` and under tracing."""

    algorithm: str  # "fused_recurrent" or "chunk"
    algorithm_reason: str
    segment_chunks: int = 0  # chunks of a segment; 0: sequences are not split
    num_segments: int = 0  # number in all sequences; an upper bound for packed rows
    segments_reason: str = ""
    chunk_prepare_wy: KernelChoice | None = None
    chunk_fwd: KernelChoice | None = None
    chunk_bwd_state: KernelChoice | None = None
    chunk_bwd_qkg: KernelChoice | None = None
    fused_backward: bool = False  # chunk_bwd_fused in place of chunk_bwd_state and chunk_bwd_qkg
    fused_reason: str = ""
    fused_launches: int = 1  # launches of chunk_bwd_fused; 2: for 128 columns of V and for the rest

    def explain(self) -> list[str]:
        """Return one sentence per decision."""
        lines = [f"algorithm: {self.algorithm}, because {self.algorithm_reason}"]
        if self.algorithm != "chunk":
            return lines
        split = f"segments of {self.segment_chunks} chunks, {self.num_segments} in all"
        lines.append(f"sequences: {split if self.num_segments else 'whole'}, because {self.segments_reason}")
        two = ("chunk_bwd_state", "chunk_bwd_qkg")
        fused = "chunk_bwd_fused" + " in two launches" * (self.fused_launches > 1)
        backward = fused if self.fused_backward else " and ".join(two)
        lines.append(f"backward: {backward}, because {self.fused_reason}")
        for name in ("chunk_prepare_wy", "chunk_fwd", *(() if self.fused_backward else two)):
            choice = getattr(self, name)
            options = ", ".join(f"{option} {value}" for option, value in choice.options.items())
            kernel = "in Gluon for Hopper" if choice.hopper else f"in Triton ({options})"
            lines.append(f"{name}: {kernel}, because {choice.reason}")
        return lines


@dataclass(frozen=True)
class Override:
    """Replace decisions of `select_kernel`; None keeps its own."""

    algorithm: str | None = None
    segment_chunks: int | None = None  # 0: sequences stay whole
    options: LaunchOptions | None = None
    fused_backward: bool | None = None  # whether it may run, where the Hopper kernels can
    fused_launches: int | None = None  # 2: where V has 129 to 256 columns and heads are not grouped


_override = Override()


@contextmanager
def override(**decisions: object) -> Iterator[None]:
    """Run the calls inside with these fields of `Override`: for checks, tests and tuning."""
    global _override
    before, _override = _override, replace(_override, **decisions)
    try:
        yield
    finally:
        _override = before


class Sizes(NamedTuple):
    """Sizes of a call, the input of `select_kernel`."""

    device: torch.device
    dtype: torch.dtype  # dtype of q, k and v
    batch: int
    tokens: int
    heads: int  # heads of v
    key_dim: int
    value_dim: int
    num_householder: int = 1
    documents: int = 0  # documents in a packed row, one fewer than numbers in `cu_seqlens`; 0: not packed
    qk_l2norm: bool = True  # whether the kernels normalise q and k
    group: int = 1  # value heads per key head


def select_kernel(device: torch.device | str, dtype: torch.dtype, **sizes: int) -> Selection:
    """Return how the Triton backend runs a call of these sizes on a device.

    Args:
        device: where the tensors lie; on a CPU the interpreter's choice is returned.
        dtype: of q, k and v.
        sizes: batch, tokens, heads, key_dim, value_dim, and further fields of `Sizes`.

    Returns:
        The decisions; `explain()` gives a sentence for each.

    Raises:
        ValueError: the backend does not support the sizes, or a user's launches.json is invalid.
    """
    asked = Sizes(torch.device(device), dtype, **sizes)
    check_limits(dtype, asked.key_dim, asked.num_householder)
    return _select(asked, _override)


def check_limits(dtype: torch.dtype, key_dim: int, num_householder: int) -> None:
    """Check the limits of the Triton backend.

    Raises:
        ValueError: for float64, for more than 64 Householder steps per token, or for a key dimension over 256
            (128 in float32).
    """
    if dtype not in MAX_KEY_DIM:
        raise ValueError(f"the triton backend does not support {dtype}: choose backend=recurrent or chunk")
    if num_householder > CHUNK_STEPS:
        raise ValueError(
            f"the triton backend supports at most {CHUNK_STEPS} Householder steps per token, got "
            f"{num_householder}: choose backend=recurrent or chunk"
        )
    limit = MAX_KEY_DIM[dtype]
    if key_dim > limit:
        raise ValueError(
            f"the triton backend supports key dimensions of at most {limit} in {dtype}, got {key_dim}: "
            f"choose {'bfloat16 or ' if key_dim <= MAX_KEY_DIM[torch.bfloat16] else ''}backend=chunk"
        )


def select_for(q: Tensor, v: Tensor, cu_seqlens: Tensor | None, qk_l2norm: bool) -> Selection:
    """Return `select_kernel` of a call's tensors; for v there may be another of its shape."""
    documents = 0 if cu_seqlens is None else cu_seqlens.numel() - 1
    (batch, tokens, key_heads, key_dim), (num_householder, heads, value_dim) = q.shape, v.shape[2:]
    dims = (batch, tokens, heads, key_dim, value_dim, num_householder)
    sizes = Sizes(q.device, q.dtype, *dims, documents, qk_l2norm, heads // key_heads)
    if torch.compiler.is_compiling():  # tracing supports neither caches nor files
        return _select_algorithm(sizes, _override)
    return _select(sizes, _override)


def clear_caches() -> None:
    """Forget selections and the table of launch options, which may have changed."""
    _select.cache_clear()
    lookup.cache_clear()


@lru_cache(maxsize=1024)
def _select(sizes: Sizes, override: Override) -> Selection:
    selection = _select_algorithm(sizes, override)
    if selection.algorithm != "chunk":
        return selection
    key_dim, value_dim = sizes.key_dim, sizes.value_dim
    gpu = architecture(sizes.device)
    options, source = lookup(sizes.dtype, Key.of(gpu, key_dim, value_dim, sizes.num_householder))
    if override.options is not None:
        options, source = override.options, "the caller gives the options"
    hopper = None  # why no Hopper kernel runs
    if not gpu.startswith("9.") or interpreted():
        hopper = "Hopper's kernels need a GPU of compute capability 9"
    elif not HAS_HOPPER_KERNELS:
        hopper = "Hopper's kernels come with the package fla_train only"
    elif sizes.dtype not in (torch.bfloat16, torch.float16):
        hopper = "Hopper's kernels take 16-bit inputs"

    def choose(kernel: str) -> KernelChoice:
        settings = getattr(options, kernel)
        plain = {name: value for name, value in settings.items() if name != "gluon"}
        if "gluon" not in settings:
            return KernelChoice(False, plain, source)
        obstacle = hopper or gluon_obstacle(kernel, key_dim, value_dim, sizes.qk_l2norm)
        return KernelChoice(obstacle is None, plain, obstacle or "the launch options ask for it")

    state, tiles = choose("chunk_bwd_state"), value_tiles(value_dim)
    fused, reason = state.hopper, state.reason
    rows = (selection.num_segments or sizes.documents or sizes.batch) * sizes.heads
    count = processors(sizes.device)
    if fused and override.fused_backward is not None:
        fused, reason = override.fused_backward, "the caller wants it so"
    elif fused:
        fused = busy(rows * tiles, count) >= MIN_BUSY
        few = "leave too many multiprocessors idle"
        reason = f"sequences x heads x tiles of V {'keep the multiprocessors busy' if fused else few}"
    launches = 1
    if fused and tiles == 2 and sizes.group == 1:
        # Two launches, of 128 columns and of the rest, take less time than one of two equal tiles unless they
        # have more waves. Documents differ in length, and each launch would wait for the longest one.
        waves_of_one, waves_of_two = ceil_div(2 * rows, count), 2 * ceil_div(rows, count)
        uneven = value_dim < 2 * HOPPER_TILE and not sizes.documents and waves_of_two <= waves_of_one
        launches = override.fused_launches or (2 if uneven else 1)
    return replace(
        selection,
        chunk_prepare_wy=choose("chunk_prepare_wy"),
        chunk_fwd=choose("chunk_fwd"),
        chunk_bwd_state=KernelChoice(False, state.options, source),
        chunk_bwd_qkg=choose("chunk_bwd_qkg"),
        fused_backward=fused,
        fused_reason=reason,
        fused_launches=launches,
    )


def interpreted() -> bool:
    """Return whether Triton's interpreter runs the kernels."""
    return os.environ.get("TRITON_INTERPRET") == "1"


def busy(programs: int, processors: int) -> float:
    """Return the share of multiprocessors that work while equal programs run one on each at a time."""
    return programs / (ceil_div(programs, processors) * processors)


def _select_algorithm(sizes: Sizes, override: Override) -> Selection:
    """Decide what shapes depend on. torch.compile traces this: no caches, no text made of sizes."""
    device, dtype, batch, tokens, heads, key_dim, value_dim, num_householder, documents, *_ = sizes
    algorithm, reason = "fused_recurrent", "narrow heads in float32 on short rows do not pay for chunks"
    if override.algorithm is not None:
        algorithm, reason = override.algorithm, "the caller wants it so"
    elif dtype != torch.float32:
        algorithm, reason = "chunk", "the inputs have 16 bits"
    elif next_power_of_2(key_dim) * next_power_of_2(value_dim) > RECURRENT_STATE:
        algorithm, reason = "chunk", "a head's state has more elements than one warp holds"
    elif tokens * num_householder > RECURRENT_STEPS:
        algorithm, reason = "chunk", "rows are long"
    if algorithm != "chunk":
        return Selection(algorithm, reason)

    chunk_tokens = CHUNK_STEPS // num_householder
    row_chunks = ceil_div(tokens, chunk_tokens)
    chunks, why = override.segment_chunks, "the caller wants it so"
    # Short rows stay whole, and asking for the device's properties takes longer than all of this.
    if chunks is None and row_chunks < MIN_ROW_CHUNKS:
        chunks, why = 0, "on short rows more launches cost more than they save"
    elif chunks is None:
        count, hopper = gpu_of(device)
        chunks, why = segment_chunks(batch, row_chunks, heads, value_dim, count)
        if key_dim > 2 * MIN_TILE and not hopper:
            chunks, why = 0, "shared memory does not hold the transition of so wide keys"
        if chunks and documents * chunks >= row_chunks:
            chunks, why = 0, "the mean document is no longer than a segment"
    if not chunks:
        return Selection(algorithm, reason, segments_reason=why)
    segment_tokens = chunks * chunk_tokens
    count = tokens // segment_tokens + documents if documents else batch * ceil_div(tokens, segment_tokens)
    return Selection(algorithm, reason, chunks, count, why)


def segment_chunks(
    rows: int, row_chunks: int, heads: int, value_dim: int, processors: int
) -> tuple[int, str]:
    """Return chunks per segment, or 0 where sequences stay whole; and why.

    As many segments as fill the device once, of at least MIN_SEGMENT_CHUNKS each; no split into fewer than
    MIN_SEGMENTS, nor of a row with fewer chunks than MIN_ROW_CHUNKS.

    Args:
        rows: sequences of the batch; a packed row counts as one, since its documents' lengths are not known.
        row_chunks: chunks of a row.
        processors: multiprocessors of the device.
    """
    if row_chunks < MIN_ROW_CHUNKS:
        return 0, "on short rows more launches cost more than they save"
    programs = rows * heads * ceil_div(value_dim, MIN_TILE)
    segments = min(PROGRAMS_PER_PROCESSOR * processors // programs, row_chunks // MIN_SEGMENT_CHUNKS)
    if segments < MIN_SEGMENTS:
        return 0, "sequences x heads x tiles of V fill the device"
    return ceil_div(row_chunks, segments), "sequences x heads x tiles of V leave most of the device idle"


def gpu_of(device: torch.device) -> tuple[int, bool]:
    """Return the multiprocessors, and whether it is a Hopper GPU. torch.compile warns of cached functions."""
    if device.type != "cuda":
        return 1, False
    properties = torch.cuda.get_device_properties(device)
    return properties.multi_processor_count, properties.major == 9
