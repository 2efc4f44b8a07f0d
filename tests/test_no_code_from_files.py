"""No file that the project reads can run code: ruff's S rules in pyproject.toml, and what they don't know."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = ("configs", "eval", "fla_train", "kernels", "scripts")
UNSAFE = re.compile(
    r"torch\.load\((?!.*weights_only=True)"
    r"|torch\.(jit\.load|hub\.|package\.)"
    r"|yaml\.(unsafe|full)_load|(joblib|cloudpickle)\.load|compile\(|__import__\("
    r"|Auto\w*\.from_pretrained\((?!.*trust_remote_code=)"
    r"|.*(weights_only=False|allow_pickle=True|trust_remote_code=True)",
    re.DOTALL,
)


@pytest.mark.parametrize("folder", FOLDERS)
def test_no_call_runs_what_a_file_holds(folder: str) -> None:
    for path in (ROOT / folder).rglob("*.py"):
        nodes = ast.walk(ast.parse(path.read_text()))
        calls = [ast.unparse(node) for node in nodes if isinstance(node, ast.Call)]
        assert not [call for call in calls if UNSAFE.match(call)], path
