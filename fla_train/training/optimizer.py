"""The learning rate of each step, the optimizers (AdamW, Muon), and which parameters get weight decay.

Muon under ZeRO-2: ZeRO flattens each parameter group and gives every rank an equal partition, cut without
regard to matrices, while Muon (Jordan et al., 2024; scaled as in arXiv 2502.16982) needs whole ones: its
update is the momentum's nearest orthogonal matrix. So each rank keeps the momentum of its partition only, the
ranks exchange their partitions of the direction, and each orthogonalizes the matrices of which it owns a
part, by `torch.optim.Muon`. The result does not depend on the number of ranks.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim.adamw import adamw

from fla_train.training.config import OptimizerConfig, ScheduleConfig

# Height between the minimum (0) and the peak (1), while `progress` runs over (0, 1] and the rate falls.
SHAPES: dict[str, Callable[[float], float]] = {
    "constant": lambda progress: 1.0,
    "cosine": lambda progress: 0.5 * (1 + math.cos(math.pi * progress)),
    "linear": lambda progress: 1 - progress,
    "wsd": lambda progress: 1 - math.sqrt(progress),
}
MATRICES = "matrices"  # key of the groups that Muon takes: the shapes of their matrices in order


def learning_rate(step: int, *, peak: float, max_steps: int, schedule: ScheduleConfig) -> float:
    """Learning rate of optimizer step `step` (1-based) in a run of `max_steps`. A pure function of the step.

    With W warm-up and D decay steps, s the step and d = (s - (max_steps - D)) / D:

        s <= W                 peak (start_ratio + (1 - start_ratio) s / W)
        s <= max_steps - D     peak
        else                   peak (min_ratio + (1 - min_ratio) shape(d))

    shape(d) is (1 + cos(pi d)) / 2 for cosine, 1 - d for linear and 1 - sqrt(d) for wsd (Haegele et al.,
    arXiv 2405.18392); `constant` stays at the peak. The last step uses `peak * min_ratio`, later ones too.
    """
    assert step >= 1
    warmup, decay = schedule.warmup(max_steps), schedule.decay(max_steps)
    if step <= warmup:
        return peak * (schedule.start_ratio + (1 - schedule.start_ratio) * step / warmup)
    stable = max_steps - decay
    if step <= stable:
        return peak
    share = SHAPES[schedule.name](min(1.0, (step - stable) / max(1, decay)))
    return peak * (schedule.min_ratio + (1 - schedule.min_ratio) * share)


def build_optimizer(
    model: nn.Module, config: OptimizerConfig, *, separate_gradients: bool = False
) -> torch.optim.Optimizer:
    """AdamW, one fused kernel per group; as `muon`, Muon for the blocks' matrices and AdamW for the rest.

    Args:
        separate_gradients: make AdamW alone a `FlatAdamW`, which takes a gradient per parameter.
    """
    matrices = hidden_matrices(model) if config.name == "muon" else []
    kind = FlatAdamW if separate_gradients and not matrices else torch.optim.AdamW
    optimizer = kind(
        parameter_groups(model, config.weight_decay, without=matrices),
        lr=config.lr,
        betas=(config.beta1, config.beta2),
        eps=config.eps,
        fused=True,
    )
    if not matrices:
        return optimizer
    return PartitionedMuon(
        matrices, optimizer, lr=config.lr, weight_decay=config.weight_decay, momentum=config.momentum
    )


class FlatAdamW(torch.optim.AdamW):
    """Fused AdamW of groups whose weights are one flat tensor and whose gradients are one per parameter."""

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        """Update each group by its entry `gradients`, contiguous and in the order of the flat tensor.

        The flat tensor may end with padding, which has no gradient and stays. With `grad_scale` the kernel
        divides the gradients in place, so each needs memory of its own.
        """
        for group in self.param_groups:
            (flat,), gradients = group["params"], group["gradients"]
            state = self.state[flat]
            if not state:
                state["step"] = torch.zeros((), device=flat.device)
                state |= {name: torch.zeros_like(flat) for name in ("exp_avg", "exp_avg_sq")}
            steps = list(state["step"].repeat(len(gradients)).unbind())
            adamw(
                views_like(gradients, flat),
                gradients,
                views_like(gradients, state["exp_avg"]),
                views_like(gradients, state["exp_avg_sq"]),
                [],
                steps,
                fused=True,
                grad_scale=getattr(self, "grad_scale", None),
                found_inf=getattr(self, "found_inf", None),
                amsgrad=False,
                beta1=group["betas"][0],
                beta2=group["betas"][1],
                lr=group["lr"],
                weight_decay=group["weight_decay"],
                eps=group["eps"],
                maximize=False,
            )
            state["step"].copy_(steps[0])


def views_like(tensors: Sequence[Tensor], flat: Tensor) -> list[Tensor]:
    """Views of `flat` with the shapes of these tensors, one after another; padding at its end is left out."""
    sizes = [tensor.numel() for tensor in tensors]
    views = flat.detach().split([*sizes, flat.numel() - sum(sizes)])
    return [view.view_as(tensor) for view, tensor in zip(views, tensors, strict=False)]


def parameter_groups(model: nn.Module, weight_decay: float, without: Sequence[Tensor] = ()) -> list[dict]:
    """Two groups: matrices with `weight_decay`; vectors, embeddings and marked parameters without.

    A model marks a parameter by the attribute `_no_weight_decay = True`, as flash-linear-attention does. A
    tied output head is the embedding. Empty groups, which ZeRO refuses, are left out.

    Args:
        without: parameters that are in neither group.
    """
    embeddings = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding)}
    excluded = {id(parameter) for parameter in without}
    decayed, undecayed = [], []
    for parameter in model.parameters():
        if not parameter.requires_grad or id(parameter) in excluded:
            continue
        special = getattr(parameter, "_no_weight_decay", False) or id(parameter) in embeddings
        (undecayed if parameter.ndim < 2 or special else decayed).append(parameter)
    groups = [{"params": decayed, "weight_decay": weight_decay}, {"params": undecayed, "weight_decay": 0.0}]
    return [group for group in groups if group["params"]]


def hidden_matrices(model: nn.Module) -> list[Tensor]:
    """What Muon takes: the linear layers between embedding and head, neither of the two included."""
    head = model.get_output_embeddings()
    return [m.weight for m in model.modules() if isinstance(m, nn.Linear) and m is not head]


@dataclass(frozen=True)
class Part:
    """What a rank's partition holds of one matrix, in elements."""

    shape: tuple[int, int]
    offset: int  # of the matrix in the flat group
    begin: int  # of the part in the flat group
    end: int


def parts_of(shapes: Sequence[tuple[int, int]], first: int, size: int) -> Iterator[Part]:
    """The matrices, flattened one after another, that overlap elements [first, first + size) of the group."""
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
        shapes = [tuple(matrix.shape) for matrix in matrices]
        assert all(len(shape) == 2 for shape in shapes)
        settings = {"lr": lr, "weight_decay": weight_decay, "momentum": momentum, MATRICES: shapes}
        super().__init__([{"params": list(matrices), **settings}, *adamw.param_groups], {})
        self._adamw = adamw

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        """Update every group; all ranks call it, with the same groups."""
        for group in self.param_groups:
            if MATRICES in group:
                (partition,) = group["params"]
                self._step_matrices(group, partition)
            else:
                self._adamw.grad_scale, self._adamw.found_inf = self.grad_scale, self.found_inf
                self._adamw.state, self._adamw.param_groups = self.state, [group]
                self._adamw.step()

    def _step_matrices(self, group: dict, partition: Tensor) -> None:
        """Decay and move this rank's partition [size] of the matrices."""
        gradient = partition.grad if self.grad_scale is None else partition.grad / self.grad_scale
        state = self.state[partition]
        if not state:
            state["momentum_buffer"] = torch.zeros_like(partition)
        momentum = state["momentum_buffer"].lerp(gradient, 1 - group["momentum"])
        direction = gradient.lerp(momentum, group["momentum"])  # Nesterov's
        moved = partition * (1 - group["lr"] * group["weight_decay"])
        moved += self._orthogonal_updates(group, direction)
        if self.found_inf is not None:
            skip = self.found_inf > 0
            moved = torch.where(skip, partition, moved)
            momentum = torch.where(skip, state["momentum_buffer"], momentum)
        partition.copy_(moved)
        state["momentum_buffer"].copy_(momentum)

    def _orthogonal_updates(self, group: dict, direction: Tensor) -> Tensor:
        """Muon's step for this rank's partition [size], from all ranks' partitions of the direction."""
        size, rank, world = direction.numel(), 0, 1
        if dist.is_initialized():
            rank, world = dist.get_rank(), dist.get_world_size()
        whole = direction
        if world > 1:
            whole = direction.new_empty(world * size)
            dist.all_gather_into_tensor(whole, direction)
        updates = torch.zeros_like(direction)
        for part in parts_of(group[MATRICES], rank * size, size):
            rows, columns = part.shape
            matrix = nn.Parameter(direction.new_zeros(rows, columns))
            matrix.grad = whole[part.offset : part.offset + rows * columns].view(rows, columns)
            # Momentum and decay are done above, on the partition. This scale lets AdamW's rates serve Muon
            # too.
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
