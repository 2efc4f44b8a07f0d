"""What one step tells about the model: norms of parameters and of their update, and each layer's gates.

Everything stays on the device until the step's record is written.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor, nn

from fla_train.models.mixers.delta_product import DeltaProductMixer


@contextmanager
def observed(engine, found: dict[str, Tensor]) -> Iterator[None]:
    """Run one optimizer step inside; its statistics are in `found` afterwards, as scalars on the device.

    `param_norm` after the step, `update_norm` of the difference it made, and for each recurrent layer i, over
    the first sequence of the first micro-batch: `beta/i`, the mean step size; `beta_above_1/i`, the share of
    negative eigenvalues 1 - beta; `decay/i`, the mean of exp(g), with a forget gate. Every rank calls it.
    """
    masters = engine.optimizer.single_partition_of_fp32_groups  # this rank's stretches, zero-padded
    before = [master.detach().clone() for master in masters]
    mixers = [module for module in engine.module.modules() if isinstance(module, DeltaProductMixer)]
    hooks = [_observe_gates(mixer, layer, found) for layer, mixer in enumerate(mixers)]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
    for old, master in zip(before, masters, strict=True):
        old.sub_(master.detach())
    squares = torch.stack([_sum_of_squares(masters), _sum_of_squares(before)])
    dist.all_reduce(squares)
    found["param_norm"], found["update_norm"] = squares.sqrt().unbind()


def read(found: dict[str, Tensor]) -> dict[str, float]:
    """The statistics on the host, by one transfer."""
    if not found:
        return {}
    values = torch.stack([value.double() for value in found.values()]).tolist()
    return dict(zip(found, values, strict=True))


def _observe_gates(mixer: DeltaProductMixer, layer: int, found: dict[str, Tensor]):
    @torch.no_grad()
    def hook(module: nn.Module, arguments: tuple) -> None:
        if f"beta/{layer}" in found:  # another micro-batch, or the same one recomputed
            return
        beta, g = mixer.gates(arguments[0][:1])
        found[f"beta/{layer}"] = beta.mean()
        found[f"beta_above_1/{layer}"] = (beta > 1).float().mean()
        if g is not None:
            found[f"decay/{layer}"] = g.exp().mean()

    return mixer.register_forward_pre_hook(hook)


def _sum_of_squares(tensors: list[Tensor]) -> Tensor:
    norms = [torch.linalg.vector_norm(tensor.detach(), dtype=torch.float64) for tensor in tensors]
    return torch.stack(norms).square().sum()
