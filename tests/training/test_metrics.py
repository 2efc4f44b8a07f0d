import errno
import io
import json
import os
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace

import pytest
from test_checkpoint_manager import file_size_limit

from fla_train.training.checkpoint import TrainState
from fla_train.training.config import TrainConfig
from fla_train.training.log import RunLogger, open_sinks
from fla_train.training.run_folder import RunFolder
from fla_train.utils.records import read_metrics


@pytest.fixture
def wandb(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Stand in for the package, whose `init` tests replace."""
    package = SimpleNamespace()
    monkeypatch.setitem(sys.modules, "wandb", package)
    return package


@pytest.fixture
def config(make_config: Callable[..., TrainConfig]) -> TrainConfig:
    return make_config("logger=default", "logger.wandb.mode=online")


def test_a_wandb_run_keeps_its_id_over_a_resume(config: TrainConfig, wandb: SimpleNamespace, tmp_path: Path):
    runs: list[dict] = []
    logged: list[tuple[int, dict]] = []

    def init(**settings: object) -> SimpleNamespace:
        runs.append(settings)
        return SimpleNamespace(
            id=settings["id"] or "fresh",
            log=lambda values, step: logged.append((step, values)),
            finish=lambda: None,
        )

    wandb.init, state = init, TrainState()
    for sink in open_sinks(config, RunFolder(tmp_path), state, print):
        sink.write({"step": 1, "tokens": 8, "loss": 2.0, "grad_norm": None})
        sink.close()
    resumed = TrainState(**json.loads(json.dumps(asdict(state))))  # by way of a checkpoint's state.json
    open_sinks(config, RunFolder(tmp_path), resumed, print)
    assert [run["id"] for run in runs] == [None, "fresh"] and runs[1]["resume"] == "allow"
    assert logged == [(1, {"tokens": 8, "loss": 2.0})]


def test_a_run_does_not_need_wandb(config, wandb, tmp_path, capsys):
    class Down(Exception):
        """Stand for any exception of the package."""

    class Refused(Exception):
        """Stand for wandb's error for a missing login."""

    raised: list[type[Exception]] = []

    def init(**settings: object) -> None:
        raise raised[-1]("connection\nrefused")

    wandb.init, wandb.errors = init, SimpleNamespace(UsageError=Refused, AuthenticationError=Refused)
    folder = RunFolder(tmp_path)
    for failure, state in (
        (Down, TrainState()),
        (Down, TrainState(step=3, wandb_id="begun")),
        (Refused, TrainState(step=3, wandb_id="begun")),
    ):
        raised.append(failure)
        before = state.wandb_id
        (sink,) = open_sinks(config, folder, state, print)
        assert sink.name == "metrics.jsonl" and state.wandb_id == before
        (line,) = capsys.readouterr().out.splitlines()
        assert line.startswith("W&B is left out until the next start") and "connection refused" in line
    with pytest.raises(ValueError, match="connection refused"):  # a new run without a login
        open_sinks(config, folder, TrainState(), print)


def test_nothing_that_a_view_raises_ends_a_run(config, wandb, tmp_path, capsys):
    def gone(*arguments: object, **options: object) -> None:
        raise RuntimeError("the service is gone")

    run = SimpleNamespace(id="fresh", log=gone, finish=gone)
    wandb.init = lambda **settings: run
    logger = RunLogger(config, RunFolder(tmp_path), TrainState(), io.StringIO(), rank=0)
    for step in (1, 2):
        logger.record({"step": step, "loss": 1.0})
    logger.close()
    told = capsys.readouterr().out.splitlines()
    assert len(told) == 2 and all("the service is gone" in line for line in told)
    assert [record["step"] for record in read_metrics(tmp_path / "metrics.jsonl")] == [1, 2]


def test_what_a_full_disk_refuses_is_told_of_once_and_written_later_and_the_views_go_on(
    config: TrainConfig, wandb: SimpleNamespace, tmp_path: Path, capsys: pytest.CaptureFixture
):
    shown: list[int] = []
    view = SimpleNamespace(id="fresh", log=lambda values, step: shown.append(step), finish=lambda: None)
    wandb.init, path = lambda **settings: view, tmp_path / "metrics.jsonl"
    logger = RunLogger(config, RunFolder(tmp_path), TrainState(), io.StringIO(), rank=0)
    logger.record({"step": 1, "loss": 1.0})
    with file_size_limit(path.stat().st_size + 5):
        for step in (2, 3):  # the first of them in part
            logger.record({"step": step, "loss": 1.0})
    logger.record({"step": 4, "loss": 1.0})
    with file_size_limit(path.stat().st_size):
        logger.record({"step": 5, "loss": 1.0})
    logger.close()
    assert [record["step"] for record in read_metrics(path)] == shown == [1, 2, 3, 4, 5]
    told = capsys.readouterr().out.splitlines()
    assert [line.split(" (")[0] for line in told] == [
        f"step {step}: metrics.jsonl can't be written" for step in (2, 5)
    ]


def test_a_terminal_that_has_gone_costs_lines_only(make_config, tmp_path, capsys):
    class Gone(io.StringIO):
        def write(self, text: str) -> int:
            raise OSError(errno.EIO, os.strerror(errno.EIO))

    logger = RunLogger(make_config(), RunFolder(tmp_path), TrainState(), Gone(), rank=0)
    logger.log("a line")
    record = {"step": 3, "loss": 1.0, "lr": 0.1, "grad_norm": 1.0, "tokens_per_second": 9.0}
    logger.step(record, skipped=False)
    assert capsys.readouterr().out.startswith("a line\nstep 3/12  loss 1.0000")
