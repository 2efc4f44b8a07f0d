"""`precompile`: the kernels of some work are compiled in threads, and none is launched."""

from pathlib import Path

import pytest

from tests.kernels.other_process import run_module

pytest.importorskip("triton")


def test_kernels_of_both_passes_are_compiled_once_in_threads_and_not_launched(tmp_path: Path) -> None:
    """The second process finds them in Triton's cache, as in a container that brings it."""
    for cached in (False, True):
        assert run_module("precompile_on_cpu", TRITON_CACHE_DIR=str(tmp_path)) == {
            "compiled": [[f"{name}_kernel", cached, False] for name in ("double", "double", "halve")],
            "loaded": [[f"{name}_kernel", False] for name in ("double", "double", "halve")],
            "again": 0,
            "failed": True,  # at its launch
            "tuned": False,
            "results": [[32.0, 32.0]] * 2,  # what was there before the launches
        }
