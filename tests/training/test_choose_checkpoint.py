"""All ranks agree on the checkpoint to start from and on the config."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from test_checkpoint import make
from warm_ranks import WarmRanks

from fla_train.training import resume
from fla_train.training.config import TrainConfig
from fla_train.training.resume import agree_on_checkpoint, check_config_consistency
from fla_train.training.run_folder import RunFolder

Make = Callable[..., TrainConfig]


def _look(root: Path, wait: float, hidden: bool) -> str:
    import torch.distributed as dist

    from fla_train.training.process_group import join

    join(on_gpu=False)
    resume.VISIBLE = wait
    is_dir = Path.is_dir
    if hidden and dist.get_rank() == 1:
        Path.is_dir = lambda path: False
    try:
        return str(agree_on_checkpoint(RunFolder(root).store, "auto", print))
    except ValueError as error:
        return str(error)
    finally:
        Path.is_dir = is_dir


@pytest.mark.parametrize("hidden", [False, True])
def test_all_ranks_take_what_rank_0_chose(warm_ranks: WarmRanks, tmp_path: Path, hidden: bool):
    """A shared disk may not show it to another machine, which waits, and then names it."""
    newest = make(tmp_path / "checkpoints", 4)
    first, second = warm_ranks.run(2, _look, tmp_path, 0.2, hidden)
    assert first == str(newest)
    assert (f"does not see {newest}" in second) if hidden else (second == first)


def _check(config: TrainConfig, root: Path, differ: bool) -> str:
    """Return, on a rank, the error about configs, data and checkpoints in which rank 1 differs."""
    import torch.distributed as dist

    from fla_train.training.process_group import join

    join(on_gpu=False)
    other = differ and dist.get_rank() == 1
    data = SimpleNamespace(folder=root / "data", commits=dict)
    config = replace(config, seed=1) if other else config
    try:
        check_config_consistency(config, data, root / "step-0000003" if other else None, RunFolder(root))
    except ValueError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("differ", [False, True])
def test_what_differs_between_machines_is_named(make_config, warm_ranks, tmp_path, differ):
    found = warm_ranks.run(2, _check, make_config("launch.device=cpu"), tmp_path, differ)
    expected = "the machines differ in seed, the checkpoint to resume: give the same command on each"
    assert found == 2 * [expected if differ else ""]
