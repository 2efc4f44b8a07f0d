"""`delta_product` in stretches of some tokens, between which one state is kept for the backward pass.

Each stretch is a checkpoint that begins in the state which the one before it ended in. The backward pass runs
them again, last to first, so that what a backend keeps for it is there for one stretch at a time.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

Backend = Callable[..., tuple[Tensor, Tensor | None]]


def run_recomputed(run: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
    """`run`, which keeps nothing but its arguments for the backward pass, and runs again there."""
    return checkpoint(run, *arguments, **options, use_reentrant=False, preserve_rng_state=False)


def run_in_stretches(
    run: Backend,
    tokens: int,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    g: Tensor | None,
    *,
    initial_state: Tensor | None,
    output_final_state: bool,
    cu_seqlens: Tensor | None,
    **options: Any,
) -> tuple[Tensor, Tensor | None]:
    """A backend on validated inputs, `tokens` of each row at a time; shapes and results as of the backend.

    Between two stretches each row keeps one state, a packed one that of the document which goes on.
    """
    length = q.shape[1]
    starts = range(0, length, tokens)
    # Not slices: each has a gradient as long as the whole, where those of a split are put together once.
    pieces = [[None] * len(starts) if x is None else x.split(tokens, dim=1) for x in (q, k, v, beta, g)]
    outputs, carried, final_state = [], None, None
    for start, *piece in zip(starts, *pieces, strict=True):
        o, carried, states = run_recomputed(
            *(_stretch, run, start, carried, *piece),
            initial_state=initial_state,
            output_final_state=output_final_state or start + tokens < length,
            cu_seqlens=cu_seqlens,
            **options,
        )
        outputs.append(o)
        if output_final_state and cu_seqlens is not None:
            over = cu_seqlens[1:, None, None, None] <= start
            final_state = states if final_state is None else torch.where(over, final_state, states)
    return torch.cat(outputs, dim=1), carried if cu_seqlens is None else final_state


def _stretch(
    run: Backend,
    start: int,
    carried: Tensor | None,
    *piece: Tensor | None,
    initial_state: Tensor | None,
    output_final_state: bool,
    cu_seqlens: Tensor | None,
    **options: Any,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """The stretch from token `start` on: q, k, v, beta and g of `piece`, all else as of the whole call.

    `carried` is the state at its start, [B, H, K, V] or, with `cu_seqlens`, [1, H, K, V]; None at token 0.

    Returns:
        o; `carried` of the next stretch; with `cu_seqlens` the states of the documents that aren't over
        before it, [S, H, K, V] (others hold anything). Without `output_final_state` no states.
    """
    wanted = {"output_final_state": output_final_state, **options}
    if cu_seqlens is None:
        state = initial_state if carried is None else carried
        o, state = run(*piece, initial_state=state, cu_seqlens=None, **wanted)
        # A copy for torch.compile, which keeps no result of an opaque call: to have the last one's state it
        # would run all stretches again, and hold what each of them makes.
        return o, None if state is None else state.clone(), None
    end = start + piece[0].shape[1]
    if carried is not None:  # documents that are over are empty here, so that they may have it, too
        begun = cu_seqlens[:-1, None, None, None] < start
        initial_state = torch.where(begun, carried, 0.0 if initial_state is None else initial_state)
    bounds = cu_seqlens.clamp(start, end) - start
    o, states = run(*piece, initial_state=initial_state, cu_seqlens=bounds, **wanted)
    if states is None:
        return o, None, None
    going_on = (cu_seqlens[1:] < end).sum()  # as many documents lie before the one that holds token end - 1
    return o, states.index_select(0, going_on.view(1)), states
