"""`fla-train run.dir=RUN [overrides]` starts from the run's config, and checks changes before any work."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml
from warm_ranks import WarmRanks

from fla_train.cli.app import compose
from fla_train.cli.base import with_base
from fla_train.training import checkpoint
from fla_train.training.config import to_config
from fla_train.utils.records import read_metrics


@pytest.fixture
def run(whole: Path, tmp_path: Path) -> Path:
    return shutil.copytree(whole, tmp_path / "run")


@pytest.fixture
def fla_train(run_command: Callable[..., tuple[int, str, str]]) -> Callable[..., tuple[int, str]]:
    """`fla_train("key=value", ...)` gives the exit status and all that was printed."""

    def run(*arguments: str) -> tuple[int, str]:
        code, out, err = run_command("fla-train", *arguments)
        return code, out + err

    return run


def test_it_goes_on_with_nothing_but_the_change(run: Path, fla_train, warm_ranks: WarmRanks):
    before = (run / "config.yaml").read_text()
    with warm_ranks.as_workers():
        code, said = fla_train(f"run.dir={run}", "trainer.max_steps=14")
    assert code == 0, said
    steps = [record["step"] for record in read_metrics(run / "metrics.jsonl") if "loss" in record]
    assert steps[-1] == 14
    first, second = (yaml.safe_load(text) for text in (before, (run / "config.yaml").read_text()))
    assert second["trainer"].pop("max_steps") == 14 and first["trainer"].pop("max_steps") == 12
    assert second.pop("run")["dir"] == str(run) and first.pop("run")
    assert first == second
    # Each start keeps its own config.
    starts = [
        yaml.safe_load((run / "starts" / name / "config.yaml").read_text()) for name in ("0001", "0002")
    ]
    assert [start["trainer"]["max_steps"] for start in starts] == [12, 14]
    record = json.loads((run / "starts" / "0002" / "start.json").read_text())
    assert (record["step"], record["processes"]) == (12, 2)


def test_the_machines_are_those_of_the_command(run: Path, tmp_path: Path):
    """A run of two machines may continue on one, which must not wait for the other."""
    text = (run / "config.yaml").read_text().replace("num_machines: 1", "num_machines: 2")
    (tmp_path / "config.yaml").write_text(text.replace("127.0.0.1", "10.0.0.1"))
    launch = to_config(compose("train", with_base([f"run.dir={tmp_path}"]))).launch
    assert (launch.num_machines, launch.main_process_ip) == (1, "127.0.0.1")


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (["data.validation_fraction=0.2"], "data.validation_fraction=0.2 (was 0.1)"),
        (["model.num_householder=3"], "model.num_householder=3 (was 2)"),
        (["optimizer=muon"], "optimizer.name=muon (was adamw)"),
    ],
    ids=str,
)
def test_a_change_that_is_refused_prepares_nothing(run, fla_train, change, named, monkeypatch):
    def prepare(*_: object, **__: object) -> None:
        raise AssertionError("data were prepared")

    monkeypatch.setattr("fla_train.run.resolve.prepare", prepare)
    code, said = fla_train(f"run.dir={run}", *change)
    assert code == 2 and named in said and "belongs to another run" in said


def test_what_a_finished_run_was_not_trained_with_is_said(run: Path, fla_train):
    before = (run / "config.yaml").read_text()
    code, said = fla_train(f"run.dir={run}", "optimizer.lr=0.5")
    (line,) = (line for line in said.splitlines() if "optimizer.lr=0.5" in line)
    assert code == 0 and not line.startswith("changed") and (run / "config.yaml").read_text() == before


def test_a_checkpoint_beyond_the_last_step_is_refused(run: Path, fla_train, tmp_path: Path):
    newest = checkpoint.CheckpointStore(run / "checkpoints").list()[-1]
    code, said = fla_train(f"run.dir={run}", "trainer.max_steps=3")
    assert code == 0 and "complete" in said
    shutil.rmtree(run / "hf")
    for place in ([], [f"trainer.resume={newest}"]):
        code, said = fla_train(f"run.dir={run}", *place, "trainer.max_steps=3")
        assert code == 2 and "trainer.max_steps=3" in said


@pytest.mark.parametrize("place", ["hf/step-0000012", "checkpoints/step-0000012", "config.yaml"])
def test_what_is_no_run_folder_is_refused(run: Path, fla_train, place: str):
    code, said = fla_train(f"run.dir={run / place}", "trainer.max_steps=3")
    assert code == 2 and f"run.dir={run / place}" in said
    assert not (run / place / "checkpoints").exists()
