"""Synthetic tasks through the whole trainer: accuracy as validation, exact resume, the recipes' configs."""

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from fla_train.cli.app import compose
from fla_train.tasks import make_task
from fla_train.training.build import build_model
from fla_train.training.launch import launch
from fla_train.training.metrics import read_metrics
from fla_train.training.plan import make_plan
from fla_train.training.schema import TrainConfig, register, to_config
from fla_train.training.task_data import TaskSequences, task_data, with_task_sizes
from fla_train.training.validate import validate

EXPERIMENTS = Path(__file__).resolve().parents[2] / "configs" / "experiment"
RECIPES = sorted(
    str(path.relative_to(EXPERIMENTS).with_suffix(""))
    for folder in ("state_tracking", "formal", "mqar", "mad", "regbench")
    for path in (EXPERIMENTS / folder).glob("*.yaml")
)
SMALL = [
    "experiment=state_tracking/s3_cpu",
    "model.hidden_size=32",
    "model.num_heads=2",
    "task.train.length=6",
    "task.tests.longer.length=12",
    "task.test_sequences=24",
    "task.test_batch_size=10",
    "task.batch_size=16",
    "trainer.max_steps=8",
    "trainer.eval_every=4",
    "trainer.checkpoint_every=4",
    "trainer.log_every=1",
    "trainer.check_backend=false",
    "logger=none",
    "schedule=constant",  # the same rate at a step whatever the end of the run
    "schedule.min_ratio=1",
]


@pytest.fixture(scope="module")
def make() -> Callable[..., TrainConfig]:
    register()
    return lambda *more: to_config(compose("train", list(more)))


def scores(run: Path) -> list[dict]:
    """What the run computed, without times."""
    kept = ("loss", "validation_loss", "grad_norm", "step")
    return [
        {key: value for key, value in record.items() if key in kept or "/" in key}
        for record in read_metrics(run / "metrics.jsonl")
        if "loss" in record or "validation_loss" in record
    ]


@pytest.mark.slow
def test_a_run_reports_accuracy_and_resumes_exactly(make, tmp_path: Path) -> None:
    whole, halves = tmp_path / "whole", tmp_path / "halves"
    launch(make(*SMALL, f"run.dir={whole}"))
    for steps in (4, 8):
        launch(make(*SMALL, f"run.dir={halves}", f"trainer.max_steps={steps}"))
    assert len(scores(whole)) == 10
    assert scores(halves) == scores(whole)
    records = [r for r in read_metrics(whole / "metrics.jsonl") if "validation_loss" in r]
    assert [record["step"] for record in records] == [4, 8]
    for name in ("train_length", "longer"):
        for metric in ("token_accuracy", "sequence_accuracy", "prefix_accuracy_4"):
            assert 0 <= records[-1][f"{name}/{metric}"] <= 1
    curves = json.loads((whole / "accuracy.json").read_text())
    assert curves["step"] == 8 and len(curves["sets"]["longer"]["y"]) == 12
    assert curves["sets"]["longer"]["y"][-1] == records[-1]["longer/sequence_accuracy"]
    assert (whole / "plots" / "accuracy.png").stat().st_size > 1000
    assert (whole / "hf" / "step-0000008" / "config.json").is_file()
    with pytest.raises(ValueError, match=r"belongs to another run: task\.train\.length=7"):
        launch(make(*SMALL, f"run.dir={whole}", "task.train.length=7", "trainer.max_steps=12"))


def test_a_fixed_training_set_is_drawn_once_and_repeats() -> None:
    task = make_task("group_words", {"group": "S3", "length": 5}, seed=1, num_sequences=7)
    sequences, calls = TaskSequences(task), []
    original = task.batch
    task.batch = lambda rows: calls.append(len(rows)) or original(rows)
    for indices in ([5, 6, 7, 8], [12, 0, 5, 3], range(700, 707)):
        found = sequences.sequences(np.array(indices))
        assert torch.equal(found, original(np.array(indices)).for_causal_lm())
    assert sum(calls) == 7


@pytest.mark.parametrize("name", RECIPES)
def test_recipes_compose_and_hold_together(make, name: str) -> None:
    config = with_task_sizes(make(f"experiment={name}", "launch.device=cpu"))
    validate(config)
    assert config.trainer.global_batch_tokens == config.task.batch_size * config.trainer.seq_len


@pytest.mark.parametrize(
    ("overrides", "fault"),
    [
        (["task.options.group=Q8"], "unknown group 'Q8'"),
        (["task.batch_size=12", "trainer.micro_batch_size=8"], "task.batch_size=12 is not a multiple of 8"),
        (["task.test_sequences=1", "launch.num_processes=2"], "leaves processes without a sequence"),
        (["baseline=llama", "baseline.num_heads=5"], "baseline.num_heads=5"),
    ],
)
def test_faults(make, overrides: list[str], fault: str) -> None:
    with pytest.raises(ValueError, match=fault):
        launch(make(*SMALL, *overrides))


def test_a_baseline_needs_a_task(make) -> None:
    with pytest.raises(ValueError, match="trains on tasks only"):
        launch(make("baseline=llama"))


@pytest.mark.parametrize("name", ["llama", "mamba_signed"])
def test_a_baseline_takes_the_models_place(make, name: str) -> None:
    config = with_task_sizes(make(*SMALL, f"baseline={name}"))
    data = task_data(config.task, config.seed)
    model, plan = build_model(config, data), make_plan(config, data)
    assert model.config.model_type == {"llama": "llama", "mamba_signed": "signed_mamba"}[name]
    assert model.config.vocab_size == 8 and model.config.num_hidden_layers == 1
    assert plan.parameters_held == sum(parameter.numel() for parameter in model.parameters())
    again = build_model(config, data)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), again.parameters(), strict=True))
