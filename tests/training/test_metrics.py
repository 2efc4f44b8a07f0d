import json
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace

import pytest

from fla_train.training.checkpoint import TrainState
from fla_train.training.metrics import MetricsFile, Tensorboard, last_losses, read_metrics
from fla_train.training.plots import plot_losses
from fla_train.training.report import open_sinks
from fla_train.training.runfolder import RunFolder
from fla_train.training.schema import TrainConfig


def write(path: Path, steps: range) -> None:
    path.write_text(
        "".join(json.dumps({"step": s, "tokens": 8 * s, "loss": 5 - 0.1 * s}) + "\n" for s in steps)
    )


def test_a_resumed_run_drops_later_records_and_a_torn_line(tmp_path: Path):
    path = tmp_path / "metrics.jsonl"
    write(path, range(1, 8))
    with path.open("a") as file:
        file.write('{"step": 8, "lo')  # a kill in the middle of a write
    metrics = MetricsFile(path, resumed_step=4)
    metrics.log({"step": 5, "tokens": 40, "loss": 1.0})
    metrics.close()
    assert [r["step"] for r in read_metrics(path)] == [1, 2, 3, 4, 5]
    assert read_metrics(path)[-1]["loss"] == 1.0


def test_the_last_finite_losses_are_found(tmp_path: Path):
    path = tmp_path / "metrics.jsonl"
    rows = [{"step": 1, "loss": 3.0}, {"step": 1, "validation_loss": 2.5}, {"step": 2, "loss": None}]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert last_losses(path) == (3.0, 2.5)


def test_several_runs_are_drawn_in_one_figure(tmp_path: Path):
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        write(tmp_path / name / "metrics.jsonl", range(1, 5))
    one = plot_losses([tmp_path / "a"], tmp_path / "plots" / "one.png")
    two = plot_losses([tmp_path / "a", tmp_path / "b"], tmp_path / "plots" / "two.png")
    assert one.read_bytes().startswith(b"\x89PNG")
    assert one.read_bytes() != two.read_bytes()


def test_a_folder_without_losses_is_refused(tmp_path: Path):
    with pytest.raises(ValueError, match="no training losses"):
        plot_losses([tmp_path], tmp_path / "out.png")


def test_a_wandb_run_keeps_its_id_over_a_resume(
    make_config: Callable[..., TrainConfig], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    runs: list[dict] = []
    logged: list[tuple[int, dict]] = []

    def init(**settings: object) -> SimpleNamespace:
        runs.append(settings)
        return SimpleNamespace(
            id=settings["id"] or "fresh",
            log=lambda values, step: logged.append((step, values)),
            finish=lambda: None,
        )

    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(init=init))
    config = make_config("logger=default", "logger.wandb.mode=online")
    state = TrainState()
    for sink in open_sinks(config, RunFolder(tmp_path), state):
        sink.log({"step": 1, "tokens": 8, "loss": 2.0, "grad_norm": None})
        sink.close()
    resumed = TrainState(**json.loads(json.dumps(asdict(state))))  # by way of a checkpoint's state.json
    open_sinks(config, RunFolder(tmp_path), resumed)
    assert [run["id"] for run in runs] == [None, "fresh"] and runs[1]["resume"] == "allow"
    assert logged == [(1, {"tokens": 8, "loss": 2.0})]


def test_tensorboard_shows_the_records(tmp_path: Path):
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    board = Tensorboard(tmp_path, resumed_step=0)
    for step in (1, 2):
        board.log({"step": step, "loss": 1.0 / step, "grad_norm": None})
    board.close()
    events = accumulator.EventAccumulator(str(tmp_path))
    events.Reload()
    assert [(e.step, e.value) for e in events.Scalars("loss")] == [(1, 1.0), (2, 0.5)]
    assert "grad_norm" not in events.Tags()["scalars"]
