"""`precompile`: the kernels of some work are compiled in threads, and none is launched."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")


@pytest.mark.usefixtures("unwatched")
def test_kernels_of_both_passes_are_compiled_once_in_threads_and_not_launched(tmp_path: Path) -> None:
    """The second process finds them in Triton's cache, as in a container that brings it."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    for cached in (False, True):
        done = subprocess.run(
            [sys.executable, "-m", "tests.kernels.precompile_on_cpu"],
            cwd=Path(__file__).parents[2],
            env=environment | {"TRITON_CACHE_DIR": str(tmp_path)},
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stderr[-2000:]
        assert json.loads(done.stdout) == {
            "compiled": [[f"{name}_kernel", cached, False] for name in ("double", "double", "halve")],
            "loaded": [[f"{name}_kernel", False] for name in ("double", "double", "halve")],
            "again": 0,
            "failed": True,  # at its launch
            "tuned": False,
            "results": [[32.0, 32.0]] * 2,  # what was there before the launches
        }
