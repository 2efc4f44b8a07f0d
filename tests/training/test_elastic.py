"""Resume by another number of ranks: the same steps on the same tokens, equal to rounding."""

from collections import namedtuple
from collections.abc import Callable

import pytest
import torch

from fla_train.training.config import TrainConfig
from fla_train.training.load_checkpoint import reshard

Make = Callable[..., TrainConfig]
Fragment = namedtuple("Fragment", "start numel")
STEPS, RESUMED = 6, 3
# A large eps keeps Adam from turning rounding of near-zero gradients into whole steps.
SETTINGS = [
    f"trainer.max_steps={STEPS}",
    f"trainer.checkpoint_every={RESUMED}",
    "trainer.log_every=1",
    "trainer.eval_every=0",
    "trainer.precision=fp32",
    "launch.device=cpu",
    "optimizer.eps=1e-3",
    "schedule.warmup_steps=1",
    "model.num_hidden_layers=1",
    "model.num_heads=3",  # sizes that neither 2 nor 4 ranks divide evenly: ZeRO pads them
]


def cut(line: torch.Tensor, numels: dict[str, int], world: int, padding: int):
    """Stretches of `line`, followed by zeros, and the fragments of each, element by element."""
    size = -(-(line.numel() + padding) // world)
    padded = torch.zeros(world * size)
    padded[: line.numel()] = line
    owners = [name for name, numel in numels.items() for _ in range(numel)]
    layouts = []
    for rank in range(world):
        own = owners[rank * size : (rank + 1) * size]
        layouts.append({name: Fragment(own.index(name), own.count(name)) for name in dict.fromkeys(own)})
    return list(padded.split(size)), layouts


@pytest.mark.parametrize("padding", [0, 5])
def test_any_cut_follows_from_any_other(padding: int):
    numels = {"a": 7, "b": 1, "c": 20, "d": 3, "e": 2}
    line = torch.arange(1.0, 1 + sum(numels.values()))
    for before in range(1, 7):
        partitions, old = cut(line, numels, before, padding)
        for after in range(1, 7):
            expected, new = cut(line, numels, after, padding)
            for rank in range(after):
                assert torch.equal(
                    reshard(partitions, old, new, rank, expected[rank].numel()), expected[rank]
                )


def test_a_checkpoint_of_another_model_is_not_cut():
    partitions, old = cut(torch.ones(6), {"a": 2, "b": 4}, 2, 0)
    _, new = cut(torch.ones(7), {"a": 2, "b": 5}, 1, 0)
    with pytest.raises(AssertionError, match="b has 4 elements instead of 5"):
        reshard(partitions, old, new, 0, 7)
