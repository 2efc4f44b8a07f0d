"""Launches of the Triton backend: the forward and the backward pass of `delta_product`.

By chunks. Forward: `chunk_prepare_wy` (all chunks at once), then `chunk_fwd` (serial over chunks). Backward:
`chunk_bwd_state` (serial), then `chunk_bwd_qkg` (all chunks at once), or `chunk_bwd_fused` for both. Long
sequences of few heads are split for the serial ones (`sequence_split`). `select` decides what runs and with
which options, or that `fused_recurrent` replaces all of them. No sum depends on the order in which
programs run, so results are reproducible to the bit.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fla_train.kernels.cached_launch import run_kernel
from fla_train.kernels.custom_op import custom_op
from fla_train.kernels.delta_product.recurrent import L2NORM_EPS
from fla_train.kernels.delta_product.select import Selection, select_for
from fla_train.kernels.delta_product.triton.chunk_arguments import Call, in_half, pick
from fla_train.kernels.delta_product.triton.chunk_bwd import chunk_bwd_qkg_kernel, chunk_bwd_state_kernel
from fla_train.kernels.delta_product.triton.chunk_fwd import chunk_fwd_kernel, chunk_prepare_wy_kernel
from fla_train.kernels.delta_product.triton.fused_recurrent import (
    fused_recurrent_bwd_kernel,
    fused_recurrent_fwd_kernel,
    launch_fused_recurrent,
)
from fla_train.kernels.delta_product.triton.launch_table import HOPPER_TILE, value_tiles
from fla_train.kernels.delta_product.triton.sequence_split import Segments
from fla_train.kernels.delta_product.triton.shared_heads import PAIR, make_shares, sum_shares
from fla_train.kernels.optional_triton import tl
from fla_train.kernels.sizes import ceil_div


@custom_op(mutates=("o", "prepared", "u", "states", "transitions", "final_state"))
def delta_product_forward(
    q: Tensor, k: Tensor, v: Tensor, beta: Tensor, g: Tensor | None, initial_state: Tensor | None,
    bounds: Sequence[Tensor], scale: float, qk_l2norm: bool,
    o: Tensor, prepared: Sequence[Tensor], u: Tensor | None, states: Tensor | None,
    transitions: Tensor | None, final_state: Tensor | None,
) -> None:  # fmt: skip
    """Fill the output, the tensors prepared per chunk and, if given, those that the backward reads.

    `transitions` [segments, H, K, K] is given where sequences are split. `fused_recurrent` fills the output,
    `final_state` and `states` only, which are those before each Householder step [B, T, N, H, K, V].
    """
    cu_seqlens, (heads, value_dim) = bounds[0] if bounds else None, v.shape[-2:]
    selection = select_for(q, v, cu_seqlens, qk_l2norm)
    if selection.algorithm == "fused_recurrent":
        launch_fused_recurrent(
            fused_recurrent_fwd_kernel, cu_seqlens, qk_l2norm,
            q=q, k=k, v=v, beta=beta, g=g, scale=scale, initial_state=initial_state,
            o=o, states=states, final_state=final_state,
        )  # fmt: skip
        return
    call = Call.of(q, k, beta, g is not None, bounds, qk_l2norm, prepared)
    arguments = dict(
        q=q, k=k, beta=beta, g=g, **call.factors, **call.rows,
        **call.sequences, chunk_sequence=call.chunk_sequence, scale=scale, eps=L2NORM_EPS,
        **call.sizes, GATED=g is not None,
    )  # fmt: skip
    programs = call.num_chunks * heads
    if selection.chunk_prepare_wy.hopper:
        # Not at the top: it imports Gluon, and Hopper's part of it.
        from fla_train.kernels.delta_product.hopper import prepare_wy

        prepare_wy.launch(programs, **arguments)
    else:
        run_kernel(
            chunk_prepare_wy_kernel, (programs,), **arguments, **call.tiles,
            INVERSE=tl.float16 if in_half(q, qk_l2norm) else tl.float32,
            **selection.chunk_prepare_wy.options,
        )  # fmt: skip

    options = selection.chunk_fwd.options
    sequences, num_sequences, ends = call.sequences, call.num_sequences, final_state
    if transitions is not None:
        segments = Segments(selection, call, q.device)
        initial_state = segments.start_states(k, v, initial_state, transitions, options)
        sequences, num_sequences = segments.sequences, segments.count
        ends = None if final_state is None else torch.empty_like(initial_state)
    run_kernel(
        chunk_fwd_kernel, (num_sequences * heads * ceil_div(value_dim, options["BV"]),),
        q=q, k=k, v=v, **call.factors, o=o, u=u, states=states, initial_state=initial_state,
        final_state=ends, **sequences, **call.sizes, V=value_dim, **call.tiles, **options,
    )  # fmt: skip
    if ends is not final_state:
        segments.select_last(ends, out=final_state)


@custom_op(mutates=("dq", "dk", "dv", "dbeta", "dg", "dinitial_state"))
def delta_product_backward(
    q: Tensor, k: Tensor, beta: Tensor, g: Tensor | None, do: Tensor, dfinal_state: Tensor | None,
    bounds: Sequence[Tensor], scale: float, qk_l2norm: bool,
    prepared: Sequence[Tensor], u: Tensor, states: Tensor, transitions: Tensor | None,
    dq: Tensor, dk: Tensor, dv: Tensor, dbeta: Tensor, dg: Tensor | None, dinitial_state: Tensor | None,
) -> None:  # fmt: skip
    """Fill the gradients; of `fused_recurrent`, `u` is v."""
    cu_seqlens, (heads, value_dim) = bounds[0] if bounds else None, dv.shape[-2:]
    selection = select_for(q, dv, cu_seqlens, qk_l2norm)
    one_launch = selection.fused_backward and selection.fused_launches == 1
    tile_shares = value_tiles(value_dim) if one_launch else 1  # partial sums of dbeta and dg
    key_shares = heads // q.shape[2] * tile_shares  # partial sums of dq and dk
    added = selection.fused_backward and key_shares == PAIR
    totals = {"dq": (dq, key_shares, added), "dk": (dk, key_shares, added)}
    totals["dbeta"] = (dbeta[..., None], tile_shares)
    totals |= {} if dg is None else {"dg": (dg[..., None], tile_shares)}
    shares = {name: make_shares(*total) for name, total in totals.items()}
    gradients = dict(
        q=q, k=k, beta=beta, g=g, do=do, states=states, scale=scale, dv=dv, **({"dg": None} | shares)
    )
    ends = dict(dfinal_state=dfinal_state, dinitial_state=dinitial_state)
    if selection.algorithm == "fused_recurrent":
        launch_fused_recurrent(fused_recurrent_bwd_kernel, cu_seqlens, qk_l2norm, v=u, **gradients, **ends)
    else:
        call = Call.of(q, k, beta, g is not None, bounds, qk_l2norm, prepared)
        gradients |= dict(u=u, **call.rows, **call.sizes, V=value_dim, GATED=g is not None)
        _chunk_backward(selection, call, gradients, ends, transitions)
    for name, share in shares.items():
        sum_shares(share, totals[name][0])


def _chunk_backward(
    selection: Selection,
    call: Call,
    gradients: dict[str, Any],
    ends: dict[str, Tensor | None],
    transitions: Tensor | None,
) -> None:
    """Run the chunk kernels on the arguments that they share."""
    q, do, states = (gradients[name] for name in ("q", "do", "states"))
    heads, value_dim = do.shape[-2:]
    options, dinitial_state = selection.chunk_bwd_state.options, ends["dinitial_state"]
    sequences, num_sequences = call.sequences, call.num_sequences
    if transitions is not None:
        segments = Segments(selection, call, q.device)
        end_gradients = segments.end_gradients(
            q, gradients["k"], do, ends["dfinal_state"], transitions, options
        )
        sequences, num_sequences = segments.sequences, segments.count
        starts = None if dinitial_state is None else torch.empty_like(end_gradients)
        ends = dict(dfinal_state=end_gradients, dinitial_state=starts)
    if selection.fused_backward:
        from fla_train.kernels.delta_product.hopper import bwd_fused

        factors = pick(call.factors, "wy", "p", "peak")
        arguments = {**gradients, **factors, **ends, **sequences, **pick(call.tiles, "L2NORM")}
        for part in bwd_fused.parts(arguments, selection.fused_launches):
            bwd_fused.launch(num_sequences * heads * part["TILES"], **part)
    else:
        dstates = torch.empty_like(states)
        run_kernel(
            chunk_bwd_state_kernel, (num_sequences * heads * ceil_div(value_dim, options["BV"]),),
            **pick(gradients, "q", "k", "do", "dv"), **call.factors, dstates=dstates, **ends, **sequences,
            **call.sizes, V=value_dim, **call.tiles, **options,
        )  # fmt: skip
        gradients |= dict(dstates=dstates, **call.sequences, chunk_sequence=call.chunk_sequence)
        programs = call.num_chunks * heads
        if selection.chunk_bwd_qkg.hopper:
            from fla_train.kernels.delta_product.hopper import bwd_qkg, bwd_qkg_wide

            hopper = bwd_qkg_wide if q.shape[-1] > HOPPER_TILE else bwd_qkg
            hopper.launch(programs, **gradients, **pick(call.tiles, "L2NORM"))
        else:
            options = selection.chunk_bwd_qkg.options
            run_kernel(chunk_bwd_qkg_kernel, (programs,), **gradients, **call.tiles, **options)
    if ends["dinitial_state"] is not dinitial_state:
        segments.select_first(ends["dinitial_state"], out=dinitial_state)
