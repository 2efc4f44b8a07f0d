"""What machine 0's launcher tells those of the others before they prepare anything."""

import json
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from test_checkpoint import make
from test_machines import free_port

from fla_train.training import launch as launch_module
from fla_train.training.checkpoint import TrainState
from fla_train.training.launch import TrainingFailed
from fla_train.training.preemption import Preempted
from fla_train.training.schema import TrainConfig

LIMIT = 30.0  # seconds for what takes one


def test_all_machines_read_the_commit_of_machine_0(
    make_config: Callable[..., TrainConfig], tmp_path: Path, monkeypatch
):
    """Of the checkpoints if there are some, whatever the branch points to by now."""
    options = ["launch.num_machines=2", "launch.num_processes=2", "launch.device=cpu"]
    options += [f"launch.main_process_port={free_port()}", f"run.dir={tmp_path}"]
    asked: list[dict] = []
    met = threading.Barrier(2)

    def prepare(data: object, log: object, commits: dict) -> None:
        asked.append(commits)
        met.wait(LIMIT)
        raise Preempted

    monkeypatch.setattr(launch_module, "prepare", prepare)
    heads = iter(["first", "second", "third"])  # the branch moves with each question
    monkeypatch.setattr(launch_module, "find_commits", lambda data: {"": next(heads)})

    def start() -> None:
        with ThreadPoolExecutor(2) as pool:
            for future in [
                pool.submit(launch_module._launch, make_config(*options, f"launch.machine_rank={number}"))
                for number in range(2)
            ]:
                assert isinstance(future.exception(LIMIT), Preempted)

    start()
    assert asked == [{"": "first"}] * 2
    for step, state in ((3, TrainState(step=3, commits={"": "begun"}).__dict__), (6, {"torn": 1})):
        folder = make(tmp_path / "checkpoints", step)
        (folder / "state.json").write_text(json.dumps(state))
    start()
    assert asked[2:] == [{"": "begun"}] * 2


def test_all_machines_take_the_warmup_of_machine_0(make_config: Callable[..., TrainConfig], monkeypatch):
    """A shared disk may show the run that goes on to it alone, and ranks that differ are refused."""
    planned: list[int | None] = []
    met = threading.Barrier(2)

    def make_plan(config: TrainConfig, data: object) -> None:
        planned.append(config.schedule.warmup_steps)
        met.wait(LIMIT)
        raise Preempted

    def saved_sizes(config: TrainConfig) -> dict[str, int]:
        sizes = {"warmup_steps": 3, "global_batch_tokens": 256, "vocab_size": 320}
        return sizes if config.launch.machine_rank == 0 else {}

    monkeypatch.setattr(launch_module, "prepare", lambda data, log, commits: None)
    monkeypatch.setattr(launch_module, "make_plan", make_plan)
    monkeypatch.setattr(launch_module, "saved_sizes", saved_sizes)
    options = ["launch.num_machines=2", "launch.num_processes=2", "launch.device=cpu", "run.dir=run"]
    options += [f"launch.main_process_port={free_port()}", "trainer.max_steps=600"]
    with ThreadPoolExecutor(2) as pool:
        for future in [
            pool.submit(launch_module._launch, make_config(*options, f"launch.machine_rank={number}"))
            for number in range(2)
        ]:
            assert isinstance(future.exception(LIMIT), Preempted)
    assert planned == [3, 3]


def test_one_machine_looks_up_no_commit_beforehand(make_config: Callable[..., TrainConfig], monkeypatch):
    """The preparation does, where one is needed: what is prepared needs no network."""
    monkeypatch.setattr(launch_module, "find_commits", lambda data: pytest.fail("asked the Hub"))
    assert launch_module._commits(make_config("launch.device=cpu")) == {}


def test_a_machine_that_does_not_come_at_first_is_no_traceback(
    make_config: Callable[..., TrainConfig], tmp_path
):
    options = ["launch.num_machines=2", "launch.num_processes=2", "launch.device=cpu"]
    options += [f"launch.main_process_port={free_port()}", "launch.rendezvous_timeout=0.5"]
    with pytest.raises(TrainingFailed, match="machine 1: did not come"):
        launch_module.launch(make_config(*options, f"run.dir={tmp_path / 'run'}", "launch.max_restarts=3"))
    assert not (tmp_path / "run").exists()
