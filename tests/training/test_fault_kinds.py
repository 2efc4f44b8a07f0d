"""The fault drill's own tools: what it damages is damaged, and its failpoints are reached."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from test_checkpoint import make

from fla_train.training import checkpoint
from fla_train.utils.filesystem import describe

SCRIPTS = Path(__file__).parents[2] / "scripts"


@pytest.fixture
def files(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.syspath_prepend(str(SCRIPTS))
    import drill_files

    return drill_files


def test_each_damage_is_found_and_what_is_harmless_is_not(files, tmp_path: Path):
    for number, (name, damage) in enumerate((files.DAMAGES | files.HARMLESS).items()):
        folder = tmp_path / str(number) / "checkpoints"
        intact, damaged = make(folder, 3, world_size=2), make(folder, 6, world_size=2)
        (damaged / "rng-1.pt").write_bytes(b"others")  # as long as rank 0's, and as the older one's
        (damaged / files.OPTIMIZER.format(1)).write_bytes(b"changed")
        manifest = json.loads((damaged / "manifest.json").read_text())["content"]
        manifest["files"] = {file: describe(damaged / file) for file in manifest["files"]}
        checkpoint.write_manifest(damaged, manifest)
        assert checkpoint.newest_intact(folder) == damaged
        damage(damaged, intact)
        expected = damaged if name in files.HARMLESS else intact
        assert checkpoint.newest_intact(folder) == expected, name
        assert (damaged not in checkpoint.checkpoints(folder)) == (name in files.NO_FOLDER), name


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


def test_failpoints_name_functions_that_there_are(files):
    """But for the one in torch."""
    import drill_points

    for point in (*drill_points.AT_START.values(), *drill_points.AT_END.values()):
        path, _, name = point.at.partition(":")
        function = name.partition("!")[0].rpartition(".")[2]
        sources = [file for file in (SCRIPTS.parent / "fla_train").rglob("*.py") if str(file).endswith(path)]
        there = function == "<module>" or any(f"def {function}(" in file.read_text() for file in sources)
        assert path == "distributed_c10d.py" or (sources and there), point
