"""An export is made to be published: it names no folder, host or secret of the machine that trained it."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from fla_train.training.config import TrainConfig
from fla_train.training.model import public_config
from fla_train.utils.environment import describe_environment

Make = Callable[..., TrainConfig]


def test_an_export_carries_no_path_of_the_machine(whole: Path, corpus: Path):
    (export,) = (whole / "hf").iterdir()
    root = str(corpus.parent).encode()
    assert [file.name for file in export.iterdir() if root in file.read_bytes()] == []
    config = yaml.safe_load(json.loads((export / "training.json").read_text())["config"])
    assert config["data"]["path"] == corpus.name and config["data"]["append_eos"] is True
    assert config["optimizer"]["lr"] == 1e-2
    assert root in (whole / "config.yaml").read_bytes()  # which stays with the run


@pytest.mark.parametrize(
    ("override", "shown"),
    [
        ("data.path=/home/jane/secret/*.parquet", "*.parquet"),
        ("data.path=ours/*.parquet", "*.parquet"),
        ("data.tokenizer.name=/home/jane/tokenizers/mine", "mine"),
        ("data.tokenizer.name=fla-hub/delta_net-1.3B-100B", "fla-hub/delta_net-1.3B-100B"),
        ("trainer.resume=../jane/checkpoints/step-0000100", "step-0000100"),
        ("trainer.suite_options=['mirror=/home/jane/mirror']", None),
        ("launch.main_process_ip=jane.internal", None),
        ("logger.wandb.project=jane", None),
        ("trainer.callbacks=[{class: callbacks:Ema, secret: jane}]", "callbacks:Ema"),
        ("run.dir=runs/jane", None),
        ("data.cache_dir=/scratch/jane", None),
    ],
)
def test_of_a_local_path_the_last_part_is_shown(make_config: Make, override: str, shown: str | None):
    text = public_config(make_config(override))
    assert "jane" not in text and "ours" not in text
    assert shown is None or shown in text


def test_a_part_of_a_mixture(make_config: Make):
    parts = "+data.mixture={a: {weight: 1, path: jane/a/}, b: {weight: 1, source: hub, path: org/name}}"
    mixture = yaml.safe_load(public_config(make_config("data.source=mixture", "data.path=null", parts)))
    assert {name: part["path"] for name, part in mixture["data"]["mixture"].items()} == {
        "a": "a",
        "b": "org/name",
    }


def test_tokens_of_the_environment_are_in_no_record(monkeypatch: pytest.MonkeyPatch):
    for name in ("HF_TOKEN", "WANDB_API_KEY"):
        monkeypatch.setenv(name, "hf_verysecret")
    assert "verysecret" not in json.dumps(describe_environment("cpu"))
