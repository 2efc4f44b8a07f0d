"""The optimizer's state, cut for another number of ranks. test_resume_matrix.py trains with it."""

from pathlib import Path

import pytest
import torch
from engine_steps import make_model
from warm_ranks import TWO_RANKS

from fla_train.run.resolve import resolve
from fla_train.training.checkpoint import CheckpointStore, rank_file
from fla_train.training.config import TrainConfig
from fla_train.training.engine import build_engine
from fla_train.training.load_checkpoint import load_checkpoint, reshard


def cut(line: torch.Tensor, numels: dict[str, int], world: int, padding: int):
    """Stretches of `line`, followed by zeros, and the fragments of each, element by element."""
    size = -(-(line.numel() + padding) // world)
    padded = torch.zeros(world * size)
    padded[: line.numel()] = line
    owners = [name for name, numel in numels.items() for _ in range(numel)]
    layouts = []
    for rank in range(world):
        own = owners[rank * size : (rank + 1) * size]
        layouts.append({name: (own.index(name), own.count(name)) for name in dict.fromkeys(own)})
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
    with pytest.raises(AssertionError, match=r"b .*4.*5"):
        reshard(partitions, old, new, 0, 7)


def assert_moments_are_kept(config: TrainConfig, folder: Path) -> None:
    """Load, on the only rank, a checkpoint of two ranks. Its moments are those of the two files in a row."""
    engine = build_engine(make_model(config), resolve(config).config)
    load_checkpoint(engine, folder)
    files = [folder / rank_file(rank) for rank in range(2)]
    saved = [torch.load(file, weights_only=True)["optimizer"]["state"] for file in files]
    for index, group in enumerate(engine.optimizer.bit16_groups):
        size = sum(parameter.numel() for parameter in group)
        state = engine.optimizer.optimizer.state[engine.optimizer.param_groups[index]["params"][0]]
        for name in ("exp_avg", "exp_avg_sq"):
            expected = torch.cat([shard[index][name] for shard in saved])[:size]
            assert expected.any() and torch.equal(state[name][:size], expected)


def test_adam_moments_are_equal_after_resharding(make_config, warm_ranks, whole):
    config = make_config(*TWO_RANKS, "launch.num_processes=1")
    folder = CheckpointStore(whole / "checkpoints").list()[-1]
    warm_ranks.run(1, assert_moments_are_kept, config, folder)
