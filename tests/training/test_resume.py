"""Locks of run folders, branches of runs, and settings of resumed runs."""

import json
import shutil
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from warm_ranks import WarmRanks

from fla_train.run.launch import launch
from fla_train.training import checkpoint, run_folder
from fla_train.training.config import TrainConfig
from fla_train.training.run_folder import RunFolder, RunLock
from fla_train.utils.filesystem import describe
from fla_train.utils.locks import locked
from fla_train.utils.records import read_metrics

TIMEOUT = 300.0  # seconds until an awaited state counts as lost
OF_THE_MACHINE = {"tokens_per_second", "data_wait", "memory_gib", "mfu", "checkpoint_stall_s"}
Make = Callable[..., TrainConfig]


def wait_for(condition: Callable[[], object], poll: float = 0.001) -> None:
    deadline = time.monotonic() + TIMEOUT
    while not condition():
        assert time.monotonic() < deadline, "timed out"
        time.sleep(poll)


def steps_logged(run: Path) -> int:
    path = run / "metrics.jsonl"
    return path.read_text().count('"loss"') if path.exists() else 0


def losses(run: Path) -> list[dict]:
    """Everything of metrics.jsonl that does not depend on the machine's speed."""
    return [
        {key: value for key, value in record.items() if key not in OF_THE_MACHINE}
        for record in read_metrics(run / "metrics.jsonl")
    ]


def weights(run: Path, step: int = 12) -> bytes:
    return (run / "hf" / f"step-{step:07d}" / "model.safetensors").read_bytes()


def test_two_trainers_never_write_one_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(run_folder, "LOCK_WAIT", 0.1)
    folder = RunFolder(tmp_path)
    first = RunLock(folder)
    for again in (lambda: None, (tmp_path / ".lock").unlink):
        again()
        first.check()  # it locks a new file if its file was deleted
        with pytest.raises(ValueError, match="another training process writes"):
            RunLock(folder)
    # A second trainer may begin before the first has noticed that its file was deleted.
    (tmp_path / ".lock").unlink()
    second = RunLock(folder)
    with pytest.raises(ValueError, match="another training process writes"):
        first.check()
    second.check()
    second.close()
    RunLock(folder).close()


def test_a_run_folder_that_was_renamed_is_noticed(tmp_path: Path):
    (tmp_path / "run").mkdir()
    lock = RunLock(RunFolder(tmp_path / "run"))
    (tmp_path / "run").rename(tmp_path / "moved")
    with pytest.raises(ValueError, match="renamed or deleted"):
        lock.check()
    (tmp_path / "run").mkdir()  # another one in its place
    with pytest.raises(ValueError, match="renamed or deleted"):
        lock.check()
    lock.close()


def test_a_lock_that_is_a_link_leaves_its_target_alone(tmp_path: Path):
    (tmp_path / "target").write_text("precious")
    (tmp_path / ".lock").symlink_to(tmp_path / "target")
    for lock in (lambda: RunLock(RunFolder(tmp_path)), locked(tmp_path / ".lock", print).__enter__):
        with pytest.raises(OSError, match="symbolic link"):
            lock()
    assert (tmp_path / "target").read_text() == "precious"


def test_a_branch_of_another_run_stands_on_its_own(make_config: Make, warm_ranks: WarmRanks, tmp_path: Path):
    more = ["trainer.precision=fp32", "launch.device=cpu", "trainer.max_steps=1"]
    warm_ranks.launch(make_config(*more, f"run.dir={tmp_path / 'trunk'}"))
    trunk = tmp_path / "trunk/checkpoints/step-0000001"
    state, manifest = json.loads((trunk / "state.json").read_text()), checkpoint.read_manifest(trunk)
    (trunk / "state.json").write_text(json.dumps(state | {"wandb_id": "the trunk's"}))
    manifest["files"]["state.json"] = describe(trunk / "state.json")
    checkpoint.write_manifest(trunk, manifest)
    warm_ranks.launch(make_config(*more, f"run.dir={tmp_path / 'branch'}", f"trainer.resume={trunk}"))
    branch = tmp_path / "branch/checkpoints/step-0000001"
    assert checkpoint.find_error(branch) is None
    assert checkpoint.read_state(branch).wandb_id is None

    alone = tmp_path / "alone"
    shutil.copytree(trunk, alone)  # the checkpoint itself records what it was trained on
    with pytest.raises(ValueError, match=r"alone .*data\.validation_fraction"):
        launch(
            make_config(
                *more,
                f"run.dir={tmp_path / 'twig'}",
                f"trainer.resume={alone}",
                "data.validation_fraction=0.2",
            )
        )


def test_a_resumed_run_decays_as_its_config_says(make_config: Make, warm_ranks: WarmRanks, tmp_path: Path):
    """The weight decay of the first part must not matter, because it trains with a learning rate of 0.

    The second part runs on another number of ranks.
    """
    common = ["trainer.precision=fp32", "launch.device=cpu", "trainer.checkpoint_every=0"]
    ends = []
    for first in (0.0, 50.0):
        run = f"run.dir={tmp_path / str(first)}"
        begin = [f"optimizer.weight_decay={first}", "optimizer.lr=0", "trainer.max_steps=1"]
        warm_ranks.launch(make_config(*common, run, *begin))
        more = ["optimizer.weight_decay=50", "trainer.max_steps=4", "launch.num_processes=2"]
        warm_ranks.launch(make_config(*common, run, *more))
        ends.append(weights(tmp_path / str(first), 4))
    assert ends[0] == ends[1]
