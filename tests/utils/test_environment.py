"""The description of the machine and the code that is saved with every result."""

import json
import subprocess
from importlib.metadata import version
from pathlib import Path

import pytest

import fla_train
from fla_train.utils.environment import describe_environment, git_commit


def test_description_is_plain_json_with_real_versions(tmp_path, monkeypatch):
    (tmp_path / "attn_gym-7.8.dist-info").mkdir()
    (tmp_path / "attn_gym-7.8.dist-info" / "METADATA").write_text("Name: attn-gym\nVersion: 7.8\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    described = describe_environment("cpu")
    assert json.loads(json.dumps(described)) == described
    packages = described["packages"]
    assert packages["torch"] == version("torch") and packages["attn-gym"] == "7.8" and described["hardware"]


def test_commit_of_the_checkout_marks_changed_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def git(*arguments: str) -> str:
        identity = ["-c", "user.name=tester", "-c", "user.email=tester@example.org"]
        command = ["git", "-C", str(tmp_path), *identity, *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

    module = tmp_path / "fla_train/__init__.py"
    module.parent.mkdir()
    module.write_text("")
    monkeypatch.setattr(fla_train, "__file__", str(module))
    assert git_commit() is None
    git("init", "--quiet")
    git("add", ".")
    git("commit", "--quiet", "--message", "first")
    assert git_commit() == git("rev-parse", "HEAD")
    module.write_text("changed = True\n")
    assert git_commit() == git("rev-parse", "HEAD") + "-dirty"
