"""Muon for the matrices and AdamW for the rest, on the stretches that ZeRO-2 leaves a rank.

ZeRO-2 lays the parameters of a group end to end and gives each rank an equal stretch of that line, cut
without regard to matrices, while Muon (Jordan et al., 2024; scaled as in arXiv 2502.16982) needs whole ones:
its update is the momentum's nearest orthogonal matrix. So each rank keeps the momentum of its stretch only,
the ranks exchange their stretches of the direction, and each orthogonalizes the matrices of which it owns a
part, by `torch.optim.Muon`. The result does not depend on the number of ranks.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

MATRICES = "matrices"  # key of the groups that Muon takes: the shapes of their matrices in order


@dataclass(frozen=True)
class Part:
    """What a stretch holds of one matrix, in elements."""

    shape: tuple[int, int]
    offset: int  # of the matrix on the whole line
    begin: int  # of the part on the whole line
    end: int


def parts_of(shapes: Sequence[tuple[int, int]], first: int, size: int) -> Iterator[Part]:
    """The matrices, laid end to end, that overlap elements [first, first + size) of the line."""
    offset = 0
    for shape in shapes:
        numel = shape[0] * shape[1]
        begin, end = max(offset, first), min(offset + numel, first + size)
        if begin < end:
            yield Part(tuple(shape), offset, begin, end)
        offset += numel


class PartitionedMuon(torch.optim.Optimizer):
    """Muon on the groups that name `matrices`, AdamW on the others.

    `grad_scale` (divides the gradients) and `found_inf` (1: change nothing) are fp32 scalars on the device
    that the engine sets before each step, as for torch's fused AdamW.

    Args:
        matrices: matrices of one group, each 2-d.
        adamw: the optimizer of the rest; its groups become groups of this one.
        momentum: decay of the gradient's running mean.
    """

    grad_scale: Tensor | None = None
    found_inf: Tensor | None = None

    def __init__(
        self,
        matrices: Sequence[Tensor],
        adamw: torch.optim.AdamW,
        *,
        lr: float,
        weight_decay: float,
        momentum: float,
    ):
        group = {
            "params": list(matrices),
            "lr": lr,
            "weight_decay": weight_decay,
            "momentum": momentum,
            MATRICES: [tuple(matrix.shape) for matrix in matrices],
        }
        assert all(len(shape) == 2 for shape in group[MATRICES])
        super().__init__([group, *adamw.param_groups], {})
        self._adamw = adamw

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        """Update every group; all ranks call it, with the same groups."""
        for group in self.param_groups:
            if MATRICES in group:
                (stretch,) = group["params"]
                self._step_matrices(group, stretch)
            else:
                self._adamw.grad_scale, self._adamw.found_inf = self.grad_scale, self.found_inf
                self._adamw.state, self._adamw.param_groups = self.state, [group]
                self._adamw.step()

    def _step_matrices(self, group: dict, stretch: Tensor) -> None:
        """Decay and move this rank's stretch [size] of the matrices."""
        gradient = stretch.grad if self.grad_scale is None else stretch.grad / self.grad_scale
        state = self.state[stretch]
        if not state:
            state["momentum_buffer"] = torch.zeros_like(stretch)
        momentum = state["momentum_buffer"].lerp(gradient, 1 - group["momentum"])
        direction = gradient.lerp(momentum, group["momentum"])  # Nesterov's
        moved = stretch * (1 - group["lr"] * group["weight_decay"])
        moved += self._orthogonal_updates(group, direction)
        if self.found_inf is not None:
            keep = self.found_inf > 0
            moved = torch.where(keep, stretch, moved)
            momentum = torch.where(keep, state["momentum_buffer"], momentum)
        stretch.copy_(moved)
        state["momentum_buffer"].copy_(momentum)

    def _orthogonal_updates(self, group: dict, direction: Tensor) -> Tensor:
        """Muon's step for this rank's stretch [size], from all ranks' stretches of the direction."""
        size, rank, world = direction.numel(), 0, 1
        if dist.is_initialized():
            rank, world = dist.get_rank(), dist.get_world_size()
        line = direction
        if world > 1:
            line = direction.new_empty(world * size)
            dist.all_gather_into_tensor(line, direction)
        updates = torch.zeros_like(direction)
        for part in parts_of(group[MATRICES], rank * size, size):
            rows, columns = part.shape
            matrix = torch.nn.Parameter(direction.new_zeros(rows, columns))
            matrix.grad = line[part.offset : part.offset + rows * columns].view(rows, columns)
            # Momentum and decay are done above, on the stretch. This scale lets AdamW's rates serve Muon too.
            torch.optim.Muon(
                [matrix],
                lr=group["lr"],
                weight_decay=0.0,
                momentum=0.0,
                nesterov=False,
                adjust_lr_fn="match_rms_adamw",
            ).step()
            update = matrix.detach().view(-1)[part.begin - part.offset : part.end - part.offset]
            updates[part.begin - rank * size : part.end - rank * size] = update
        return updates
