"""The papers' recipes: each composes, passes all checks, and plans the sizes that the paper states."""

from collections.abc import Callable
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from fla_train.cli.app import compose
from fla_train.run.launch import launch
from fla_train.training.config import TrainConfig, register, to_config

FOLDER = Path(__file__).parents[2] / "configs" / "experiment" / "paper"

# tokens per step, steps, warm-up, processes, sequences per process and forward, million parameters
PAPER = {
    "deltaproduct_340m": (524_288, 66_758, 512, 16, 8, 392),
    "negative_eigenvalues_340m": (16 * 16 * 2048, 200_000, 250, 16, 16, 342),
    "negative_eigenvalues_1.3b": (32 * 6 * 5 * 2048, 50_000, 500, 32, 6, 1300),
    "deltanet_340m": (524_288, 28_610, 954, 8, 16, 342),
    "deltanet_1.3b": (2_097_152, 47_684, 477, 8, 8, 1300),
}


@pytest.fixture
def recipe(overrides: list[str]) -> Callable[..., TrainConfig]:
    """`recipe(name, ...)` composes an experiment, on the text of the tests' corpus."""
    register()
    data = [item for item in overrides if item.startswith("data")]
    data.append("model.vocab_size=32000")  # of the papers' tokenizer, for which the tests have bytes
    free = [*data, "data.name=null", "logger=none", "launch.device=cpu", "dry_run=true"]
    return lambda name, *more: to_config(compose("train", [f"experiment=paper/{name}", *free, *more]))


@pytest.mark.parametrize("name", PAPER)
def test_a_recipe_prepares_what_its_steps_read_and_little_more(name: str):
    tokens, steps, *_ = PAPER[name]
    cap = OmegaConf.load(FOLDER / f"{name}.yaml").data.max_tokens
    assert tokens * steps < cap <= 1.01 * tokens * steps


@pytest.mark.parametrize("name", PAPER)
def test_a_recipe_plans_what_its_paper_states(recipe, name, capsys):
    tokens, steps, warmup, processes, sequences, parameters = PAPER[name]
    config = recipe(name, f"launch.num_processes={processes}")
    launch(config)
    lines = capsys.readouterr().out.splitlines()
    plan = {line[:12].strip(): line[13:] for line in lines}
    assert plan["tokens"].startswith(f"{tokens * steps:,} = {steps:,} steps x {tokens:,}")
    accumulation = tokens // (processes * sequences * 2048)
    assert plan["batch"] == (
        f"{processes} process(es) x {accumulation} micro-batch(es) x {sequences} sequences x 2048 tokens"
    )
    assert int(plan["parameters"].split()[0].replace(",", "")) == pytest.approx(parameters * 1e6, rel=0.002)
    assert plan["schedule"] == f"cosine, peak 0.0003, {warmup} warm-up steps"
    assert (config.optimizer.weight_decay, config.optimizer.max_grad_norm) == (0.01, 1.0)
    # The GPU-hours of the file's comment are those of the plan.
    hours = plan["GPU-hours"].split()[1].rstrip(",")
    assert f"# {hours} GPU-hours = FLOPs / (40% of an H100's" in (FOLDER / f"{name}.yaml").read_text()
