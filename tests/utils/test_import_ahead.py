"""Workers that import while the launcher works become ranks, or end with the launcher."""

import json
import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from fla_train.utils.import_ahead import COMMAND, CPU_ONLY, importing_workers, start_worker

pytestmark = pytest.mark.usefixtures("unwatched")
KILLED = """
import os, signal
from fla_train.utils.import_ahead import importing_workers
from psutil import Process
with importing_workers():
    print(Process().children()[0].pid, flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
"""


def started(before: set[psutil.Process]) -> set[psutil.Process]:
    """Return the children since `before`; pytest may have others."""
    return set(psutil.Process().children()) - before


def test_the_waiting_worker_gets_arguments_and_environment(tmp_path: Path):
    """It reports a missing plan in the file that only its new environment names."""
    error = tmp_path / "error.json"
    environment = os.environ | {"FLA_TRAIN_LAUNCHER": str(os.getpid()), "OMP_NUM_THREADS": "1"}
    environment |= {"FLA_TRAIN_BEGAN": "0", "TORCHELASTIC_ERROR_FILE": str(error), **CPU_ONLY}
    before = set(psutil.Process().children())
    with importing_workers(["launch.device=cpu"]):
        (waiting,) = started(before)
        worker = start_worker([*COMMAND, "no-plan.json"], environment)
        assert worker.pid == waiting.pid and os.getsid(worker.pid) == worker.pid
        other = start_worker([*COMMAND, "no-plan.json"], environment)
        assert other.pid != waiting.pid
        other.kill()
        other.wait()
    assert worker.wait(300) == 2  # It did not end with the block.
    assert "no-plan.json" in json.loads(error.read_text())["message"]


def test_workers_for_another_device_are_not_used_and_unused_ones_end_with_the_block():
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": "0", "FLA_TRAIN_LAUNCHER": str(os.getpid())}
    before = set(psutil.Process().children())
    with importing_workers(["launch.device=cpu"]):
        (waiting,) = started(before)
        other = start_worker([sys.executable, "-c", "raise SystemExit(3)"], os.environ)
        assert other.wait(300) == 3 and waiting.is_running()
        worker = start_worker([*COMMAND, "no-plan.json"], environment)
        assert worker.pid != waiting.pid and not waiting.is_running()
        worker.kill()
        worker.wait()
    with importing_workers(["launch.device=cpu"]):
        (waiting,) = started(before)
    assert not waiting.is_running()


@pytest.mark.parametrize(
    ("visible", "cores", "overrides", "expected"),
    [
        (None, 8, [], 3),
        ("1,2", 8, [], 2),
        ("", 8, [], 1),
        (None, 8, ["launch.device=cpu", "launch.num_processes=4", "launch.num_machines=2"], 2),
        (None, 2, ["launch.num_processes=3"], 1),
    ],
)
def test_as_many_workers_wait_as_the_run_will_use_while_cores_last(
    visible: str | None, cores: int, overrides: list[str], expected: int, tmp_path: Path, monkeypatch
):
    for name in ("nvidia0", "nvidia1", "nvidia2", "nvidiactl"):
        (tmp_path / name).touch()
    monkeypatch.setattr("fla_train.utils.import_ahead.COMMAND", [sys.executable, "-S", "-c", "input()"])
    monkeypatch.setattr("fla_train.utils.import_ahead.DEVICES", tmp_path)
    monkeypatch.setattr("fla_train.utils.import_ahead.available_cores", lambda: cores)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    before = set(psutil.Process().children())
    with importing_workers(overrides):
        assert len(started(before)) == expected


def test_the_waiting_worker_ends_with_a_launcher_that_is_killed():
    done = subprocess.run([sys.executable, "-c", KILLED], capture_output=True, text=True, timeout=300)
    pid = int(done.stdout)
    if psutil.pid_exists(pid):
        psutil.Process(pid).wait(60)
