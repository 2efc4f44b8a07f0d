"""Synthetic tasks through the whole trainer: accuracy as validation, targets, the recipes' configs."""

import json
import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from warm_ranks import WarmRanks

from fla_train.cli.app import compose
from fla_train.run.launch import launch
from fla_train.run.resolve import resolve
from fla_train.tasks.registry import curriculum_tasks, make_task, training_task
from fla_train.training.config import TrainConfig, register, to_config
from fla_train.training.model import build_model
from fla_train.training.run_data import TaskSequences
from fla_train.utils.records import read_metrics

EXPERIMENTS = Path(__file__).resolve().parents[2] / "configs" / "experiment"
RECIPES = sorted(
    str(path.relative_to(EXPERIMENTS).with_suffix(""))
    for folder in ("state_tracking", "formal", "mqar", "mad", "regbench")
    for path in (EXPERIMENTS / folder).glob("*.yaml")
    if not path.stem.startswith("common")  # no recipes: what others share
)
SMALL = [
    "experiment=state_tracking/s3",
    "scale=cpu",
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


@pytest.mark.slow
def test_a_run_reports_accuracy(make, warm_ranks: WarmRanks, tmp_path: Path) -> None:
    whole = tmp_path / "whole"
    warm_ranks.launch(make(*SMALL, f"run.dir={whole}"))
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
    with pytest.raises(ValueError, match=r"task\.train\.length=7"):
        warm_ranks.launch(make(*SMALL, f"run.dir={whole}", "task.train.length=7", "trainer.max_steps=12"))


def test_a_fixed_training_set_is_drawn_once_and_repeats() -> None:
    task = make_task("group_words", {"group": "S3", "length": 5}, seed=1, num_sequences=7)
    sequences, calls = TaskSequences(task), []
    original = task.batch
    task.batch = lambda rows: calls.append(len(rows)) or original(rows)
    for indices in ([5, 6, 7, 8], [12, 0, 5, 3], range(700, 707)):
        found = sequences.sequences(np.array(indices))
        assert torch.equal(found, original(np.array(indices)).for_causal_lm())
    assert sum(calls) == 7


def test_a_curriculum_begins_with_short_words(make) -> None:
    """Each step has its stage's sequences of its own indices, on any rank; then those of a run without."""
    stages = "[[2,3,{elements:2}],[5,1]]"
    config = make(*SMALL, f"task.curriculum={stages}", "task.batch_size=4").task
    data = TaskSequences(training_task(config, 3), curriculum_tasks(config, 3), config.batch_size)
    whole = training_task(config, 3)
    for step, length in enumerate([2, 2, 2, 5, 6, 6]):
        indices = np.arange(4 * step, 4 * step + 4)[1:3]  # a rank's share of the step
        early = {"length": length} | ({"elements": 2} if step < 3 else {})
        stage = make_task("group_words", {**config.options, **early}, seed=3)
        assert torch.equal(data.sequences(indices), stage.batch(indices).for_causal_lm())
    assert torch.equal(data.sequences(indices), whole.batch(indices).for_causal_lm())


@pytest.mark.slow
def test_a_run_ends_at_its_target(make, warm_ranks, tmp_path, capsys):
    """Two evaluations in a row at the target end the run. With another target it continues."""
    run = tmp_path / "run"
    frequent = ["trainer.eval_every=2", "task.curriculum=[[2,1],[4,4]]"]
    easy = "task.stop_at=[[train_length/token_accuracy,0.0]]"
    warm_ranks.launch(make(*SMALL, *frequent, easy, f"run.dir={run}"))
    assert [r["step"] for r in read_metrics(run / "metrics.jsonl") if "validation_loss" in r] == [2, 4]
    assert (run / "checkpoints" / "step-0000004").is_dir() and (run / "hf" / "step-0000004").is_dir()
    warm_ranks.launch(make(*SMALL, *frequent, easy, f"run.dir={run}"))
    assert "is complete: 4 steps" in capsys.readouterr().out
    warm_ranks.launch(
        make(*SMALL, *frequent, "task.stop_at=[[train_length/token_accuracy,1.1]]", f"run.dir={run}")
    )
    # Tokens of the words that were read: each has one more at its start, and its length is made even.
    tokens = [r["tokens"] for r in read_metrics(run / "metrics.jsonl") if "loss" in r]
    batch = make(*SMALL).task.batch_size
    lengths = [2, 4, 4, 4, 4, 6, 6, 6]
    assert tokens == np.cumsum([batch * (n + 2) for n in lengths]).tolist()


@pytest.mark.parametrize("name", RECIPES)
def test_recipes_compose_and_hold_together(make, name: str) -> None:
    config = resolve(make(f"experiment={name}", "launch.device=cpu")).config
    assert config.trainer.global_batch_tokens == config.task.batch_size * config.trainer.seq_len


@pytest.mark.parametrize(
    ("overrides", "fault"),
    [
        (["task.batch_size=12", "trainer.micro_batch_size=8"], "task.batch_size=12"),
        (["task.curriculum=[[4,2],[7,2]]"], r"task.curriculum.*\[7, 2\]"),
        (["task.curriculum=[[4,2,{group:S4}]]"], "task.curriculum"),
        (
            ["task.stop_at=[[longer/accuracy,1]]"],
            "must be .metric, value. with one of the metrics train_length/",
        ),
        (["task.test_sequences=1", "launch.num_processes=2"], "task.test_sequences=1"),
    ],
)
def test_faults(make, overrides: list[str], fault: str) -> None:
    with pytest.raises(ValueError, match=fault):
        launch(make(*SMALL, *overrides))


@pytest.mark.parametrize(
    "key", ["trainer.seq_len=64", "++trainer.global_batch_tokens=99", "model.vocab_size=9"]
)
def test_what_the_task_decides_is_refused(make, key: str) -> None:
    words = ["experiment=state_tracking/s3", "scale=cpu", key]
    with pytest.raises(ValueError, match=re.escape(key)):
        to_config(compose("train", words), words)


@pytest.mark.parametrize("name", ["llama", "mamba_signed"])
def test_another_model_takes_the_tasks_vocabulary(make, name: str) -> None:
    plan = resolve(make(*SMALL, f"model={'hf/' if name == 'llama' else ''}{name}/tiny"))
    config, data = plan.config, plan.open_data()
    model = build_model(config, data)
    assert model.config.model_type == {"llama": "llama", "mamba_signed": "signed_mamba"}[name]
    assert model.config.vocab_size == 8 and model.config.num_hidden_layers == 1
    assert plan.parameters_held == sum(parameter.numel() for parameter in model.parameters())
    again = build_model(config, data)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), again.parameters(), strict=True))
