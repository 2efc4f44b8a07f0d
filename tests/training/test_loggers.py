"""Packages that the config needs must be installed before the data are prepared."""

import sys
from pathlib import Path

import pytest

from fla_train.training.resolve import resolve


@pytest.mark.parametrize(
    ("package", "asked", "without"),
    [
        ("wandb", "logger=default", "logger=none"),
        ("tensorboard", "logger.tensorboard=true", "false"),
        ("deepspeed", "logger=none", ""),
    ],
)
def test_a_missing_package_is_named_before_data_are_prepared(
    package, asked, without, run_command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, package, None)  # as if it were not installed
    cache, folder = tmp_path / "cache", tmp_path / "run"
    words = [asked, f"data.cache_dir={cache}", f"run.dir={folder}", "trainer.max_steps=1"]
    code, _, line = run_command("fla-train", *words)
    assert code == 2 and line.count("\n") == 1
    assert f"pip install {package}" in line and without in line
    assert not cache.exists() and not folder.exists()


def test_a_folder_that_wandb_has_written_is_not_the_package(
    make_config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "wandb").mkdir()
    monkeypatch.delitem(sys.modules, "wandb", raising=False)
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    monkeypatch.setattr(sys, "path_importer_cache", {})
    with pytest.raises(ValueError, match="pip install wandb"):
        resolve(make_config("logger=wandb"))
