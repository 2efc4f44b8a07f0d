"""What a process asks of the system for itself."""

import ctypes
import subprocess
import sys

import pytest

FAULTS = """
import resource, sys, torch
from fla_train.utils.processes import keep_freed_memory
if sys.argv[1] == "kept":
    keep_freed_memory()
def work():
    return [torch.ones(2**24).add_(1) for _ in range(2)]
for _ in range(5):  # until blocks lie where others fit
    work()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(5):
    work()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallopt"), reason="only glibc has the settings")
def test_memory_of_freed_tensors_is_used_again() -> None:
    """The system counts the pages that it hands out as they are first written."""
    given, kept = (
        int(subprocess.run([sys.executable, "-c", FAULTS, mode], capture_output=True, check=True).stdout)
        for mode in ("given back", "kept")
    )
    assert kept < given / 10
