"""The forward and the backward pass of the Triton backend: their launches.

Forward: `prepare_kernel` (all chunks at once), then `state_kernel` (serial over chunks). Backward:
`adjoint_kernel` (serial), then `gradient_kernel` (all chunks at once), or both as one. Long sequences of few
heads are cut for the serial ones (`sequence_split`). There are no atomics, so results are reproducible to the
bit. Launch options come from a table (`launches`), so no call ever tunes; the tests marked `gpu` check them.
"""

from collections.abc import Sequence
from importlib import import_module
from types import ModuleType
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from fla_train.kernels.cached_launch import run_kernel
from fla_train.kernels.custom_op import custom_op as opaque
from fla_train.kernels.delta_product.interface import L2NORM_EPS
from fla_train.kernels.delta_product.triton import launch_table
from fla_train.kernels.delta_product.triton.chunk_bwd import adjoint_kernel, gradient_kernel
from fla_train.kernels.delta_product.triton.chunk_fwd import (
    LOG2E,
    MIN_LOG2_DECAY,
    prepare_kernel,
    state_kernel,
)
from fla_train.kernels.delta_product.triton.common import CHUNK
from fla_train.kernels.delta_product.triton.sequence_split import Pieces
from fla_train.kernels.sizes import ceil_div, next_power_of_2

CHUNK_STEPS = CHUNK.value
# Least rows of the tiles of q: 16 gave dk that changes from run to run where V <= 64 (launch_table.MIN_TILE).
MIN_TOKENS = 32
# The interpreter's bf16 products are garbage, so it gets fp32 operands.
INTERPRETED = triton.knobs.runtime.interpret
FP32_PRECISION = "tf32x3"  # of products of fp32 operands
OPERAND_DTYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}
# A head's row of scalars is as long as a multiple of this: where 16 does not divide a row's length, which it
# seldom does in evaluations, Triton would compile each kernel once more.
ROW_MULTIPLE = 16
# What `prepare_kernel` writes, in the order of lists of it: always, with gates, where q and k are normalised.
PRODUCTS, GATES, NORMS = ("x", "p", "read", "write", "query", "decay", "peak"), ("gc",), ("rq", "rk")


@opaque(mutates=("o", "prepared", "errors", "states", "transitions", "final_state"))
def delta_product_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    g: Tensor | None,
    initial_state: Tensor | None,
    bounds: Sequence[Tensor],
    scale: float,
    qk_l2norm: bool,
    o: Tensor,
    prepared: Sequence[Tensor],
    errors: Tensor | None,
    states: Tensor | None,
    transitions: Tensor | None,
    final_state: Tensor | None,
) -> None:
    """Fill the output, what is prepared per chunk and, where given, what the backward reads.

    `transitions` [pieces, H, K, K] is given where `find_cut` cuts the sequences.
    """
    arguments, programs, serial = _arguments(q, k, beta, g, v.shape[-1], bounds, scale, qk_l2norm, prepared)
    options = launch_table.lookup(q.device, q.dtype, q.shape[-1], v.shape[-1], k.shape[2])
    arguments |= {"eps": L2NORM_EPS, "INVERSE": tl.float16 if in_half(q, qk_l2norm) else tl.float32}
    ends = final_state
    with torch.cuda.device_of(q):
        _launch(prepare_kernel, programs, arguments, options.prepare, hopper="prepare_wy")
        if transitions is not None:
            pieces = Pieces(q, k, v.shape[-1], bounds, arguments)
            arguments, serial = pieces.arguments, pieces.programs
            initial_state = pieces.start_states(v, initial_state, transitions, options.state)
            ends = None if final_state is None else torch.empty_like(initial_state)
        arguments |= {
            **{"v": v, "o": o, "errors": errors, "states": states},
            **{"initial_state": initial_state, "final_state": ends},
            "HAS_INITIAL": initial_state is not None,
            "STORE_FINAL": final_state is not None,
            "KEEP": states is not None,
        }
        tiles = ceil_div(v.shape[-1], options.state["BV"])
        run_kernel(state_kernel, (serial * tiles,), arguments, **options.state)
        if ends is not final_state:
            pieces.last(ends, out=final_state)


@opaque(mutates=("dq", "dk", "dv", "dbeta", "dg", "dinitial_state"))
def delta_product_backward(
    q: Tensor,
    k: Tensor,
    beta: Tensor,
    g: Tensor | None,
    do: Tensor,
    dfinal_state: Tensor | None,
    bounds: Sequence[Tensor],
    scale: float,
    qk_l2norm: bool,
    prepared: Sequence[Tensor],
    errors: Tensor,
    states: Tensor,
    transitions: Tensor | None,
    dq: Tensor,
    dk: Tensor,
    dv: Tensor,
    dbeta: Tensor,
    dg: Tensor | None,
    dinitial_state: Tensor | None,
) -> None:
    """Fill the gradients."""
    arguments, programs, serial = _arguments(q, k, beta, g, dv.shape[-1], bounds, scale, qk_l2norm, prepared)
    options = launch_table.lookup(q.device, q.dtype, q.shape[-1], dv.shape[-1], k.shape[2])
    adjoint = launch_table.plain(options.adjoint)
    arguments |= {
        **{"do": do, "errors": errors, "states": states, "dfinal_state": dfinal_state},
        **{"dq": dq, "dk": dk, "dv": dv, "dbeta": dbeta, "dg": dg, "dinitial_state": dinitial_state},
        "HAS_FINAL": dfinal_state is not None,
        "STORE_INITIAL": dinitial_state is not None,
        "MIN_LOG_DECAY": MIN_LOG2_DECAY.value / LOG2E.value,
    }
    with torch.cuda.device_of(q):
        whole = _whole_backward(q, k, dv.shape[-1], bounds, transitions)
        arguments["dstates"] = None if whole else torch.empty_like(states)
        walked, starts = arguments, dinitial_state
        if transitions is not None:
            pieces = Pieces(q, k, dv.shape[-1], bounds, arguments)
            walked, serial = pieces.arguments, pieces.programs
            dfinal_state = pieces.end_gradients(do, dfinal_state, transitions, adjoint)
            starts = None if dinitial_state is None else torch.empty_like(dfinal_state)
            walked |= {"dfinal_state": dfinal_state, "dinitial_state": starts, "HAS_FINAL": True}
        if whole:
            whole.launch(walked, serial)
        else:
            tiles = ceil_div(dv.shape[-1], adjoint["BV"])
            run_kernel(adjoint_kernel, (serial * tiles,), walked, **adjoint)
            _launch(gradient_kernel, programs, arguments, options.gradient, hopper="bwd_qkg")
        if starts is not dinitial_state:
            pieces.first(starts, out=dinitial_state)


def overwrites_errors(
    q: Tensor, k: Tensor, value_dim: int, bounds: Sequence[Tensor], transitions: Tensor | None
) -> bool:
    """Whether the backward pass reads each element of `errors` before it writes that of `dv`."""
    return _whole_backward(q, k, value_dim, bounds, transitions) is not None


def _whole_backward(
    q: Tensor, k: Tensor, value_dim: int, bounds: Sequence[Tensor], transitions: Tensor | None
) -> ModuleType | None:
    """The backward pass as one kernel, where it fits. Sequences, or their pieces, run at once."""
    options = launch_table.lookup(q.device, q.dtype, q.shape[-1], value_dim, k.shape[2])
    whole = _hopper(options.adjoint, "bwd_fused")
    segments = bounds[0].numel() - 1 if bounds else q.shape[0]
    pieces = segments if transitions is None else transitions.shape[0]
    sizes = {"q": q, "K": q.shape[-1], "V": value_dim}
    return whole if whole and whole.fits(sizes, pieces * q.shape[2]) else None


def _launch(
    kernel: triton.JITFunction,
    programs: int,
    arguments: dict[str, Any],
    options: launch_table.Options,
    *,
    hopper: str,
) -> None:
    """Run a kernel for so many chunks x heads, or Hopper's own of that module where the options say so."""
    module = _hopper(options, hopper)
    if module and module.fits(arguments):
        module.launch(arguments, programs)
        return
    run_kernel(kernel, (programs,), arguments, **launch_table.plain(options))


def _hopper(options: launch_table.Options, name: str) -> ModuleType | None:
    """The module of a Gluon kernel where the options want it."""
    # Not at the top: it imports Gluon, and Hopper's part of it.
    return import_module(f"fla_train.kernels.delta_product.hopper.{name}") if "gluon" in options and not INTERPRETED else None


def _arguments(
    q: Tensor,
    k: Tensor,
    beta: Tensor,
    g: Tensor | None,
    value_dim: int,
    bounds: Sequence[Tensor],
    scale: float,
    qk_l2norm: bool,
    prepared: Sequence[Tensor],
) -> tuple[dict[str, Any], int, int]:
    """What several kernels take, by name; the programs of those that run over all chunks at once; the
    programs per tile of V of those that walk each sequence."""
    (batch, length, heads, key_dim), sub_steps = q.shape, k.shape[2]
    chunk_tokens = CHUNK_STEPS // sub_steps
    row_chunks = ceil_div(length, chunk_tokens)
    cu_seqlens, offsets, chunk_segment = bounds or (None, None, None)
    names = PRODUCTS + (GATES if g is not None else ()) + (NORMS if qk_l2norm else ())
    arguments = {
        **{"q": q, "k": k, "beta": beta, "g": g, "gc": None, "rq": None, "rk": None},
        **dict(zip(names, prepared, strict=True)),
        **{"cu_seqlens": cu_seqlens, "chunk_offsets": offsets, "chunk_segment": chunk_segment},
        "scale": scale,
        "n_total": row_length(q),
        "T": length,
        "NT": row_chunks,
        "H": heads,
        "K": key_dim,
        "V": value_dim,
        "N": sub_steps,
        "C": chunk_tokens,
        "M": CHUNK_STEPS,
        "BC": max(MIN_TOKENS, next_power_of_2(chunk_tokens)),
        "BK": max(launch_table.MIN_TILE, next_power_of_2(key_dim)),
        "GATED": g is not None,
        "L2NORM": qk_l2norm,
        "PACKED": bool(bounds),
        "OPERAND": tl.float32 if INTERPRETED else OPERAND_DTYPES[q.dtype],
        "PRECISION": FP32_PRECISION,
    }
    chunks = chunk_segment.numel() if bounds else batch * row_chunks
    segments = cu_seqlens.numel() - 1 if bounds else batch
    return arguments, chunks * heads, segments * heads


def row_length(q: Tensor) -> int:
    """Scalars in a head's row of the tables by token: B * T, or a few more."""
    return ROW_MULTIPLE * ceil_div(q.shape[0] * q.shape[1], ROW_MULTIPLE)


def in_half(q: Tensor, qk_l2norm: bool) -> bool:
    """Whether the triangle is inverted, and the inverse kept, in fp16.

    With unit keys and beta <= 2 the entries of both are at most 2.
    """
    return qk_l2norm and q.dtype != torch.float32 and not INTERPRETED
