"""Define learning-rate schedules, optimizers (AdamW, Muon, custom ones), and weight decay.

Muon under ZeRO-2: ZeRO flattens each parameter group and gives every rank an equal partition, cut without
regard to matrices. Muon (Jordan et al., 2024; scaled as in arXiv 2502.16982) needs whole matrices, because
its update is the orthogonal matrix nearest to the momentum. So each rank keeps the momentum of its partition
only, the ranks exchange their partitions of the direction, and each rank orthogonalizes the matrices that
its partition overlaps. Except for rounding, the result does not depend on the number of ranks.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn

from fla_train.training.config import OptimizerConfig, ScheduleConfig, TrainConfig
from fla_train.training.load_checkpoint import is_loadable
from fla_train.utils.errors import described
from fla_train.utils.import_class import import_class, import_object

# Decay curves: learning rate between minimum (0) and peak (1), for `progress` in (0, 1].
SHAPES: dict[str, Callable[[float], float]] = {
    "constant": lambda progress: 1.0,
    "cosine": lambda progress: 0.5 * (1 + math.cos(math.pi * progress)),
    "linear": lambda progress: 1 - progress,
    "wsd": lambda progress: 1 - math.sqrt(progress),
}
# Key of the groups that Muon updates. Its value lists the shapes of their matrices in order.
MATRICES = "matrices"


def make_schedule(config: TrainConfig) -> Callable[[int], float]:
    """Return the learning rate as a function of the optimizer step, counted from 1.

    A custom schedule, `schedule.name=package.module:NAME`, is a function of `step`, `peak`, `max_steps` and
    the `schedule.options`, or a class that is constructed with the options and called with the rest. It must
    depend on nothing else, so that a resumed run continues it exactly.

    Raises:
        ValueError: a custom schedule can't be imported.
    """
    schedule, settings = config.schedule, {"peak": config.optimizer.lr, "max_steps": config.trainer.max_steps}
    if ":" not in schedule.name:
        return partial(learning_rate, **settings, schedule=schedule)
    custom, options = import_object(schedule.name), schedule.options or {}
    if isinstance(custom, type):
        custom, options = custom(**options), {}
    return lambda step: float(custom(step=step, **settings, **options))


def learning_rate(step: int, *, peak: float, max_steps: int, schedule: ScheduleConfig) -> float:
    """Return the learning rate of optimizer step `step` (from 1) in a run of `max_steps`.

    W and D are the warm-up and decay steps, s is the step, and d = (s - (max_steps - D)) / D:

        s <= W                 peak (start_ratio + (1 - start_ratio) s / W)
        s <= max_steps - D     peak
        else                   peak (min_ratio + (1 - min_ratio) shape(d))

    shape(d) is (1 + cos(pi d)) / 2 for cosine, 1 - d for linear and 1 - sqrt(d) for wsd (Haegele et al.,
    arXiv 2405.18392); `constant` stays at the peak. The last step and all later steps use `peak * min_ratio`.
    """
    assert step >= 1
    warmup, decay = schedule.warmup(max_steps), schedule.decay(max_steps)
    if step <= warmup:
        return peak * (schedule.start_ratio + (1 - schedule.start_ratio) * step / warmup)
    stable = max_steps - decay
    if step <= stable:
        return peak
    height = SHAPES[schedule.name](min(1.0, (step - stable) / max(1, decay)))
    return peak * (schedule.min_ratio + (1 - schedule.min_ratio) * height)


def build_optimizer(model: nn.Module, config: OptimizerConfig) -> torch.optim.Optimizer:
    """Create the optimizer: AdamW, Muon (for the blocks' matrices, AdamW for the rest), or a custom one.

    Raises:
        ValueError: a custom optimizer can't be imported. `check_elementwise` finds further errors.
    """
    if ":" in config.name:
        return _custom_optimizer(config, parameter_groups(model, config.weight_decay))
    matrices = hidden_matrices(model) if config.name == "muon" else []
    optimizer = torch.optim.AdamW(
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


def _custom_optimizer(config: OptimizerConfig, groups: list[dict]) -> torch.optim.Optimizer:
    """Create the optimizer `config.name`, whose step divides by `grad_scale` and is skipped by `found_inf`.

    An optimizer that declares `_step_supports_amp_scaling`, as PyTorch's fused ones do, reads the two
    tensors itself. For any other optimizer the host waits for `found_inf` before each step.

    Raises:
        ValueError: it can't be imported.
    """
    custom = import_class(config.name, torch.optim.Optimizer, "torch.optim.Optimizer")
    optimizer = custom(groups, lr=config.lr, **(config.options or {}))
    # A resumed run may change these settings. All other entries of the groups are state of the optimizer.
    optimizer.configured = {"lr", "weight_decay", *(config.options or {})}
    if getattr(optimizer, "_step_supports_amp_scaling", False):
        return optimizer
    plain_step = optimizer.step

    def step(closure: None = None) -> None:
        if optimizer.found_inf > 0:
            return
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.grad.div_(optimizer.grad_scale)
        # PyTorch's unfused Adam and SGD reject the two attributes.
        hidden = {name: vars(optimizer).pop(name) for name in ("grad_scale", "found_inf")}
        plain_step()
        vars(optimizer).update(hidden)

    optimizer.step = step
    return optimizer


def check_elementwise(config: OptimizerConfig) -> None:
    """Check that a custom optimizer gives equal weights from ZeRO-2's flat partitions and whole tensors.

    ZeRO-2 flattens each parameter group and cuts it without regard to matrices. The check runs three steps
    of both variants on a small matrix.

    Raises:
        ValueError: it can't be imported, the weights differ, the constructor fails or creates state, or a
            checkpoint of the state could not be read again.
    """
    custom = import_class(config.name, torch.optim.Optimizer, "torch.optim.Optimizer")
    generator = torch.Generator().manual_seed(0)
    start, *gradients = torch.randn(4, 6, 8, generator=generator).unbind()
    results = []
    for cut in (lambda x: [x.clone()], lambda x: [piece.clone() for piece in x.flatten().split(20)]):
        parameters = [nn.Parameter(piece) for piece in cut(start)]
        groups = [{"params": parameters, "weight_decay": config.weight_decay}]
        try:
            # A fixed rate: with a small one, wrong updates would be within the tolerance.
            optimizer = custom(groups, lr=0.01, **(config.options or {}))
            if optimizer.state:
                raise ValueError("it creates state in its constructor; create it in the first step")
            for gradient in gradients:
                for parameter, piece in zip(parameters, cut(gradient), strict=True):
                    parameter.grad = piece
                optimizer.step()
            saved = optimizer.state_dict()
            if not is_loadable(saved) or any(type(key) is not int for key in saved["state"]):
                raise ValueError("checkpoints hold only tensors and plain values of parameters and groups")
        except Exception as error:
            raise ValueError(f"optimizer.name={config.name} can't be used: {described(error)}") from error
        results.append(torch.cat([parameter.detach().flatten() for parameter in parameters]))
    if not torch.allclose(*results, rtol=1e-4, atol=1e-6):
        raise ValueError(f"optimizer.name={config.name} needs whole matrices, which ZeRO-2 cuts: use muon")


def parameter_groups(model: nn.Module, weight_decay: float, without: Sequence[Tensor] = ()) -> list[dict]:
    """Return two groups: matrices with `weight_decay`; vectors, embeddings and marked parameters without.

    A model marks a parameter by the attribute `_no_weight_decay = True`, as flash-linear-attention does. A
    tied output head is the embedding. Empty groups, which ZeRO rejects, are left out.

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
    """Return the matrices for Muon: the weights of the linear layers between embedding and head."""
    head = model.get_output_embeddings()
    return [m.weight for m in model.modules() if isinstance(m, nn.Linear) and m is not head]


def overlaps(
    shapes: Sequence[tuple[int, int]], first: int, size: int
) -> Iterator[tuple[tuple[int, int], int, int, int]]:
    """Yield the matrices of a flat group that overlap its elements [first, first + size).

    Each is (shape, offset, begin, end): the matrix begins at `offset` of the group, and [begin, end) are its
    elements in the range.
    """
    offset = 0
    for rows, columns in shapes:
        numel = rows * columns
        begin, end = max(offset, first), min(offset + numel, first + size)
        if begin < end:
            yield (rows, columns), offset, begin, end
        offset += numel


class PartitionedMuon(torch.optim.Optimizer):
    """Apply Muon to the groups that have `matrices`, and AdamW to the other groups.

    The engine sets two fp32 scalars on the device before each step, as for torch's fused AdamW: `grad_scale`
    divides the gradients, and `found_inf` = 1 skips the step.

    Args:
        matrices: 2-d parameters of one group.
        adamw: the optimizer of the other parameters, whose groups become groups of this optimizer.
        momentum: decay of the gradient's running mean.
    """

    grad_scale: Tensor
    found_inf: Tensor

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
        """Update every group. All ranks call it, with equal groups."""
        for group in self.param_groups:
            if MATRICES in group:
                (partition,) = group["params"]
                self._step_matrices(group, partition)
            else:
                self._adamw.grad_scale, self._adamw.found_inf = self.grad_scale, self.found_inf
                self._adamw.state, self._adamw.param_groups = self.state, [group]
                self._adamw.step()

    def _step_matrices(self, group: dict, partition: Tensor) -> None:
        """Decay and update this rank's partition [size] of the matrices."""
        gradient = partition.grad / self.grad_scale
        state = self.state[partition]
        if not state:
            state["momentum_buffer"] = torch.zeros_like(partition)
        momentum = state["momentum_buffer"].lerp(gradient, 1 - group["momentum"])
        direction = gradient.lerp(momentum, group["momentum"])  # Nesterov momentum
        moved = partition * (1 - group["lr"] * group["weight_decay"])
        moved += self._orthogonal_updates(group, direction)
        skip = self.found_inf > 0
        partition.copy_(torch.where(skip, partition, moved))
        state["momentum_buffer"].copy_(torch.where(skip, state["momentum_buffer"], momentum))

    def _orthogonal_updates(self, group: dict, direction: Tensor) -> Tensor:
        """Return Muon's step for this rank's partition [size], from all partitions of the direction."""
        size, first = direction.numel(), dist.get_rank() * direction.numel()
        whole = direction.new_empty(dist.get_world_size() * size)
        dist.all_gather_into_tensor(whole, direction)
        updates = torch.zeros_like(direction)
        spans: dict[tuple[int, int], list[tuple[int, int, int]]] = {}
        for shape, *span in overlaps(group[MATRICES], first, size):
            spans.setdefault(shape, []).append(tuple(span))
        # All matrices of a shape at once, because launches take longer than products of small matrices.
        for shape, same in spans.items():
            matrices = [whole[offset : offset + math.prod(shape)].view(shape) for offset, *_ in same]
            rate = 0.2 * math.sqrt(max(shape)) * group["lr"]  # so that AdamW's rates suit Muon
            for (offset, begin, end), row in zip(same, orthogonalize(matrices), strict=True):
                update = row[begin - offset : end - offset]
                updates[begin - first : end - first].add_(update, alpha=-rate)
        return updates


def orthogonalize(matrices: Sequence[Tensor]) -> Tensor:
    """Approximate the orthogonal matrices nearest to M matrices of one shape: [M, rows * columns] in bf16.

    As `torch.optim.Muon` does for one matrix: with X = matrix / its norm and G = X X^T, five iterations of

        X <- 3.4445 X + (-4.775 G + 2.0315 G^2) X

    (Newton and Schulz; coefficients of Jordan et al.), after which singular values are about 0.7 to 1.2.
    """
    x = torch.stack([matrix.bfloat16() for matrix in matrices])
    tall = x.shape[1] > x.shape[2]
    x = (x.mT if tall else x) / x.norm(dim=(1, 2), keepdim=True).clamp(min=1e-7)
    for _ in range(5):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=-4.775, alpha=2.0315), x, beta=3.4445)
    return (x.mT if tall else x).flatten(1)
