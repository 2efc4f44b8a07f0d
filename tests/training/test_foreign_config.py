"""A config.yaml from elsewhere is read as it stands: no variable of the environment gets into it."""

from collections.abc import Callable
from pathlib import Path

import pytest

from fla_train.eval.documents import run_data
from fla_train.training.config import TrainConfig, load_config, to_yaml

Make = Callable[..., TrainConfig]
ATTACK = "${oc.env:FLA_TRAIN_TEST_SECRET}"


@pytest.fixture(autouse=True)
def secret(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLA_TRAIN_TEST_SECRET", "hunter2")


def write(folder: Path, config: TrainConfig, before: str, after: str) -> Path:
    text = to_yaml(config)
    assert before in text
    (folder / "config.yaml").write_text(text.replace(before, after))
    return folder / "config.yaml"


@pytest.mark.parametrize("text", [ATTACK, "a\\\\" + ATTACK, "${seed}"])
def test_interpolations_of_a_saved_config_are_text(make_config: Make, tmp_path: Path, text: str):
    path = write(tmp_path, make_config(), "project: fla_train", f"project: '{text}'")
    assert load_config(path).logger.wandb.project == text


def test_a_run_from_elsewhere_names_no_file_by_a_secret(make_config: Make, tmp_path: Path):
    config = make_config()
    write(tmp_path, config, f"path: {config.data.path}", f"path: {tmp_path}/{ATTACK}")
    with pytest.raises(ValueError) as refused:
        run_data(tmp_path, None)
    assert ATTACK in str(refused.value) and "hunter2" not in str(refused.value)


def test_a_number_that_is_an_interpolation_is_refused(make_config: Make, tmp_path: Path):
    path = write(tmp_path, make_config(), "seed: 0", f"seed: {ATTACK}")
    with pytest.raises(ValueError, match=r"config\.yaml") as refused:
        load_config(path)
    assert "hunter2" not in str(refused.value)
