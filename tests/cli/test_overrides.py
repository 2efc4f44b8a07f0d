"""Values of the command line reach the config as they were written; the others are refused by name."""

from pathlib import Path

import pytest
from omegaconf import OmegaConf

from fla_train.cli import app, prepare, train
from fla_train.cli.overrides import as_written

LIKE_NUMBERS = ("12e4567", "1.10", "1_000", "007", "1e3", "true", "a,b", "[D]/a", "{D}/a", "(1)", "${seed}")


KEYS = ("data.revision", "hub.license", "run.dir", "model.mixer", "init_from")
READ = {"null": None, "": "", "'${seed}'": "0", "'a,b'": "a,b"}  # by Hydra, as ever


@pytest.mark.parametrize(("given", "value"), [*zip(LIKE_NUMBERS, LIKE_NUMBERS, strict=True), *READ.items()])
def test_text_is_taken_literally(given: str, value: str | None):
    train.register()
    config = app.compose("train", as_written("train", [f"{key}={given}" for key in KEYS]))
    assert [OmegaConf.select(config, key) for key in KEYS] == [value] * len(KEYS)


def test_text_in_lists_and_mappings_is_taken_literally():
    prepare.register()
    words = ["logger.wandb.tags=[1.10, a b,'c,d',2]", "data=mixture", "+data.mixture={x: {weight: 2}}"]
    config = app.compose("prepare", as_written("prepare", [*words, "data.mixture.x.path=1.10"]))
    assert config.logger.wandb.tags == ["1.10", "a b", "c,d", "2"]
    assert (config.data.mixture.x.path, config.data.mixture.x.weight) == ("1.10", 2)


def test_a_sweep_separates_values_by_commas():
    train.register()
    words = ["data.name=1.10,x,null,'a,b'", "seed=1,2", "run.dir=1e3", "data.split=choice(a,b)"]
    written = as_written("train", words, sweep=True)
    assert written == ["data.name='1.10',x,null,'a,b'", "seed=1,2", "run.dir='1e3'", words[-1]]


def test_what_is_not_utf8_is_refused_by_its_key():
    train.register()
    with pytest.raises(ValueError, match=r"^run\.dir: "):
        as_written("train", [b"run.dir=Gr\xf6\xdfe".decode(errors="surrogateescape")])


@pytest.mark.parametrize("start", ["", "# a recipe\n# @package _global_\n", "\ufeff# @package _global_\n"])
def test_an_option_file_needs_its_header(tmp_path: Path, start: str):
    train.register()
    (tmp_path / "experiment").mkdir()
    (tmp_path / "experiment/own.yaml").write_text(f"{start}optimizer:\n  lr: 2e-5\n")
    with pytest.raises(ValueError, match=r"experiment=own.* first line .*@package _global_"):
        app.compose("train", ["experiment=own"], config_dir=str(tmp_path))
