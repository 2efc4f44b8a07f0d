"""Resume by another number of ranks: the same steps on the same tokens, equal to rounding."""

import shutil
from collections import namedtuple
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from warm_ranks import WarmRanks

from fla_train.training import checkpoint
from fla_train.training.config import TrainConfig
from fla_train.training.load_checkpoint import reshard
from fla_train.utils.records import read_metrics

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


@pytest.fixture(scope="module")
def whole(make_config: Make, warm_ranks: WarmRanks, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two ranks, never interrupted."""
    run = tmp_path_factory.mktemp("elastic") / "whole"
    warm_ranks.launch(make_config(*SETTINGS, f"run.dir={run}", "launch.num_processes=2"))
    return run


def interrupted(whole: Path, run: Path) -> Path:
    """`run` as `whole` was right after the checkpoint of step RESUMED; the path of that checkpoint."""
    shutil.copytree(whole, run, ignore=shutil.ignore_patterns("hf", "plots", checkpoint.folder_name(STEPS)))
    return run / "checkpoints" / checkpoint.folder_name(RESUMED)


def records(run: Path) -> list[dict]:
    return [record for record in read_metrics(run / "metrics.jsonl") if "loss" in record]


def column(run: Path, key: str) -> list[float]:
    return [record[key] for record in records(run)]


def shards(folder: Path) -> list[Path]:
    return sorted((folder / "deepspeed").glob("*_optim_states.pt"))


def moments(folder: Path) -> dict[str, list[torch.Tensor]]:
    """Adam's state of each parameter group: the ranks' partitions end to end, without the padding."""
    states = [torch.load(path, weights_only=False)["optimizer_state_dict"] for path in shards(folder)]
    lines: dict[str, list[torch.Tensor]] = {"exp_avg": [], "exp_avg_sq": [], "step": []}
    for group in range(len(states[0]["param_slice_mappings"])):
        parts = [part for state in states for part in state["param_slice_mappings"][group].values()]
        numel = sum(part.numel for part in parts)
        adam = [state["base_optimizer_state"]["state"][group] for state in states]
        for key in ("exp_avg", "exp_avg_sq"):
            lines[key].append(torch.cat([state[key] for state in adam])[:numel])
        lines["step"].append(adam[0]["step"])
    return lines


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, pytest.param(4, marks=pytest.mark.long)])
def test_another_number_of_ranks_takes_the_same_steps(
    whole: Path,
    make_config: Make,
    warm_ranks: WarmRanks,
    tmp_path: Path,
    capfd: pytest.CaptureFixture,
    ranks: int,
):
    run = tmp_path / "run"
    start = interrupted(whole, run)
    before = (start / "manifest.json").read_bytes()
    warm_ranks.launch(make_config(*SETTINGS, f"run.dir={run}", f"launch.num_processes={ranks}"))
    said = (run / "train.log").read_text()
    assert f", from {start}" in said
    assert f"checkpoint of 2 process(es), optimizer state resharded for {ranks}" in said

    assert column(run, "step") == list(range(1, STEPS + 1))
    assert column(run, "tokens") == column(whole, "tokens")
    assert column(run, "lr") == column(whole, "lr")
    assert column(run, "loss") == pytest.approx(column(whole, "loss"), rel=1e-5)
    assert column(run, "grad_norm") == pytest.approx(column(whole, "grad_norm"), rel=1e-5)

    last = checkpoint.folder_name(STEPS)
    now, then = moments(run / "checkpoints" / last), moments(whole / "checkpoints" / last)
    assert len(shards(run / "checkpoints" / last)) == ranks
    for key, lines in then.items():
        for line, expected in zip(now[key], lines, strict=True):
            torch.testing.assert_close(line, expected, rtol=0, atol=1e-5 * expected.abs().max().item())

    # the source is only read, and no work in progress is left beside it
    assert (start / "manifest.json").read_bytes() == before and checkpoint.find_error(start) is None
    assert sorted(path.name for path in start.parent.iterdir()) == [start.name, last]
