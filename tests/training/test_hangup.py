"""When its terminal closes, a run stops with a checkpoint; under `nohup` it continues."""

import os
import pty
import subprocess
import sys

import pytest

from fla_train.training.preemption import EXIT_CODE


@pytest.mark.parametrize("end", ["leave(75)", "sys.exit(75)"])
def test_a_status_that_a_closed_terminal_would_change(end: str) -> None:
    ours, its = pty.openpty()
    code = "import sys; from fla_train.cli.app import leave; print('begun', flush=True); "
    code += f"sys.stdin.readline(); sys.stdout.write('rest'); {end}"
    command, buffered = [sys.executable, "-c", code], os.environ | {"PYTHONUNBUFFERED": ""}
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=its, stderr=its, env=buffered)
    os.close(its)
    os.read(ours, 16)
    os.close(ours)
    process.communicate(b"\n", timeout=60)
    assert process.returncode == (EXIT_CODE if end == "leave(75)" else 120)
