"""The Triton backend of `delta_product`: launches of its four kernels and their autograd function.

Forward: `prepare_kernel` (all chunks at once), then `state_kernel` (serial over chunks). Backward:
`adjoint_kernel` (serial), then `gradient_kernel` (all chunks at once). Long sequences of few heads are cut
for the serial ones (`triton_split`). There are no atomics, so results are reproducible to the bit. For the
backward the forward keeps, in the dtype of q: X and E per sub-step (M and V elements a head; v itself is not
kept), P D per token (M elements), and one state per chunk of M = 64 steps.
Launch options come from a table (`launches`), so no call ever tunes; the tests marked `gpu` check them.

What launches kernels is `opaque` to torch.compile, which traces the rest: the allocations and the autograd
function.
"""

from collections.abc import Sequence
from importlib import import_module
from types import ModuleType
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from fla_train.kernels.delta_product import launches
from fla_train.kernels.delta_product.contract import L2NORM_EPS
from fla_train.kernels.delta_product.triton_backward import adjoint_kernel, gradient_kernel
from fla_train.kernels.delta_product.triton_common import CHUNK
from fla_train.kernels.delta_product.triton_forward import (
    LOG2E,
    MIN_LOG2_DECAY,
    prepare_kernel,
    state_kernel,
)
from fla_train.kernels.delta_product.triton_split import Pieces, find_cut
from fla_train.kernels.opaque import opaque
from fla_train.kernels.sizes import ceil_div, next_power_of_2

CHUNK_STEPS = CHUNK.value
# Least rows of the tiles of q: 16 gave dk that changes from run to run where V <= 64 (see launches.MIN_TILE).
MIN_TOKENS = 32
# The interpreter's bf16 products are garbage, so it gets fp32 operands.
INTERPRETED = triton.knobs.runtime.interpret
FP32_PRECISION = "tf32x3"  # of products of fp32 operands
OPERAND_DTYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}
# A head's row of scalars is as long as a multiple of this: where 16 does not divide a row's length, which it
# seldom does in evaluations, Triton would compile each kernel once more.
ROW_MULTIPLE = 16
# What `prepare_kernel` writes, in the order of lists of it: `gc` only with gates, `rq` and `rk` only where q
# and k are normalised.
PRODUCTS, NORMS = ("x", "p", "read", "write", "query", "decay"), ("gc", "rq", "rk")


def triton_delta_product(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    g: Tensor | None,
    *,
    scale: float,
    initial_state: Tensor | None,
    output_final_state: bool,
    cu_seqlens: Tensor | None,
    qk_l2norm: bool,
) -> tuple[Tensor, Tensor | None]:
    """`delta_product` on validated inputs; shapes and results as there, differentiable in every tensor.

    Gates below 2^-50 per token count as zero.

    Raises:
        ValueError: for float64, over 64 sub-steps per token, or a key dimension over 256 (128 in float32).
    """
    if q.dtype not in OPERAND_DTYPES:
        raise ValueError(f"the triton backend takes no {q.dtype}: choose backend=recurrent or chunked")
    if k.shape[2] > CHUNK_STEPS:
        raise ValueError(
            f"the triton backend takes at most {CHUNK_STEPS} sub-steps per token, got {k.shape[2]}"
        )
    limit = 128 if q.dtype == torch.float32 else 256  # the tiles of a chunk must fit in shared memory
    if q.shape[3] > limit:
        raise ValueError(
            f"the triton backend takes a key dimension of at most {limit} in {q.dtype}, got {q.shape[3]}"
        )
    tensors = [x if x is None else x.contiguous() for x in (q, k, v, beta, g, initial_state)]
    bounds = () if cu_seqlens is None else _bounds(cu_seqlens, q.shape[1], CHUNK_STEPS // k.shape[2])
    keep = torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors)
    return _DeltaProduct.apply(*tensors, scale, qk_l2norm, output_final_state, keep, *bounds)


def _bounds(cu_seqlens: Tensor, length: int, chunk_tokens: int) -> tuple[Tensor, Tensor, Tensor]:
    """Of a packed row: `cu_seqlens`, each document's first chunk [S + 1], each chunk's document [chunks].

    The number of chunks is an upper bound, since reading `cu_seqlens` would wait for the device.
    """
    documents = cu_seqlens.numel() - 1
    ends = ((cu_seqlens.diff() + chunk_tokens - 1) // chunk_tokens).cumsum(0)
    numbers = torch.arange(length // chunk_tokens + documents, device=ends.device, dtype=ends.dtype)
    chunk_segment = torch.searchsorted(ends, numbers, right=True).clamp_(max=documents - 1)
    return cu_seqlens, torch.nn.functional.pad(ends, (1, 0)), chunk_segment


class _DeltaProduct(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        beta: Tensor,
        g: Tensor | None,
        initial_state: Tensor | None,
        scale: float,
        qk_l2norm: bool,
        output_final_state: bool,
        keep: bool,
        *bounds: Tensor,
    ) -> tuple[Tensor, Tensor | None]:
        (batch, length, heads, key_dim), sub_steps, value_dim = q.shape, k.shape[2], v.shape[-1]
        chunks = bounds[2].numel() if bounds else batch * ceil_div(length, CHUNK_STEPS // sub_steps)
        segments = bounds[0].numel() - 1 if bounds else batch
        prepared = _make_prepared(q, k, beta, chunks, g is not None, qk_l2norm)
        o = v.new_empty(batch, length, heads, value_dim)
        errors = torch.empty_like(v) if keep else None
        states = q.new_empty(chunks, heads, value_dim, key_dim) if keep else None
        final_state = beta.new_empty(segments, heads, key_dim, value_dim) if output_final_state else None
        cut = find_cut(q, k, value_dim, bounds)
        transitions = None if cut is None else beta.new_empty(cut.pieces, heads, key_dim, key_dim)
        delta_product_forward(
            *(q, k, v, beta, g, initial_state, bounds, scale, qk_l2norm),
            *(o, prepared, errors, states, transitions, final_state),
        )
        ctx.set_materialize_grads(False)
        ctx.scale, ctx.qk_l2norm, ctx.num_bounds = scale, qk_l2norm, len(bounds)
        kept = (*bounds, *prepared) if keep else ()
        transitions = transitions if keep else None
        ctx.save_for_backward(q, k, beta, g, initial_state, errors, states, transitions, *kept)
        return o, final_state

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, do: Tensor | None, dfinal_state: Tensor | None) -> tuple[Tensor | None, ...]:
        q, k, beta, g, initial_state, errors, states, transitions, *kept = ctx.saved_tensors
        bounds, prepared = kept[: ctx.num_bounds], kept[ctx.num_bounds :]
        dv = torch.empty_like(errors)
        do = torch.zeros_like(dv[:, :, 0]).contiguous() if do is None else do.contiguous()
        dfinal_state = None if dfinal_state is None else dfinal_state.contiguous()
        dq, dk, dbeta = (torch.empty_like(x) for x in (q, k, beta))
        dg = None if g is None else torch.empty_like(g)
        dinitial_state = torch.empty_like(initial_state) if ctx.needs_input_grad[5] else None
        delta_product_backward(
            *(q, k, beta, g, do, dfinal_state, bounds, ctx.scale, ctx.qk_l2norm),
            *(prepared, errors, states, transitions),
            *(dq, dk, dv, dbeta, dg, dinitial_state),
        )
        return dq, dk, dv, dbeta, dg, dinitial_state, *[None] * (4 + ctx.num_bounds)


def _make_prepared(
    q: Tensor, k: Tensor, beta: Tensor, chunks: int, gated: bool, qk_l2norm: bool
) -> list[Tensor]:
    """Room for what `prepare_kernel` writes; shapes are stated there."""
    tokens, heads, sub_steps = q.shape[0] * q.shape[1], q.shape[2], k.shape[2]
    by_token, by_step = (heads, _row_length(q)), (heads, _row_length(q) * sub_steps)
    shapes = [by_step, by_step, by_token, (chunks, heads)]
    shapes += [by_token] if gated else []
    shapes += [by_token, by_step] if qk_l2norm else []
    inverse = torch.float16 if _in_half(q, qk_l2norm) else q.dtype
    matrices = [
        q.new_empty(tokens * sub_steps, heads, CHUNK_STEPS, dtype=inverse),
        q.new_empty(tokens, heads, CHUNK_STEPS),
    ]
    return matrices + [beta.new_empty(shape) for shape in shapes]


def _row_length(q: Tensor) -> int:
    """Scalars in a head's row of the tables by token: B * T, or a few more."""
    return ROW_MULTIPLE * ceil_div(q.shape[0] * q.shape[1], ROW_MULTIPLE)


def _in_half(q: Tensor, qk_l2norm: bool) -> bool:
    """Whether the triangle is inverted, and the inverse kept, in fp16.

    With unit keys and beta <= 2 the entries of both are at most 2.
    """
    return qk_l2norm and q.dtype != torch.float32 and not INTERPRETED


def _by_name(
    prepared: Sequence[Tensor], gated: bool, qk_l2norm: bool
) -> tuple[dict[str, Tensor], dict[str, Tensor | None]]:
    """Tensors of `_make_prepared` as arguments: those of PRODUCTS, those of NORMS."""
    present = [gated, qk_l2norm, qk_l2norm]
    rest = iter(prepared[len(PRODUCTS) :])
    norms = {name: next(rest) if there else None for name, there in zip(NORMS, present, strict=True)}
    return dict(zip(PRODUCTS, prepared, strict=False)), norms


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
    sizes, parallel, programs, serial = _arguments(q, k, g, bounds, scale, qk_l2norm)
    options = launches.lookup(q.device, q.dtype, q.shape[-1], v.shape[-1], k.shape[2])
    products, norms = _by_name(prepared, g is not None, qk_l2norm)
    ends = final_state
    with torch.cuda.device_of(q):
        arguments = {
            **{"q": q, "k": k, "beta": beta, "g": g, "eps": L2NORM_EPS},
            **products,
            **norms,
            **sizes,
            **parallel,
            "INVERSE": tl.float16 if _in_half(q, qk_l2norm) else tl.float32,
        }
        _launch(prepare_kernel, programs, arguments, options.prepare, hopper="gluon_prepare")
        if transitions is not None:
            pieces = Pieces(q, k, v.shape[-1], bounds, sizes, forgets=g is not None and qk_l2norm)
            sizes, serial = pieces.sizes, pieces.programs
            initial_state = pieces.start_states(k, v, products, initial_state, transitions, options.state)
            ends = None if final_state is None else torch.empty_like(initial_state)
        state_kernel[(serial * ceil_div(v.shape[-1], options.state["BV"]),)](
            *(q, k, v),
            **products,
            o=o,
            errors=errors,
            states=states,
            initial_state=initial_state,
            final_state=ends,
            **sizes,
            V=v.shape[-1],
            HAS_INITIAL=initial_state is not None,
            STORE_FINAL=final_state is not None,
            KEEP=states is not None,
            **options.state,
        )
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
    sizes, parallel, programs, serial = _arguments(q, k, g, bounds, scale, qk_l2norm)
    options = launches.lookup(q.device, q.dtype, q.shape[-1], dv.shape[-1], k.shape[2])
    products, norms = _by_name(prepared, g is not None, qk_l2norm)
    adjoint = _plain(options.adjoint)
    ends = {
        "dfinal_state": dfinal_state,
        "dinitial_state": dinitial_state,
        "HAS_FINAL": dfinal_state is not None,
        "STORE_INITIAL": dinitial_state is not None,
    }
    arguments = {
        **{"q": q, "k": k, "beta": beta, "g": g, "do": do, "dv": dv, "errors": errors, "states": states},
        **{"dq": dq, "dk": dk, "dbeta": dbeta, "dg": dg},
        **norms,
        **sizes,
        **parallel,
        "V": dv.shape[-1],
        "MIN_LOG_DECAY": MIN_LOG2_DECAY.value / LOG2E.value,
    }
    with torch.cuda.device_of(q):
        whole = None if transitions is not None else _hopper(options.adjoint, "gluon_reverse")
        if whole and whole.fits(arguments, serial):
            whole.launch({**arguments, **products, **ends}, serial)
            return
        dstates, spans = torch.empty_like(states), sizes
        if transitions is not None:
            pieces = Pieces(q, k, dv.shape[-1], bounds, sizes, forgets=g is not None and qk_l2norm)
            spans, serial = pieces.sizes, pieces.programs
            dfinal_state = pieces.end_gradients(q, k, do, products, dfinal_state, transitions, adjoint)
            starts = None if dinitial_state is None else torch.empty_like(dfinal_state)
            ends |= {"dfinal_state": dfinal_state, "dinitial_state": starts, "HAS_FINAL": True}
        adjoint_kernel[(serial * ceil_div(dv.shape[-1], adjoint["BV"]),)](
            *(q, k, do),
            **products,
            dv=dv,
            dstates=dstates,
            **ends,
            **spans,
            V=dv.shape[-1],
            **adjoint,
        )
        if ends["dinitial_state"] is not dinitial_state:
            pieces.first(ends["dinitial_state"], out=dinitial_state)
        arguments["dstates"] = dstates
        _launch(gradient_kernel, programs, arguments, options.gradient, hopper="gluon_gradient")


def _launch(
    kernel: triton.JITFunction,
    programs: int,
    arguments: dict[str, Any],
    options: launches.Options,
    *,
    hopper: str,
) -> None:
    """Run a kernel for so many chunks x heads, or Hopper's own of that module where the options say so."""
    module = _hopper(options, hopper)
    if module and module.fits(arguments):
        module.launch(arguments, programs)
        return
    kernel[(programs,)](**arguments, **_plain(options))


def _hopper(options: launches.Options, name: str) -> ModuleType | None:
    """The module of a Gluon kernel where the options want it."""
    # Not at the top: it imports Gluon, and Hopper's part of it.
    return import_module(f"{__package__}.{name}") if "gluon" in options and not INTERPRETED else None


def _plain(options: launches.Options) -> launches.Options:
    """The options that a Triton kernel takes."""
    return {name: value for name, value in options.items() if name != "gluon"}


def _arguments(
    q: Tensor, k: Tensor, g: Tensor | None, bounds: Sequence[Tensor], scale: float, qk_l2norm: bool
) -> tuple[dict[str, Any], dict[str, Any], int, int]:
    """Arguments of every kernel; further ones of those that run over all chunks at once, and their programs;
    the programs per tile of V of those that walk each sequence."""
    (batch, length, heads, key_dim), sub_steps = q.shape, k.shape[2]
    chunk_tokens = CHUNK_STEPS // sub_steps
    row_chunks = ceil_div(length, chunk_tokens)
    cu_seqlens, offsets, chunk_segment = bounds or (None, None, None)
    sizes = {
        "cu_seqlens": cu_seqlens,
        "chunk_offsets": offsets,
        "n_total": _row_length(q),
        "T": length,
        "NT": row_chunks,
        "H": heads,
        "K": key_dim,
        "N": sub_steps,
        "C": chunk_tokens,
        "M": CHUNK_STEPS,
        "BC": max(MIN_TOKENS, next_power_of_2(chunk_tokens)),
        "BK": max(launches.MIN_TILE, next_power_of_2(key_dim)),
        "PACKED": bool(bounds),
        "OPERAND": tl.float32 if INTERPRETED else OPERAND_DTYPES[q.dtype],
        "PRECISION": FP32_PRECISION,
    }
    parallel = {
        "chunk_segment": chunk_segment,
        "scale": scale,
        "GATED": g is not None,
        "L2NORM": qk_l2norm,
    }
    chunks = chunk_segment.numel() if bounds else batch * row_chunks
    segments = cu_seqlens.numel() - 1 if bounds else batch
    return sizes, parallel, chunks * heads, segments * heads
