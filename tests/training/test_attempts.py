"""How often a run is started again, with workers that only leave a checkpoint behind, or don't."""

import errno
import io
import os
import shutil
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from test_checkpoint import DAMAGE, make

from fla_train.data import prepare
from fla_train.training import attempts, checkpoint
from fla_train.training.launch import TrainingFailed, launch
from fla_train.training.machines import AttemptEnded, Failure
from fla_train.training.resuming import where_to_begin
from fla_train.training.runfolder import RunFolder
from fla_train.training.schema import TrainConfig, to_yaml

Workers = Callable[[Iterator[int | None]], list[str]]
PATH = 2  # where the checkpoint stands among a worker's arguments


@pytest.fixture
def workers(
    monkeypatch: pytest.MonkeyPatch, make_config: Callable[..., TrainConfig], tmp_path: Path
) -> Workers:
    """`workers(steps)`: each attempt leaves a checkpoint of the next step and fails; None: it leaves none.

    Attempts end well once there are no more. Returns, later, what each went on from.
    """
    fingerprint = prepare(make_config().data, log=lambda line: None, progress=False).folder.name

    def play(steps: Iterator[int | None]) -> list[str]:
        begun: list[str] = []

        def run(arguments: list[str], *_: object, **__: object) -> Failure | None:
            begun.append(Path(arguments[PATH]).name if len(arguments) > PATH else "the beginning")
            step = next(steps, 0)
            if step:
                make(tmp_path / "run" / "checkpoints", step, data=fingerprint)
            return None if step == 0 else Failure("rank 0", "was killed")

        monkeypatch.setattr(attempts, "run_workers", run)
        return begun

    return play


def test_a_new_checkpoint_forgives_the_failures_before_it(
    make_config: Callable[..., TrainConfig], workers: Workers, tmp_path: Path, capfd: pytest.CaptureFixture
):
    begun = workers(iter([None, None, 1, None, 2, None]))
    launch(make_config("launch.device=cpu", "launch.max_restarts=2", f"run.dir={tmp_path / 'run'}"))
    first, second = "step-0000001", "step-0000002"
    assert begun == [*["the beginning"] * 3, *[first] * 2, *[second] * 2]
    said = [line for line in capfd.readouterr().out.splitlines() if line.startswith("restart")]
    assert [line.split()[1] for line in said] == ["1", "2", "1", "2", "1", "2"]
    assert said[0] == "restart      1 of 2, rank 0: was killed"


def test_failures_without_a_new_checkpoint_are_counted(
    make_config: Callable[..., TrainConfig], workers: Workers, tmp_path: Path
):
    begun = workers(iter([3, None, None, None, 6]))
    config = make_config("launch.device=cpu", "launch.max_restarts=2", f"run.dir={tmp_path / 'run'}")
    with pytest.raises(TrainingFailed, match="rank 0: was killed"):
        launch(config)
    assert begun == ["the beginning", "step-0000003", "step-0000003"]


def test_checkpoints_that_are_all_lost_meanwhile_end_the_run_as_failed(
    make_config: Callable[..., TrainConfig], workers: Workers, tmp_path: Path
):
    """Not as a fault of the request."""
    workers(iter([3]))
    losing = attempts.run_workers

    def lose(*arguments: object, **options: object) -> Failure | None:
        failure = losing(*arguments, **options)
        DAMAGE["manifest lost"](tmp_path / "run" / "checkpoints" / "step-0000003")
        return failure

    attempts.run_workers = lose  # undone by the fixture
    config = make_config("launch.device=cpu", "launch.max_restarts=2", f"run.dir={tmp_path / 'run'}")
    with pytest.raises(TrainingFailed, match=r"machine 0: no checkpoint in \S+ is intact"):
        launch(config)


def test_what_other_machines_wrote_until_they_came_is_seen(
    make_config: Callable[..., TrainConfig],
    workers: Workers,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
):
    """Their ranks may write, and delete, after ours have failed."""
    begun = workers(iter([3, None]))
    folder = tmp_path / "run" / "checkpoints"

    def meet(*_: object) -> None:
        old, new = folder / "step-0000003", folder / "step-0000006"
        if old.exists():
            state = checkpoint.read_state(old)
            old.rename(new)
            shutil.rmtree(new)
            make(folder, 6, data=state.data)

    monkeypatch.setattr(attempts, "meet", meet)
    launch(make_config("launch.device=cpu", "launch.max_restarts=2", f"run.dir={tmp_path / 'run'}"))
    assert begun == ["the beginning", *["step-0000006"] * 2]


@pytest.mark.parametrize(
    ("fault", "waits"),
    [(AttemptEnded(Failure("machine 1", "did not come")), 2), (ValueError("told different things"), 1)],
)
def test_machines_that_do_not_come_again_end_the_run_as_failed(
    make_config: Callable[..., TrainConfig],
    workers: Workers,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    fault: Exception,
    waits: int,
):
    begun, met = workers(iter([3])), []

    def meet(*_: object) -> None:
        met.append(True)
        raise fault

    monkeypatch.setattr(attempts, "meet", meet)
    config = make_config("launch.device=cpu", "launch.max_restarts=2", f"run.dir={tmp_path / 'run'}")
    with pytest.raises(TrainingFailed, match=str(fault)):
        launch(config)
    assert len(begun) == 1 and len(met) == waits


def test_a_terminal_that_has_gone_does_not_keep_a_run_from_starting_again(monkeypatch: pytest.MonkeyPatch):
    class Gone(io.StringIO):
        def write(self, text: str) -> int:
            raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(sys, "stdout", Gone())
    attempts.say("restart")


def test_no_restart_is_no_restart_however_far_it_came(
    make_config: Callable[..., TrainConfig], workers: Workers, tmp_path: Path
):
    begun = workers(iter([3, 6]))
    with pytest.raises(TrainingFailed):
        launch(make_config("launch.device=cpu", f"run.dir={tmp_path / 'run'}"))
    assert begun == ["the beginning"]


def test_a_branch_goes_on_from_its_own_checkpoints_by_the_same_command(
    make_config: Callable[..., TrainConfig], workers: Workers, tmp_path: Path
):
    """A batch system gives it again; another path in its place is refused."""
    begun = workers(iter([4, 5]))
    begin = [make(tmp_path / name, 3) for name in ("trunk", "other")]
    for asked in (begin[0], begin[0]):
        with pytest.raises(TrainingFailed):
            launch(make_config("launch.device=cpu", f"run.dir={tmp_path / 'run'}", f"trainer.resume={asked}"))
    assert begun == ["step-0000003", "step-0000004"]
    with pytest.raises(ValueError, match="holds step-0000005, which comes after"):
        launch(make_config("launch.device=cpu", f"run.dir={tmp_path / 'run'}", f"trainer.resume={begin[1]}"))


def test_a_branch_goes_on_with_more_machines_than_it_was_begun_with(
    make_config: Callable[..., TrainConfig], tmp_path: Path
):
    config = make_config("launch.device=cpu", f"trainer.resume={make(tmp_path / 'trunk', 3)}")
    folder = RunFolder(tmp_path / "run")
    newest = make(folder.checkpoints, 4)
    folder.config(0).write_text(to_yaml(config))
    second = replace(config, launch=replace(config.launch, num_machines=2, machine_rank=1))
    assert where_to_begin(second, folder) == newest
