"""A process that compiles kernels for a GPU which is not there.

Not that of the tests: they may have had Triton interpret kernels, which it decides when it is imported.
"""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
# Coverage would double its time.
LEFT_OUT = ("TRITON_INTERPRET", "COVERAGE_PROCESS_CONFIG", "COVERAGE_PROCESS_START")


def run_module(name: str, *arguments: str, given: str | None = None, **variables: str) -> Any:
    """What `python -m tests.kernels.NAME` prints as JSON, `given` this input; fails with what it says."""
    environment = {name: value for name, value in os.environ.items() if name not in LEFT_OUT} | variables
    command = [sys.executable, "-m", f"tests.kernels.{name}", *arguments]
    done = subprocess.run(command, input=given, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout)


def resources(cubin: Path) -> tuple[int, int]:
    """Registers, and bytes of stack of those that were spilled, of a thread."""
    from triton import knobs

    command = [knobs.nvidia.cuobjdump.path, "-res-usage", str(cubin)]
    usage = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return tuple(int(re.search(rf"{name}:(\d+)", usage)[1]) for name in ("REG", "STACK"))
