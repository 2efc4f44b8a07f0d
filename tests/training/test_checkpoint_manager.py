"""Checkpoints are saved during training: copies, waits, and failed saves."""

import contextlib
import os
import resource
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import torch
import torch.distributed as dist
from engine_steps import checksum, make_batch, make_model
from warm_ranks import TWO_RANKS, WarmRanks

from fla_train.run.resolve import resolve
from fla_train.training import checkpoint
from fla_train.training.checkpoint import TrainState, rank_file
from fla_train.training.checkpoint_manager import CheckpointManager
from fla_train.training.config import TrainConfig
from fla_train.training.engine import build_engine, train_step
from fla_train.training.failures import TrainingStopped
from fla_train.training.features.bad_steps import BadSteps
from fla_train.training.process_group import join
from fla_train.utils.staging_buffer import StagingBuffer

UNLIMITED = resource.RLIM_INFINITY


class Engine:
    """Hold one weight and its optimizer, as DeepSpeed's engine does."""

    def __init__(self, device: str = "cpu", numel: int = 1000) -> None:
        self.module = torch.nn.Module()
        self.module.weight = torch.nn.Parameter(torch.zeros(numel, device=device))
        self.module.weight.grad = -torch.ones_like(self.module.weight)
        sgd = torch.optim.SGD([self.module.weight], lr=1.0)
        self.optimizer = SimpleNamespace(optimizer=sgd, _param_slice_mappings=[{}])

    def step(self) -> None:
        """Add 1 to the weights."""
        self.optimizer.optimizer.step()


class Run:
    """Hold a manager with a fake engine, and the lines that it logs."""

    def __init__(self, folder: Path, *, keep: int = 2, keep_every: int = 0, **engine: object) -> None:
        self.folder, self.said, self.engine = folder, [], Engine(**engine)
        self.manager = CheckpointManager(
            self.engine, folder, keep=keep, keep_every=keep_every, log=self.said.append
        )

    def save(self, step: int) -> bool:
        """Save and wait. Return whether the checkpoint is on disk."""
        self.manager.save(TrainState(step=step, tokens=10 * step))
        return self.manager.is_saved(step)

    def names(self) -> list[str]:
        return sorted(path.name for path in self.folder.iterdir())

    def weight(self, step: int) -> torch.Tensor:
        """Return the weight of a checkpoint."""
        path = self.folder / checkpoint.folder_name(step)
        assert checkpoint.find_error(path) is None
        return torch.load(path / checkpoint.WEIGHTS, weights_only=True)["weight"]

    def writer(self) -> psutil.Process:
        """Return the only writer's process."""
        (found,) = (
            child
            for child in psutil.Process().children()
            if child.status() != psutil.STATUS_ZOMBIE and "async_writer" in " ".join(child.cmdline())
        )
        return found


@pytest.fixture
def run(alone: None, tmp_path: Path) -> Iterator[Run]:
    run = Run(tmp_path / "checkpoints")
    yield run
    run.manager.close()


@contextlib.contextmanager
def file_size_limit(size: int) -> Iterator[None]:
    """Limit the size of files and of the staging buffer of this process inside the `with` block."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_training_goes_on_while_the_state_of_the_moment_is_written(run: Run):
    engine, manager, state = run.engine, run.manager, TrainState(step=7, tokens=70)
    assert run.save(1)
    run.writer().suspend()
    assert manager.save(state) < 5  # returns although nothing can be written yet
    engine.step()
    engine.optimizer.optimizer.param_groups[0]["lr"] = 0.2
    state.step = 8
    manager.poll()
    assert run.names() == ["step-0000001"] and len(run.said) == 1
    run.writer().resume()
    assert manager.is_saved(7) and not manager.is_saved(8) and "step-0000007, written in" in run.said[-1]
    saved = torch.load(run.folder / "step-0000007" / rank_file(0), weights_only=True)
    assert run.weight(7).eq(0).all() and saved["optimizer"]["param_groups"][0]["lr"] == 1.0
    assert checkpoint.read_state(run.folder / "step-0000007") == TrainState(step=7, tokens=70)

    assert run.save(8)  # the same buffer, with the content of now
    assert run.weight(8).eq(1).all()
    assert run.weight(7).eq(0).all() and len(run.said) == 3


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_a_step_right_after_a_save_does_not_change_it(alone: None, tmp_path: Path, device: str):
    run = Run(tmp_path / "checkpoints", device=device, numel=1 << 24)
    for step in range(1, 4):
        run.manager.save(TrainState(step=step))
        run.engine.step()
    run.manager.ensure_saved(3)
    run.manager.close()
    assert run.weight(2).eq(1).all() and run.weight(3).eq(2).all()


def test_refused_writes_cost_one_checkpoint_only(run: Run):
    assert run.save(1)
    before = run.names()
    resource.prlimit(run.writer().pid, resource.RLIMIT_FSIZE, (2000, UNLIMITED))
    assert not run.save(2)
    assert run.said[-1].startswith("step 2: NO CHECKPOINT, rank 0: File too large")
    assert run.names() == before
    with pytest.raises(TrainingStopped, match=r"step 2 .*File too large"):
        run.manager.ensure_saved(2)
    resource.prlimit(run.writer().pid, resource.RLIMIT_FSIZE, (UNLIMITED, UNLIMITED))
    assert run.save(3) and run.names() == [*before, "step-0000003"]


def test_a_staging_buffer_that_is_refused_costs_one_checkpoint_only(run: Run):
    with file_size_limit(2000):
        assert not run.save(1)
    assert run.said == ["step 1: NO CHECKPOINT, rank 0: File too large; the earlier ones are untouched"]
    assert run.save(2)


def test_a_killed_writer_costs_one_checkpoint_only(run: Run):
    assert run.save(1)
    first = run.writer()
    first.suspend()
    run.manager.save(TrainState(step=2))
    first.kill()
    assert not run.manager.is_saved(2)
    assert "NO CHECKPOINT, rank 0: the writer process was killed by SIGKILL" in run.said[-1]
    assert run.save(3) and run.writer() != first
    second = run.writer()
    second.kill()  # between two saves
    while second.status() != psutil.STATUS_ZOMBIE:
        time.sleep(0.01)
    assert run.save(4) and run.names() == ["step-0000003", "step-0000004"]


def test_signals_that_ask_a_run_to_stop_leave_the_writer_at_work(run: Run):
    assert run.save(1)
    writer = run.writer()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):
        writer.send_signal(number)
    assert run.save(2) and run.writer() == writer
    assert os.getpgid(writer.pid) != os.getpgrp()  # a terminal's Ctrl-C does not even reach it


def test_some_are_kept_for_good_and_the_others_roll(alone: None, tmp_path: Path):
    run = Run(tmp_path / "checkpoints", keep=2, keep_every=4)
    assert all(run.save(step) for step in range(1, 10))
    assert run.names() == [checkpoint.folder_name(step) for step in (4, 8, 9)]
    assert run.save(10)
    writer = run.writer()
    run.manager.close()
    assert run.names() == [checkpoint.folder_name(step) for step in (4, 8, 9, 10)]
    assert not writer.is_running()


def test_leftovers_of_failed_attempts_are_deleted_by_the_next_save(run: Run):
    assert run.save(1)
    (run.folder / ".writing-step-0000002-of-a-killed-writer").mkdir()
    assert run.save(3) and run.names() == ["step-0000001", "step-0000003"]


def test_the_remains_of_a_corrupt_one_of_the_same_step_are_replaced(run: Run):
    assert run.save(1) and run.save(2)
    (run.folder / "step-0000002" / checkpoint.WEIGHTS).unlink()
    assert run.save(2) and run.weight(2).eq(0).all() and run.names() == ["step-0000001", "step-0000002"]


def save_between_steps(config: TrainConfig, folder: Path) -> tuple[list[list[float]], bool]:
    """Return, on a rank, sums of the weights before a save, at the wait for its copy, and after the step.

    Return also whether the checkpoint has the weights from before the step.
    """
    engine = build_engine(make_model(config), resolve(config).config)
    bad_steps = BadSteps(torch.device("cpu"), max_grad_norm=1.0)
    manager = CheckpointManager(engine, folder, keep=0, keep_every=0, log=print)
    train_step(engine, [make_batch(0)], 0.1, bad_steps)
    sums = [checksum(engine.module)]
    weights = {name: weight.clone() for name, weight in engine.module.state_dict().items()}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(StagingBuffer, "copying", True)
        patch.setattr(StagingBuffer, "wait", lambda self: sums.append(checksum(engine.module)))
        manager.save(TrainState(step=1))
        train_step(engine, [make_batch(1)], 0.1, bad_steps)
    manager.ensure_saved(1)
    manager.close()
    sums.append(checksum(engine.module))
    saved = torch.load(folder / "step-0000001" / checkpoint.WEIGHTS, weights_only=True)
    return sums, all(torch.equal(saved[name], weight) for name, weight in weights.items())


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_the_engine_waits_for_the_copy_before_it_changes_weights(
    warm_ranks: WarmRanks, make_config: Callable[..., TrainConfig], tmp_path: Path, optimizer: str
):
    config = make_config(*TWO_RANKS, "launch.num_processes=1", f"optimizer={optimizer}")
    ((sums, saved_before),) = warm_ranks.run(1, save_between_steps, config, tmp_path)
    before, waited, after = sums
    assert waited == before != after and saved_before


def two_ranks(folder: Path) -> tuple[list[bool], list[str]]:
    """Return, on a rank, which of four saves succeed. Rank 1 lacks memory, later loses its writer."""
    join(on_gpu=False)
    run, saved = Run(folder), []
    for step in (1, 2, 3, 4):
        state, second = TrainState(step=step, tokens=10 * step), dist.get_rank() == 1
        if step == 3 and second:
            run.writer().suspend()
        with file_size_limit(2000) if step == 1 and second else contextlib.nullcontext():
            run.manager.save(state)
        if step == 3 and second:
            run.writer().kill()
        saved.append(run.manager.is_saved(step))
    run.manager.close()
    return saved, run.said


def test_all_ranks_hear_of_a_rank_that_could_not_write(warm_ranks: WarmRanks, tmp_path: Path):
    (first, said), (second, nothing) = warm_ranks.run(2, two_ranks, tmp_path)
    assert first == second == [False, True, False, True]
    assert "NO CHECKPOINT, rank 1: File too large" in said[0]
    assert "NO CHECKPOINT, rank 1: the writer process was killed by SIGKILL" in said[2]
    assert len(said) == 4 and nothing == []
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-0000002", "step-0000004"]
    assert checkpoint.world_size(checkpoint.CheckpointStore(tmp_path).choose("auto")) == 2
