"""The examples of docs/examples from a folder outside the repository: train, resume, export, evaluate."""

import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from omegaconf import OmegaConf
from transformers import PreTrainedModel
from warm_ranks import TWO_RANKS, WarmRanks

from fla_train.cli.app import compose
from fla_train.cli.base import with_base
from fla_train.eval.config import EvalConfig, PerplexityConfig, SuiteConfig
from fla_train.eval.run import evaluate
from fla_train.hub.export import copy_export
from fla_train.hub.load import load_model
from fla_train.training.config import TrainConfig, register, to_config, to_yaml
from fla_train.utils.records import read_metrics

LINEAR = "linear_attention:LinearAttention"


def losses(run: Path) -> list[tuple]:
    kept = ("step", "loss", "validation_loss", "grad_norm")
    return [tuple(r.get(key) for key in kept) for r in read_metrics(run / "metrics.jsonl") if "loss" in r]


def greedy(model: PreTrainedModel, length: int) -> None:
    """Generation with states equals the choices of one pass over all tokens."""
    found = model.generate(torch.tensor([[5, 3, 7]]), max_new_tokens=length, do_sample=False, pad_token_id=0)
    choices = model(found, use_cache=False).logits.argmax(-1)
    assert found.shape == (1, 3 + length) and torch.equal(choices[:, 2:-1], found[:, 3:])


@pytest.mark.slow
@torch.no_grad()
@pytest.mark.usefixtures("elsewhere")
def test_on_text(make_config: Callable[..., TrainConfig], warm_ranks: WarmRanks, tmp_path: Path) -> None:
    whole = tmp_path / "whole"
    settings = [*TWO_RANKS, f"model.mixer={LINEAR}", "model.mixer_options={chunk: 8}"]
    settings += ["schedule=constant", "schedule.min_ratio=1", "trainer.log_every=1", "trainer.max_steps=10"]
    settings += ["data.document_boundaries=true"]
    warm_ranks.launch(make_config(*settings, f"run.dir={whole}"))
    assert losses(whole)[-1][1] < losses(whole)[0][1] - 1

    export = copy_export(whole / "hf" / "step-0000010", tmp_path / "copy")
    assert f'mixer="{LINEAR}"' in (export / "README.md").read_text()
    with pytest.raises(ValueError, match=f"mixer={LINEAR}"):
        load_model(export)
    greedy(load_model(export, mixer=LINEAR)[0], 20)
    request = PerplexityConfig(lengths=[8, 24], chunk=16, documents=2, bucket=8, layout="packed")
    suite = SuiteConfig(name="perplexity", perplexity=request)
    _, result = evaluate(EvalConfig(str(whole), str(tmp_path / "eval"), mixer=LINEAR, suite=suite), False)
    assert result.scores and not result.errors

    settings += ["trainer.max_steps=1", f"init_from={export}", f"run.dir={tmp_path / 'follows'}"]
    warm_ranks.launch(make_config(*settings))
    assert losses(tmp_path / "follows")[0][1] < losses(whole)[0][1] - 1


@pytest.mark.parametrize(
    "option",
    [
        f"model.mixer={LINEAR}",
        "optimizer.name=optimization:Lion",
        "schedule.name=optimization:inverse_sqrt",
        "trainer.callbacks=[callbacks:ZLoss]",
    ],
)
def test_a_folder_does_not_choose_the_code_of_a_run(elsewhere: Path, tmp_path: Path, option: str) -> None:
    """The command does, or a config of the user."""
    run = tmp_path / "run"
    run.mkdir()
    register()
    (run / "config.yaml").write_text(to_yaml(to_config(compose("train", ["debug=smoke", option]))))
    with pytest.raises(ValueError, match=re.escape(option)):
        with_base([f"run.dir={run}"])
    assert not {"linear_attention", "optimization", "callbacks"} & sys.modules.keys()
    key, value = option.split("=")
    section, name = key.split(".")
    (elsewhere / "conf" / "experiment").mkdir(parents=True)
    (elsewhere / "conf" / "experiment" / "mine.yaml").write_text(
        f"# @package _global_\n{section}:\n  {name}: {value}\n"
    )
    for permission in ([option], ["experiment=mine"]):
        overrides = with_base([f"run.dir={run}", *permission], config_dir="conf")
        composed = OmegaConf.select(compose("train", overrides, config_dir="conf"), key)
        assert composed == (value if "[" not in value else ["callbacks:ZLoss"])


@pytest.mark.long
def test_the_commands_find_a_class_in_the_working_directory(overrides, elsewhere, tmp_path):
    """Console scripts, of which Python does not search the working directory, and their workers."""
    run, scripts = tmp_path / "run", Path(sys.executable).parent
    settings = [*overrides, "trainer.max_steps=2", "launch.device=cpu", f"run.dir={run}"]
    done = subprocess.run(
        [scripts / "fla-train", *settings, f"model.mixer={LINEAR}"],
        capture_output=True,
        text=True,
        cwd=elsewhere,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert f"checkpoint={run}/hf/step-0000002 mixer={LINEAR}" in done.stdout
