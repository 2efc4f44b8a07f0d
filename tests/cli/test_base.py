"""A command on a run's folder starts from the run's config, and one with init_from from a model's."""

import contextlib
import json
import os
import shlex
from pathlib import Path

import pytest

from fla_train.cli.app import compose
from fla_train.cli.base import with_base
from fla_train.data.config import TokenizerConfig
from fla_train.data.tokenizers import load_tokenizer
from fla_train.hub.export import export_model
from fla_train.models.configuration import DeltaProductConfig
from fla_train.models.modeling import DeltaProductForCausalLM
from fla_train.training.config import TrainConfig, register, to_config, to_yaml
from fla_train.utils.overrides import as_data

CORPUS = str(Path("corpus").absolute())
OTHERS = ("trainer.eval_every=7", "model.num_householder=3", "data=local", f"data.path={CORPUS}")


def composed(*overrides: str) -> TrainConfig:
    register()
    return to_config(compose("train", with_base(overrides)))


@pytest.fixture
def run(tmp_path: Path) -> Path:
    folder = tmp_path / "a run (1)"
    folder.mkdir()
    asked = ("schedule=wsd", "schedule.decay_steps=5", "trainer.resume=none", *OTHERS)
    config = composed(*asked)
    config.run.dir = str(folder)
    (folder / "config.yaml").write_text(to_yaml(config))
    return folder


def at(run: Path) -> str:
    return f"run.dir='{run}'"


def test_only_the_overrides_change(run: Path):
    config = composed(at(run), "trainer.max_steps=48", "optimizer.lr=1e-2")
    assert (config.trainer.max_steps, config.optimizer.lr) == (48, 1e-2)
    assert (config.trainer.eval_every, config.model["num_householder"]) == (7, 3)
    assert (config.data.source, config.data.path) == ("local", CORPUS)
    assert (config.schedule.name, config.schedule.decay_steps) == ("wsd", 5)
    # Checkpoints hold the number.
    assert config.trainer.global_batch_tokens == "auto"
    assert config.trainer.resume == "auto"
    config = composed(at(run), "trainer.resume=none", "schedule=linear", "model=delta_net/tiny")
    assert config.trainer.resume == "none" and config.data.path == CORPUS
    assert (config.schedule.name, config.schedule.decay_steps) == ("linear", None)
    assert config.model["num_householder"] == 1


PUBLISHES = (
    *("hub.repo_id=other/model", "hub.private=false", "hub.license='a b'", "logger.wandb.mode=online"),
    *("logger.wandb.entity=other", "trainer.suite_every=2", "trainer.suite_options=['device=cpu']"),
    *("launch.num_machines=2", "launch.machine_rank=1"),
)


def test_a_folder_alone_publishes_and_evaluates_nothing(run: Path, capfd: pytest.CaptureFixture[str]):
    (run / "config.yaml").write_text(to_yaml(composed(*OTHERS, *PUBLISHES)))
    plain = composed()
    config = composed(at(run))
    assert config.trainer.eval_every == 7 and (config.hub, config.logger) == (plain.hub, plain.logger)
    assert (config.trainer.suite_every, config.trainer.suite_options) == (0, [])
    options = shlex.split(capfd.readouterr().err.partition("keep: ")[2])
    assert sorted(options) == sorted(PUBLISHES)
    with open(os.devnull) as closed, contextlib.redirect_stderr(closed):  # any write to it is an error
        assert composed(at(run)) == config
    config = composed(at(run), *PUBLISHES)
    assert (config.hub.repo_id, config.hub.license, config.hub.private) == ("other/model", "a b", False)
    assert config.trainer.suite_options == ["device=cpu"] and not capfd.readouterr().err


@pytest.mark.parametrize(
    "text", ["hydra.x=1", "++hydra.callbacks.x._target_=os.mkdir", "--config-dir=/", "-m", "~a", "a=1,2"]
)
def test_options_for_another_process_are_values(text: str):
    assert as_data(["a=${oc.env:HOME}", "b=[1,x y]"]) == ["a='\\${oc.env:HOME}'", "b=[1,'x y']"]
    with pytest.raises(ValueError):
        as_data([text])


def test_a_recipe_brings_its_groups_and_keys(run: Path):
    # This experiment chooses model and data, but not the schedule.
    config = composed(at(run), "experiment=demo")
    assert (config.data.source, config.model["num_householder"]) == ("stdlib", 2)
    assert (config.trainer.max_steps, config.schedule.name) == (200, "wsd")
    # This one chooses them in a file that it builds on.
    nested = composed(at(run), "experiment=formal/parity", "scale=fast")
    assert nested.task is not None and nested.task.kind == "formal_language"


def test_a_run_on_a_task_takes_changes_of_its_task(tmp_path: Path):
    config = composed("task=group_words", "task.options.group=S3", "task.train.length=8")
    (tmp_path / "config.yaml").write_text(to_yaml(config))
    again = composed(at(tmp_path), "task.test_sequences=16")
    assert again.task is not None and again.task.options["group"] == "S3"
    assert again.task.test_sequences == 16


def test_text_of_the_saved_config_is_not_interpolated(run: Path):
    file = run / "config.yaml"
    file.write_text(file.read_text().replace(f"path: {CORPUS}", "path: ${oc.env:HOME}"))
    assert composed(at(run)).data.path == "${oc.env:HOME}"


@pytest.fixture
def export(tmp_path: Path) -> Path:
    config = DeltaProductConfig(vocab_size=320, hidden_size=32, num_hidden_layers=1, num_heads=1, head_dim=16)
    tokenizer = load_tokenizer(TokenizerConfig(name="bytes"))
    return export_model(DeltaProductForCausalLM(config), tokenizer, tmp_path / "export")


def test_model_and_tokenizer_follow_the_weights(export: Path):
    config = composed(f"init_from='{export}'", "data=local", "data.path=corpus", "trainer.max_steps=3")
    assert (config.model["hidden_size"], config.model["vocab_size"]) == (32, 320)
    assert config.data.tokenizer.name == str(export)
    chosen = composed(f"init_from='{export}'", "model=delta_net/tiny", "data.tokenizer.name=bytes")
    assert (chosen.model["hidden_size"], chosen.data.tokenizer.name) == (128, "bytes")


def test_the_same_command_again_keeps_the_tokenizer_of_the_weights(export: Path, tmp_path: Path):
    command = (f"init_from='{export}'", "data=local", "data.path=corpus", at(tmp_path / "run"))
    first = composed(*command)
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.yaml").write_text(to_yaml(first))
    again = composed(*command)
    assert (again.data.tokenizer, again.model) == (first.data.tokenizer, first.model)
    assert composed(*command, "data.tokenizer.name=bytes").data.tokenizer.name == "bytes"


def test_jobs_of_a_sweep_share_the_weights_and_no_config(export: Path, run: Path):
    register()
    given = [f"init_from='{export}'", "optimizer.lr=1e-3,2e-3"]
    (base, *rest) = with_base(given, sweep=True)
    assert rest == given and to_config(compose("train", [base, given[0]])).model["hidden_size"] == 32
    assert with_base([at(run), "seed=1,2"], sweep=True) == [at(run), "seed=1,2"]


def test_an_option_of_the_users_own_chooses_groups_too(run: Path, tmp_path: Path):
    (tmp_path / "own" / "experiment").mkdir(parents=True)
    text = "# @package _global_\ndefaults:\n  - override /model: delta_net/tiny\n"
    (tmp_path / "own" / "experiment" / "mine.yaml").write_text(text)
    register()
    overrides = with_base([at(run), "experiment=mine"], config_dir=str(tmp_path / "own"))
    config = to_config(compose("train", overrides, config_dir=str(tmp_path / "own")))
    assert config.model["num_householder"] == 1


def test_a_tokenizer_folder_that_has_gone_is_found_with_the_prepared_data(run: Path, tmp_path: Path):
    file, gone, kept = run / "config.yaml", tmp_path / "gone", tmp_path / "prepared" / "tokenizer"
    file.write_text(file.read_text().replace("name: bpe", f"name: {gone}"))
    (run / "plan.json").write_text(json.dumps({"data_folder": str(kept.parent)}))
    assert composed(at(run)).data.tokenizer.name == str(gone)
    kept.mkdir(parents=True)
    assert composed(at(run)).data.tokenizer.name == str(kept)
