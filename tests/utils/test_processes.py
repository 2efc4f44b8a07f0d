"""Processes keep freed memory, and import nothing from the current folder but custom classes."""

import ctypes
import subprocess
import sys
from pathlib import Path

import pytest

from fla_train.utils.processes import module_command, python_command

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
    """The system counts the pages that a process writes for the first time."""
    given, kept = (
        int(subprocess.run([sys.executable, "-c", FAULTS, mode], capture_output=True, check=True).stdout)
        for mode in ("given back", "kept")
    )
    assert kept < given / 10


def test_children_import_nothing_from_the_current_folder_but_own_classes(tmp_path: Path) -> None:
    for name in ("queue", "yaml", "fla_train"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('imported from the current folder')")
    (tmp_path / "own.py").write_text("class Own(int): ...")
    own = "from fla_train.utils.import_class import import_class; import queue, yaml; "
    own += "assert import_class('own:Own', int, 'int').__name__ == 'Own' and sys.argv[1:] == ['a b']"
    for command in (python_command(own, "a b"), module_command("fla_train.cli.version")):
        subprocess.run(command, cwd=tmp_path, check=True, timeout=300)
