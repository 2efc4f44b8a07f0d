"""Context parallelism: the operator, convolutions and attention on rows that are split over several ranks.

Each rank of a group holds one part of every row, in rank order. Ranks exchange messages:

    forward    a part sends its final state, last convolution inputs, keys and values to later parts
    backward   a part sends gradients of these to earlier parts

The operator of a part starts from the state that it receives. It therefore runs once, forward and backward,
for every n_h, gate and backend, and results differ from those of whole rows only by rounding. A rank never
waits for a later one in the forward pass, nor for an earlier one in the backward pass, so it lags one
layer's operator behind its neighbour. Exchanging products of transitions (as `sequence_split` does within a
GPU) would avoid the lag, but every rank would run the recurrence twice.

A layer that is recomputed in the backward pass (activation checkpointing) reuses the messages of its first
run. All ranks of a group must run the same layers in the same order.
"""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from fla_train.kernels.delta_product.interface import delta_product

T = TypeVar("T")
MESSAGES = 64  # a rank with more unfinished messages waits for the oldest


class ContextGroup:
    """Send and receive tensors between the ranks that share rows.

    Args:
        group: their process group. Ranks are counted within it, from 0.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.rank, self.size, self._group = dist.get_rank(group), dist.get_world_size(group), group
        self._sent: deque[tuple[dist.Work, Tensor]] = deque()

    def send(self, x: Tensor, rank: int) -> None:
        """Send x without waiting for `rank`, which may be behind."""
        x = x.detach().contiguous()
        work = dist.isend(x, dist.get_global_rank(self._group, rank), self._group)
        self._sent.append((work, x))
        if len(self._sent) > MESSAGES:
            self._sent.popleft()[0].wait()

    def receive(self, like: Tensor, rank: int) -> Tensor:
        """Return the next tensor from `rank`, of the shape and dtype of `like`."""
        x = torch.empty_like(like, memory_format=torch.contiguous_format)
        dist.recv(x, dist.get_global_rank(self._group, rank), self._group)
        return x

    def add_up(self, x: Tensor) -> None:
        """Replace x by its sum over the ranks."""
        dist.all_reduce(x, group=self._group)


@dataclass(frozen=True)
class ContextPart:
    """Describe the part of the rows on this rank. A row has one part per rank, all of one length.

    Attributes:
        group: the ranks that share the rows.
        continues: whether the document of the part's first token began in an earlier part.
        continued: whether the document of its last token continues in the next part.
        documents: numbers of the first and last document of a packed row with tokens in the part; None: rows
            are not packed.
        received: messages of a forward pass by key, for layers that are recomputed; None: no layer is.
    """

    group: ContextGroup
    continues: bool
    continued: bool
    documents: tuple[int, int] | None = None
    received: dict[str, Any] | None = None

    @classmethod
    def of(cls, group: ContextGroup, length: int, cu_seqlens: Tensor | None = None) -> "ContextPart":
        """Return this rank's part with `length` tokens.

        Args:
            cu_seqlens: in host memory, [S + 1] bounds of the documents packed in the whole row.
        """
        start, end = group.rank * length, (group.rank + 1) * length
        if cu_seqlens is None:
            return cls(group, group.rank > 0, group.rank < group.size - 1)
        ends = cu_seqlens[1:].long()
        first, last = torch.searchsorted(ends, torch.tensor([start, end - 1]), right=True).tolist()
        return cls(group, int(cu_seqlens[first]) < start, int(ends[last]) > end, (first, last))

    def remembering(self) -> "ContextPart":
        """Return a copy for a forward pass whose layers are recomputed in the backward pass."""
        return replace(self, received={})

    def start(self, length: int) -> int:
        """Return the first token of a part of `length` tokens."""
        return self.group.rank * length

    def bounds(self, cu_seqlens: Tensor, length: int) -> Tensor:
        """Convert the documents' bounds in the whole row to bounds within the part of `length` tokens."""
        assert self.documents is not None
        first, last = self.documents
        return (cu_seqlens[first : last + 2] - self.start(length)).clamp(0, length)

    def once(self, key: str, exchange: Callable[[], T]) -> T:
        """Return `exchange()`, which runs once per key in a pass."""
        if self.received is None:
            return exchange()
        if key not in self.received:
            self.received[key] = exchange()
        return self.received[key]


def gather_earlier(x: Tensor, part: ContextPart, layer: int) -> Tensor:
    """Return x [..., T, D] of all earlier parts and this one, [..., tokens so far, D]; differentiable."""
    return _Earlier.apply(x, part, f"{layer} earlier")


def receive_inputs(xs: Sequence[Tensor], count: int, part: ContextPart, layer: int) -> tuple[Tensor, ...]:
    """Receive the `count` tokens before each x [B, T, D], as [B, D, count]; zeros at a document's start.

    Their gradients return to the sender. `send_inputs` must follow in each layer.

    Raises:
        ValueError: the part is shorter.
    """
    if xs[0].shape[1] < count:
        raise ValueError(
            f"a part of {xs[0].shape[1]} tokens is shorter than the {count} inputs before the next"
        )
    channels = [x.shape[-1] for x in xs]
    like = xs[0].new_empty(xs[0].shape[0], sum(channels), count)
    if part.continues:
        before = _Start.apply(like, part, f"{layer} inputs", *xs)
    else:
        # They need a gradient as well, so that the convolutions' last inputs get one.
        before = torch.zeros_like(like).requires_grad_(torch.is_grad_enabled())
    return before.split(channels, dim=1)


def send_inputs(y: Tensor, last: Sequence[Tensor], part: ContextPart, layer: int) -> Tensor:
    """Send the last inputs [B, D, count] of the layer's convolutions to the next part.

    Returns:
        y, the output of one of the convolutions: its backward pass receives the gradients of `last`.
    """
    return _End.apply(y, torch.cat(list(last), dim=1), part, f"{layer} inputs sent") if part.continued else y


def context_parallel_delta_product(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    g: Tensor | None = None,
    *,
    part: ContextPart,
    layer: int,
    cu_seqlens: Tensor | None = None,
    **options: Any,
) -> Tensor:
    """Run `delta_product` on the tokens of this rank's part, differentiable in every tensor.

    Args:
        q, k, v, beta, g: inputs of `delta_product` for the part.
        layer: number of the layer, the same on all ranks.
        cu_seqlens: bounds within the part, `ContextPart.bounds`.
        options: `scale`, `qk_l2norm`, `recompute` and `backend` of `delta_product`.

    Returns:
        o [B, T, HV, V].
    """
    # Documents after the first one begin in the part, from zero states. The last one ends the part.
    fresh = 0 if part.documents is None else part.documents[1] - part.documents[0]
    start = None
    if part.continues:
        state = beta.new_empty(q.shape[0], v.shape[-2], q.shape[-1], v.shape[-1])
        start = _Start.apply(state, part, f"{layer} state", q, k, v, beta, g)
        start = torch.cat([start, start.new_zeros(fresh, *start.shape[1:])])
    o, final = delta_product(
        q, k, v, beta, g,
        initial_state=start,
        output_final_state=part.continued,
        cu_seqlens=cu_seqlens,
        **options,
    )  # fmt: skip
    return _End.apply(o, final[fresh:], part, f"{layer} end") if part.continued else o


class _Start(torch.autograd.Function):
    """Receive a message of the previous part, and return its gradient to it.

    `used_with` are the tensors of the same computation whose gradients are needed.
    """

    @staticmethod
    def forward(ctx: Any, like: Tensor, part: ContextPart, key: str, *used_with: Tensor | None) -> Tensor:
        ctx.group, ctx.inputs = part.group, 3 + len(used_with)
        return part.once(key, lambda: part.group.receive(like, part.group.rank - 1)).clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dstart: Tensor) -> tuple[None, ...]:
        ctx.group.send(dstart, ctx.group.rank - 1)
        return (None,) * ctx.inputs


class _End(torch.autograd.Function):
    """Return o, and send `end` to the next part, which returns its gradient."""

    @staticmethod
    def forward(ctx: Any, o: Tensor, end: Tensor, part: ContextPart, key: str) -> Tensor:
        ctx.group, ctx.like = part.group, torch.empty_like(end, device="meta")
        part.once(key, lambda: part.group.send(end, part.group.rank + 1))
        return o.view_as(o)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, do: Tensor) -> tuple[Tensor | None, ...]:
        dend = ctx.group.receive(torch.empty_like(ctx.like, device=do.device), ctx.group.rank + 1)
        return do, dend, None, None


class _Earlier(torch.autograd.Function):
    """Concatenate x of earlier parts and this one; its gradient is the sum over this part and later ones."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, part: ContextPart, key: str) -> Tensor:
        group = ctx.group = part.group

        def exchange() -> list[Tensor]:
            for rank in range(group.rank + 1, group.size):
                group.send(x, rank)
            return [group.receive(x, rank) for rank in range(group.rank)]

        return torch.cat([*part.once(key, exchange), x], dim=-2)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        group = ctx.group
        *earlier, dx = grad.chunk(group.rank + 1, dim=-2)
        for rank, part_grad in enumerate(earlier):
            group.send(part_grad, rank)
        for rank in range(group.rank + 1, group.size):
            dx = dx + group.receive(dx, rank)
        return dx, None, None
