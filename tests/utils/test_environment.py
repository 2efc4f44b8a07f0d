"""The description of the machine and the code that goes with every result."""

import importlib.metadata
import json
import subprocess
from pathlib import Path

import pytest

import fla_train
from fla_train.utils.environment import describe_environment, git_commit


def test_description_is_plain_json_with_real_versions() -> None:
    found = describe_environment("cpu")
    assert json.loads(json.dumps(found)) == found
    assert found["packages"]["torch"] == importlib.metadata.version("torch")
    assert found["device"] == "cpu" and found["hardware"]
    assert found["fla_train"] == fla_train.__version__


def test_a_peer_is_named_where_it_is_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "attn_gym-7.8.dist-info").mkdir()
    (tmp_path / "attn_gym-7.8.dist-info" / "METADATA").write_text("Name: attn-gym\nVersion: 7.8\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert describe_environment("cpu")["packages"]["attn-gym"] == "7.8"


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
