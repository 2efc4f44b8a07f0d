"""Context parallelism: the operator, convolution inputs and gathered keys of sequences split over ranks.

Each rank of a group holds one part of every row, in rank order. Over a part the state obeys

    S_end = Phi S_start + L        dS_start = Phi^T dS_end + dL

with Phi [K, K] the product of its tokens' transitions, L [K, V] the final state from zero, and dL the
gradient of the initial state by the part's own outputs (`sequence_split` has the same algebra within a GPU).
The ranks exchange Phi and L in the forward pass and dL in the backward pass, and each composes its start and
the gradient of its end. Phi is the final state that the operator reaches from the identity with v = 0, so
every backend serves. A document that begins inside a part makes the part's Phi zero.

The operator's passes, per layer: a rank whose start is zero and the last rank run it forward and backward
once, all others twice. The last rank waits for the others in the forward pass, the first in the backward
pass. Each rank must make the same calls in the same order.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from fla_train.kernels.delta_product.interface import delta_product


@dataclass(frozen=True)
class ContextPart:
    """Which tokens of its rows this rank holds: of as many equal parts as `group` has ranks, one by its rank.

    Attributes:
        group: the ranks that share the rows.
        continues: whether the document of the part's first token began in an earlier part.
        documents: of a packed row, numbers of the first and last document with tokens in the part; None: rows
            are not packed.
    """

    group: dist.ProcessGroup
    continues: bool
    documents: tuple[int, int] | None = None

    @classmethod
    def of(cls, group: dist.ProcessGroup, length: int, cu_seqlens: Tensor | None = None) -> "ContextPart":
        """The part of this rank, of `length` tokens.

        Args:
            cu_seqlens: in host memory, [S + 1] bounds of the documents packed in the whole row.
        """
        rank = dist.get_rank(group)
        if cu_seqlens is None:
            return cls(group, rank > 0)
        tokens = torch.tensor([rank * length, (rank + 1) * length - 1])
        first, last = torch.searchsorted(cu_seqlens[1:].long(), tokens, right=True).tolist()
        return cls(group, int(cu_seqlens[first]) < rank * length, (first, last))

    @property
    def rank(self) -> int:
        return dist.get_rank(self.group)

    @property
    def size(self) -> int:
        """Number of parts."""
        return dist.get_world_size(self.group)

    def bounds(self, cu_seqlens: Tensor, length: int) -> Tensor:
        """The documents' bounds within the part of `length` tokens, from those of the whole row."""
        assert self.documents is not None
        first, last = self.documents
        return (cu_seqlens[first : last + 2] - self.rank * length).clamp(0, length)


def gather_parts(x: Tensor, part: ContextPart) -> Tensor:
    """The whole rows [..., T, D] of which each rank has a part [..., T / ranks, D]; differentiable."""
    return _Gather.apply(x, part.group).movedim(0, -3).flatten(-3, -2)


def previous_inputs(x: Tensor, count: int, part: ContextPart) -> Tensor:
    """The `count` tokens before x [B, T, D] in its rows, [B, D, count]; zeros before a row's first token.

    Raises:
        ValueError: the part is shorter.
    """
    if x.shape[1] < count:
        raise ValueError(f"a part of {x.shape[1]} tokens is shorter than the {count} inputs before the next")
    return _FromPrevious.apply(x[:, x.shape[1] - count :].transpose(1, 2), part.group)


def context_parallel_delta_product(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    g: Tensor | None = None,
    *,
    part: ContextPart,
    cu_seqlens: Tensor | None = None,
    **options: Any,
) -> Tensor:
    """The outputs of `delta_product` for the tokens of this rank's part, differentiable in every tensor.

    Args:
        q, k, v, beta, g: as `delta_product`, of the part.
        cu_seqlens: bounds within the part, `ContextPart.bounds`.
        options: `scale`, `qk_l2norm`, `recompute` and `backend` of `delta_product`.

    Returns:
        o [B, T, HV, V].
    """
    tensors = (q, k, v, beta, g)
    keep = torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors)
    operator = partial(delta_product, cu_seqlens=cu_seqlens, **options)
    return _PartDeltaProduct.apply(operator, part, keep, *tensors)


class _PartDeltaProduct(torch.autograd.Function):
    """The operator's graph is kept inside: its backward pass may run twice, around an exchange."""

    @staticmethod
    def forward(
        ctx: Any, operator: Callable, part: ContextPart, keep: bool, *tensors: Tensor | None
    ) -> Tensor:
        inputs = [None if x is None else x.detach().requires_grad_(keep) for x in tensors]
        # Documents that begin in the part after its first one: they start from zero, the last one ends it.
        fresh = 0 if part.documents is None else part.documents[1] - part.documents[0]

        def run(start: Tensor | None) -> tuple[Tensor, Tensor]:
            if start is not None:
                start = torch.cat([start, start.new_zeros(fresh, *start.shape[1:])])
            o, final = operator(*inputs, initial_state=start, output_final_state=True)
            return o, final[fresh:]

        with torch.set_grad_enabled(keep):
            start = None
            if part.continues:
                own = _transition_and_end(operator, inputs, fresh, part)
            else:
                o, end = run(start)
                own = _with_zero_transition(end)
            transitions, ends = _split(_all_gather(own, part.group))
            if part.continues:
                start = _compose(transitions[: part.rank], ends[: part.rank]).requires_grad_(keep)
                o, end = run(start)
        if keep:
            ctx.part, ctx.transitions = part, transitions
            ctx.graph = inputs, start, o, end
        return o.detach()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, do: Tensor) -> tuple[Tensor | None, ...]:
        part, transitions = ctx.part, ctx.transitions
        inputs, start, o, end = ctx.graph
        del ctx.graph  # or its tensors would stay until the whole graph is freed
        given, starts = [x for x in inputs if x is not None], [] if start is None else [start]
        last = part.rank == part.size - 1
        gradients: tuple[Tensor, ...] = ()
        if last:  # no part reads its end
            gradients = torch.autograd.grad(o, [*given, *starts], do)
        elif starts:
            gradients = torch.autograd.grad(o, starts, do, retain_graph=True)
        dstart = gradients[-1] if starts else torch.zeros_like(end)
        dstarts = _all_gather(dstart, part.group)
        if not last:
            after = slice(part.rank + 1, None)
            dend = _compose(transitions[after].mT.flip(0), dstarts[after].flip(0))
            gradients = torch.autograd.grad([o, end], given, [do, dend])
        found = iter(gradients)
        return None, None, None, *(None if x is None else next(found) for x in inputs)


@torch.no_grad()
def _transition_and_end(
    operator: Callable, inputs: list[Tensor | None], fresh: int, part: ContextPart
) -> Tensor:
    """Phi and L side by side, [rows, HV, K, K + V], of a part whose start another one decides."""
    q, k, v, beta, g = inputs
    (rows, *_, key_dim), (heads, value_dim) = q.shape, v.shape[-2:]
    if part.rank == part.size - 1:  # nobody reads them
        return beta.new_zeros(rows, heads, key_dim, key_dim + value_dim)
    if fresh:  # the last document does not depend on the start
        _, final = operator(q, k, v, beta, g, output_final_state=True)
        return _with_zero_transition(final[fresh:])
    identity = torch.eye(key_dim, dtype=beta.dtype, device=beta.device).expand(rows, heads, -1, -1)
    start, values = F.pad(identity, (0, value_dim)), F.pad(v, (key_dim, 0))
    return operator(q, k, values, beta, g, initial_state=start, output_final_state=True)[1]


def _with_zero_transition(end: Tensor) -> Tensor:
    return F.pad(end.detach(), (end.shape[-2], 0))


def _split(pairs: Tensor) -> list[Tensor]:
    """Phi [..., K, K] and L [..., K, V], views."""
    key_dim = pairs.shape[-2]
    return list(pairs.split([key_dim, pairs.shape[-1] - key_dim], dim=-1))


@torch.no_grad()
def _compose(transitions: Tensor, ends: Tensor) -> Tensor:
    """S <- Phi S + L over the parts of the first axis, from S = 0."""
    state = torch.zeros_like(ends[0])
    with torch.autocast(ends.device.type, enabled=False):
        for transition, end in zip(transitions, ends, strict=True):
            state = transition @ state + end
    return state


class _Gather(torch.autograd.Function):
    """All ranks' x, [ranks, ...]; backwards the sum over ranks of the gradient for this rank's x."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return _all_gather(x, group)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        own = torch.empty_like(grad[0], memory_format=torch.contiguous_format)
        dist.reduce_scatter_tensor(own, grad.contiguous().flatten(0, 1), group=ctx.group)
        return own, None


class _FromPrevious(torch.autograd.Function):
    """The x of the rank before, zeros on the first; backwards the gradient from the rank after."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return _of_rank(dist.get_rank(group) - 1, x, group)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _of_rank(dist.get_rank(ctx.group) + 1, grad, ctx.group), None


def _of_rank(rank: int, x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """The x of `rank` of the group, zeros if there is none. All ranks call it: x is small."""
    everyone = _all_gather(x, group)
    return everyone[rank] if 0 <= rank < len(everyone) else torch.zeros_like(x)


def _all_gather(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Each rank's x, [ranks, ...], without gradients."""
    x = x.detach().contiguous()
    everyone = x.new_empty(dist.get_world_size(group), *x.shape)
    dist.all_gather(list(everyone), x, group=group)
    return everyone
