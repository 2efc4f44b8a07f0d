"""A closed terminal leaves the exit status as it is, and under `nohup` it is not a request to stop."""

import os
import pty
import subprocess
import sys

from fla_train.training.preemption import EXIT_CODE


def test_a_status_that_a_closed_terminal_would_change() -> None:
    ours, its = pty.openpty()
    code = "import sys; from fla_train.cli.app import leave; print('begun', flush=True); "
    code += "sys.stdin.readline(); sys.stdout.write('rest'); leave(75)"
    command, buffered = [sys.executable, "-c", code], os.environ | {"PYTHONUNBUFFERED": ""}
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=its, stderr=its, env=buffered)
    os.close(its)
    os.read(ours, 16)
    os.close(ours)
    process.communicate(b"\n", timeout=60)
    assert process.returncode == EXIT_CODE


def test_under_nohup_a_closed_terminal_is_not_a_request_to_stop() -> None:
    code = """
import os, signal
from fla_train.training.preemption import StopRequest
signal.signal(signal.SIGHUP, signal.SIG_IGN)
request = StopRequest()
os.kill(os.getpid(), signal.SIGHUP)
print(request.arrived())
"""
    assert subprocess.check_output([sys.executable, "-c", code], text=True) == "False\n"
