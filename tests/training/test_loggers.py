"""Packages that the config needs must be installed before the data are prepared."""

import sys
from pathlib import Path

import pytest


def test_a_missing_package_is_named_before_data_are_prepared(
    run_command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "tensorboard", None)  # as if it were not installed
    cache, folder = tmp_path / "cache", tmp_path / "run"
    words = ["logger.tensorboard=true", f"data.cache_dir={cache}", f"run.dir={folder}", "trainer.max_steps=1"]
    code, _, line = run_command("fla-train", *words)
    assert code == 2 and line.count("\n") == 1 and "pip install tensorboard" in line
    assert not cache.exists() and not folder.exists()
