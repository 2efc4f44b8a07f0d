"""When its terminal closes, a run stops with a checkpoint; under `nohup` it continues."""

import fcntl
import os
import pty
import signal
import subprocess
import sys
import termios
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest
from test_resume import steps_logged, wait_for

from fla_train.training.preemption import EXIT_CODE


@pytest.fixture
def in_a_terminal(overrides: list[str], tmp_path: Path) -> Callable[[bool], int]:
    """Return a function that trains in a terminal, closes it after the first step, and returns the status."""

    def run(ignored: bool) -> int:
        ours, its = pty.openpty()

        def take_terminal() -> None:
            fcntl.ioctl(0, termios.TIOCSCTTY, 0)
            # Set it in both cases, because the tests themselves may run under nohup.
            signal.signal(signal.SIGHUP, signal.SIG_IGN if ignored else signal.SIG_DFL)

        code = "from fla_train.cli.train import main; main()"
        command = [sys.executable, "-c", code, *overrides, f"run.dir={tmp_path / 'run'}"]
        streams = dict.fromkeys(("stdin", "stdout", "stderr"), its)
        process = subprocess.Popen(command, **streams, start_new_session=True, preexec_fn=take_terminal)
        os.close(its)
        os.set_blocking(ours, False)

        def has_begun() -> bool:
            with suppress(BlockingIOError, OSError):
                os.read(ours, 1 << 16)  # Without a reader it would wait.
            return steps_logged(tmp_path / "run") >= 1 or process.poll() is not None

        wait_for(has_begun)
        os.close(ours)
        return process.wait(timeout=120)

    return run


@pytest.mark.usefixtures("unwatched")
@pytest.mark.long
@pytest.mark.parametrize("ignored", [False, True])
def test_a_terminal_that_closes(in_a_terminal, ignored: bool, tmp_path: Path) -> None:
    status = in_a_terminal(ignored)
    (newest, *_) = sorted((path.name for path in (tmp_path / "run" / "checkpoints").iterdir()), reverse=True)
    finished = newest == "step-0000012"
    assert (status, finished) == ((0, True) if ignored else (EXIT_CODE, False))


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
