"""The fault drill's failpoints are reached, and name functions that there are."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import CodeType

import pytest

SCRIPTS = Path(__file__).parents[2] / "scripts"


CALLS = """
import os, sys
def outer(): os.getcwd()
outer()
"""


@pytest.mark.parametrize("at", ["<string>:outer", "<string>:outer!getcwd", "<string>:<module>"])
def test_a_failpoint_is_reached_once(tmp_path: Path, at: str):
    point = {"role": "worker-1", "at": at, "do": "exit 7"}
    (tmp_path / "1.json").write_text(json.dumps(point))
    environment = os.environ | {
        "RANK": "1",
        "PYTHONPATH": str(SCRIPTS / "failpoints"),
        "DRILL_POINTS": str(tmp_path),
    }
    command = [sys.executable, "-c", CALLS, "fla_train.training.worker"]
    codes = [subprocess.run(command, env=environment, timeout=60).returncode for _ in range(2)]
    assert codes == [7, 0] and (tmp_path / "1.fired").exists()


def functions(code: CodeType) -> Iterator[CodeType]:
    """`code`, and what is defined in it."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from functions(constant)


def test_failpoints_name_functions_that_there_are():
    """But for those outside the project."""
    scripts = "".join(path.read_text() for path in SCRIPTS.glob("drill*.py"))
    places = set(re.findall(r'"([\w/]+\.py):([\w.<>]+)(?:!(\w+))?"', scripts))
    modules = list((SCRIPTS.parent / "fla_train").rglob("*.py"))
    assert len(places) > 20
    for path, caller, builtin in places:
        if path in {"distributed_c10d.py", "pathlib.py"}:
            continue
        sources = [file for file in modules if str(file).endswith(f"/{path}")]
        codes = [code for file in sources for code in functions(compile(file.read_text(), path, "exec"))]
        calls = [code.co_names for code in codes if code.co_qualname == caller]
        assert calls and (not builtin or any(builtin in names for names in calls)), (path, caller, builtin)
