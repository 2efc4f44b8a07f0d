"""A checkpoint from someone else runs no code, whichever of its files holds the payload."""

import os
import random
import shutil
from collections import OrderedDict, deque
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import numpy as np
import pytest
import torch
from engine_steps import make_model
from warm_ranks import TWO_RANKS

from fla_train.run.resolve import resolve
from fla_train.training import checkpoint
from fla_train.training.checkpoint import TrainState
from fla_train.training.checkpoint_manager import CheckpointManager
from fla_train.training.config import TrainConfig
from fla_train.training.engine import build_engine
from fla_train.training.load_checkpoint import (
    is_loadable,
    load_checkpoint,
    load_features,
    load_file,
    load_random_states,
)
from fla_train.utils.filesystem import describe
from fla_train.utils.random_states import random_states, set_random_states


class Payload:
    """Unpickled, it makes a file."""

    def __init__(self, marker: Path):
        self.marker = marker

    def __reduce__(self) -> tuple:
        return os.mkdir, (str(self.marker),)


def rewrite(folder: Path, name: str, change: Callable[[dict], dict]) -> Path:
    """Change the content of a file of a checkpoint, which stays intact by its checksums."""
    path = folder / name
    torch.save(change(torch.load(path, weights_only=False)), path)
    manifest = checkpoint.read_manifest(folder)
    manifest["files"][name] = describe(path)
    checkpoint.write_manifest(folder, manifest)
    assert checkpoint.find_error(folder) is None
    return folder


def attack(config: TrainConfig, of_two_ranks: Path, folder: Path) -> dict[str, str]:
    """Load, on a rank, checkpoints with a payload in one of their files. Return the error for each file."""
    engine = build_engine(make_model(config), resolve(config).config)
    manager = CheckpointManager(engine, folder / "own", keep=0, keep_every=0, log=print)
    manager.save(TrainState(step=1))
    manager.ensure_saved(1)
    manager.close()
    own = folder / "own" / checkpoint.folder_name(1)
    assert load_checkpoint(engine, own).step == 1
    cases = {name: (own, name) for name in ("weights.pt", "rank-0.pt")}
    cases["rank of two"] = (of_two_ranks, "rank-0.pt")
    refusals = {}
    for number, (case, (source, name)) in enumerate(cases.items()):
        copy = shutil.copytree(source, folder / f"case-{number}")
        rewrite(copy, name, lambda content: content | {"payload": Payload(folder / "marker")})
        with pytest.raises(ValueError) as refused:
            load_checkpoint(engine, copy)
            load_features([], copy, print)
            load_random_states(copy)
        refusals[case] = str(refused.value)
    return refusals


def test_a_payload_in_any_file_is_refused(whole, make_config, warm_ranks, tmp_path):
    config = make_config(*TWO_RANKS, "launch.num_processes=1")
    of_two_ranks = checkpoint.CheckpointStore(whole / "checkpoints").list()[-1]
    (refusals,) = warm_ranks.run(1, attack, config, of_two_ranks, tmp_path)
    assert len(refusals) == 3 and not (tmp_path / "marker").exists()
    for case, line in refusals.items():
        assert (case if case.endswith(".pt") else "rank-0.pt") in line and "mkdir" in line


@pytest.mark.parametrize(
    "state",
    [
        {"tensors": [torch.ones(2)], "numbers": (1, 2.5, None, True), "text": "a"},
        OrderedDict(weight=torch.zeros(1)),
        {"number": np.float64(0.5)},
        {"window": deque([1.0])},
        {"time": timedelta(1)},
    ],
    ids=str,
)
def test_a_state_is_saved_only_if_it_can_be_read(tmp_path: Path, state: dict) -> None:
    torch.save(state, tmp_path / "state.pt")
    try:
        load_file(tmp_path / "state.pt")
    except ValueError:
        assert not is_loadable(state)
    else:
        assert is_loadable(state)


def test_a_file_that_cannot_be_mapped_is_refused(tmp_path: Path) -> None:
    torch.save({"weight": torch.ones(2)}, tmp_path / "old.pt", _use_new_zipfile_serialization=False)
    with pytest.raises(ValueError, match=r"old\.pt"):
        load_file(tmp_path / "old.pt")


def test_random_states_come_back(tmp_path: Path):
    torch.save(random_states(), tmp_path / "rng.pt")
    expected = random.random(), np.random.rand(), torch.rand(1).item()
    set_random_states(load_file(tmp_path / "rng.pt"))
    assert (random.random(), np.random.rand(), torch.rand(1).item()) == expected
    assert torch.load(tmp_path / "rng.pt", weights_only=True)  # no class needs to be allowed
