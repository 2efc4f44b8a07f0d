"""The Python API of docs/python.md, and the reading of runs by `Run` and `fla-runs`."""

import csv
import io
import json
import re
import sys
from collections.abc import Callable
from pathlib import Path

import hydra
import numpy as np
import pytest
import torch
from hydra.core.global_hydra import GlobalHydra

import fla_train
from fla_train.cli import runs as command
from fla_train.cli.train import place_job
from fla_train.run.results import Run, differences, find_runs
from fla_train.training.config import TrainConfig, to_yaml
from fla_train.training.run_folder import RunFolder, RunLock

PAGE = Path(__file__).resolve().parents[2] / "docs" / "python.md"
Make = Callable[..., TrainConfig]


def test_the_page_runs_from_top_to_bottom(warm_ranks, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("FLA_TRAIN_CACHE", str(tmp_path / "cache"))
    blocks = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), re.S | re.M)
    names: dict = {}
    GlobalHydra.instance().clear()  # commands that ran in this process have left theirs
    with warm_ranks.as_workers():
        # The ranks have a working directory of their own. A smaller model and no check save half a minute.
        small = ["model=delta_net/tiny", "model.hidden_size=64", "model.num_hidden_layers=2"]
        small += ["trainer.check_backend=false", "trainer.global_batch_tokens=256"]
        code = "".join(blocks).replace('"debug=smoke"', f'"debug=smoke", *{small}')
        exec(code.replace("runs/python", str(tmp_path / "runs" / "python")), names)
        assert "finished 24" in capsys.readouterr().out
        again = fla_train.train(names["config"])  # complete: it is read only
    assert not GlobalHydra.instance().is_initialized()
    monkeypatch.chdir(tmp_path / "runs")
    run = Run("python")
    monkeypatch.chdir("/")
    assert again.path == run.path and run.config.optimizer.lr == 3e-3
    losses = run.metrics.validation_loss.dropna()
    assert list(losses.index) == [12, 24] and run.checkpoints.keys() == {12, 24}
    assert run.best_checkpoint == run.checkpoints[losses.idxmin()]
    exported = run.model().state_dict()
    for checkpoint in (24, run.checkpoints[24]):
        newest = run.model(checkpoint).state_dict()
        assert all(torch.equal(newest[name], exported[name]) for name in exported)
    with pytest.raises(ValueError, match="12, 24"):
        run.model(13)
    assert (tmp_path / "loss.png").is_file()


@pytest.mark.parametrize("task", [[], ["experiment=state_tracking/s3", "scale=cpu"]])
def test_a_seed_draws_weights_and_sequences(make_config: Make, task: list[str]) -> None:
    compose = fla_train.compose if task else make_config
    configs = [compose(*task, f"seed={seed}") for seed in (0, 0, 1)]
    weights = [fla_train.build_model(config).get_input_embeddings().weight for config in configs]
    data = [fla_train.build_data(config).sequences(np.arange(4)) for config in configs]
    for one, same, other in (weights, data):
        assert torch.equal(one, same) and not torch.equal(one, other)


def test_errors_are_raised_and_hydra_of_the_caller_stays(make_config: Make, tmp_path: Path) -> None:
    with hydra.initialize_config_module("fla_train.configs", version_base="1.3"):
        theirs = GlobalHydra.instance().hydra
        with pytest.raises(ValueError, match=r"trainer.max_step.*did you mean"):
            fla_train.compose("trainer.max_step=3")
        with pytest.raises(ValueError, match=r"compose\('a=1', 'b=2'\)"):
            fla_train.compose(["trainer.max_steps=3"])
        assert fla_train.compose("trainer.max_steps=3").trainer.max_steps == 3
        with pytest.raises(ValueError, match=r"model\.num_heads"):
            fla_train.compose(
                "experiment=state_tracking/s3", "scale=fast", "model=mamba_signed/tiny", "model.num_heads=2"
            )
        assert GlobalHydra.instance().hydra is theirs
    with pytest.raises(ValueError, match="is not a multiple of"):
        fla_train.train(make_config("trainer.global_batch_tokens=300", f"run.dir={tmp_path / 'run'}"))
    assert fla_train.train(make_config("dry_run=true")) is None
    config = make_config("dry_run=true")
    config.optimizer.learning_rate = 1e-3  # no field: Python keeps it all the same
    with pytest.raises(ValueError, match=r"optimizer\.learning_rate"):
        fla_train.train(config)
    config = make_config("trainer.suite_every=4", "trainer.suite=expressivity", "seed=-1")
    with pytest.raises(ValueError, match=r"(?s)seed=-1.*trainer\.suite"):
        fla_train.train(config)
    with pytest.raises(ValueError, match="holds no run"):
        Run(tmp_path)


@pytest.fixture
def folders(make_config: Make, tmp_path: Path) -> Path:
    """Three runs without training: two jobs of a sweep in a folder of sweeps, and another model."""
    given = {
        "sweeps/one/2-optimizer.lr=0.1": ["optimizer.lr=0.1"],
        "sweeps/one/10-optimizer.lr=0.2": ["optimizer.lr=0.2"],
        "other": ["optimizer.lr=0.1", "model.use_forget_gate=false", "model.num_householder=1"],
    }
    for number, (name, overrides) in enumerate(given.items()):
        folder = RunFolder(tmp_path / name)
        folder.create()
        folder.config.write_text(to_yaml(make_config(*overrides)))
        losses = [{"step": i, "tokens": 8 * i, "loss": 5.0 - i + number} for i in (1, 2)]
        records = [record | {"tokens_per_second": 10.0 * record["step"]} for record in losses]
        records += [{"step": i, "tokens": 8 * i, "validation_loss": 4.0 + (i == 2)} for i in (1, 2)]
        folder.metrics.write_text("".join(json.dumps(record) + "\n" for record in records))
    folder.plan.write_text('{"parameters_held": 50460000}')
    return tmp_path


def test_runs_are_found_in_order_with_what_differs(folders: Path, make_config: Make) -> None:
    runs = find_runs([folders / "sweeps", folders])
    assert [run.name for run in runs] == ["2-optimizer.lr=0.1", "10-optimizer.lr=0.2", "other"]
    assert differences(runs[:2]) == [{"optimizer.lr": 0.1}, {"optimizer.lr": 0.2}]
    assert differences(runs)[2].keys() == {"optimizer.lr", "model.use_forget_gate", "model.num_householder"}
    assert [run.status for run in runs] == ["stopped"] * 3
    lock = RunLock(runs[0].files)
    assert [run.status for run in runs] == ["running", "stopped", "stopped"]
    lock.close()
    with pytest.raises(ValueError, match="nowhere"):
        find_runs([folders / "nowhere"])
    # Without plan.json nobody knows the last step of a run whose length is in tokens.
    runs[0].files.config.write_text(to_yaml(make_config("trainer.max_steps=null", "trainer.max_tokens=4096")))
    assert [run.name for run in find_runs([folders])] == ["other", "10-optimizer.lr=0.2"]


@pytest.mark.parametrize(("accuracies", "status"), [((1, 0.5, 1), "stopped"), ((0.5, 1, 1), "finished")])
def test_a_run_with_a_target_is_finished_once_it_is_reached(tmp_path: Path, accuracies: tuple, status: str):
    """Twice in a row. A run that was killed after an export is not finished."""
    folder = RunFolder(tmp_path)
    folder.create()
    target = "task.stop_at=[[longer/accuracy,0.9]]"
    config = fla_train.compose("experiment=state_tracking/s3", "scale=cpu", target)
    folder.config.write_text(to_yaml(config))
    records = [
        {"step": i + 2, "validation_loss": 1.0, "longer/accuracy": a} for i, a in enumerate(accuracies)
    ]
    folder.metrics.write_text("".join(json.dumps(record) + "\n" for record in records))
    folder.export(4).mkdir(parents=True)
    folder.loss_plot.parent.mkdir()
    folder.loss_plot.touch()
    assert Run(tmp_path).status == status


def test_fla_runs_prints_a_table_and_draws(folders, capsys, monkeypatch):
    def said(*arguments: str) -> str:
        monkeypatch.setattr(sys, "argv", ["fla-runs", *arguments])
        command.main()
        return capsys.readouterr().out

    sweep, png = str(folders / "sweeps"), folders / "plots" / "curves.png"
    lines = said(sweep, "--png", str(png)).splitlines()
    assert lines[0].startswith("2 run(s) in ") and "sweeps/one" in lines[0]
    assert re.search(r"^ *2-optimizer.lr=0.1 .*stopped +2/12 +3\.0000 +5\.0000 +4\.0000 +15 ", lines[2])
    assert lines[3].endswith("optimizer.lr=0.2")
    said(sweep, "--png", str(png), "--metric", "loss")
    assert png.read_bytes().startswith(b"\x89PNG")
    rows = list(csv.DictReader(io.StringIO(said(str(folders), "--csv"))))
    assert sorted(row["optimizer.lr"] for row in rows) == ["0.1", "0.1", "0.2"]
    assert {row["parameters"] for row in rows} == {"", "50460000"}
    assert "model.use_forget_gate=false" in said(str(folders))
    (row, *_) = json.loads(said(sweep, "--json", "--metric", "tokens_per_second"))
    assert row["best_validation_loss_step"] == 1 and row["tokens_per_second"] == 15
    assert row["best_tokens_per_second"] == 20
    # Of equal values the first counts, whether more or less is better.
    for path in sorted((folders / "sweeps").rglob("metrics.jsonl")):
        path.write_text("".join(f'{{"step": {i}, "loss": 1.0, "accuracy": 1.0}}\n' for i in (1, 2)))
    (row, *_) = json.loads(said(sweep, "--json", "--metric", "accuracy"))
    assert (row["best_loss_step"], row["best_accuracy_step"]) == (1, 1)
    # A corpus or a task of any name.
    lower, higher = "validation_perplexity/accounts", "eval/cola/mcc"
    for path in sorted((folders / "sweeps").rglob("metrics.jsonl")):
        path.write_text("".join(f'{{"step": {i}, "{lower}": {i}, "{higher}": {i}}}\n' for i in (1, 2)))
    best = [json.loads(said(sweep, "--json", "--metric", key))[0][f"best_{key}"] for key in (lower, higher)]
    assert best == [1, 2]
    for path in sorted((folders / "sweeps").rglob("metrics.jsonl")):
        path.write_text('{"step": 1, "loss": 1.0}\n')
    with pytest.raises(SystemExit) as end:
        said(sweep, "--metric", "accuracy")
    assert end.value.code == 2 and "no run has accuracy" in capsys.readouterr().err


def test_means_are_of_finished_runs_and_a_seed_counts_once() -> None:
    runs = [(0, "finished", 2.0), (1, "finished", 5.0), (1, "finished", 5.0), (2, "stopped", 9.0)]
    same = {"model": "m", "parameters": 1, "step": 4, "max_steps": 4, "tokens_per_second": 1.0}
    rows = [
        same
        | {"run": f"runs/{i}", "status": status, "differs": {"seed": seed}}
        | dict.fromkeys(("loss", "best_loss", "validation_loss", "best_validation_loss"), loss)
        for i, (seed, status, loss) in enumerate(runs)
    ]
    means = command.table_text(rows, "validation_loss").splitlines()[-1]
    assert means.split()[-3:] == ["2", "3.5000", f"{3 / 2**0.5:.4f}"]  # of 2 and 5


def test_a_job_is_named_by_what_is_swept(make_config: Make, tmp_path: Path) -> None:
    swept = ["optimizer.lr=3e-3", "data.path=/some/corpus, other"]
    config = make_config(f"run.dir={tmp_path / 'sweep'}")
    config.hub.repo_id = "user/model"
    place_job(config, 3, swept)
    assert config.hub.repo_id == "user/model-3"
    assert config.run.dir == f"{tmp_path}/sweep/3-optimizer.lr=3e-3_data.path=_some_corpus_other"
    assert config.logger.wandb.group == "sweep" and config.logger.wandb.tags == swept
    config = make_config(f"run.dir={tmp_path / 'sweep'}", "logger.wandb.group=mine", "logger.wandb.tags=[a]")
    place_job(config, 4, ["x" * 500])
    assert len(Path(config.run.dir).name) < 100
    assert (config.logger.wandb.group, config.logger.wandb.tags) == ("mine", ["a"])
