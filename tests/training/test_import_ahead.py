"""Workers that import while the launcher works become ranks, or end with the launcher."""

import json
import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from fla_train.run import import_ahead

pytestmark = pytest.mark.usefixtures("unwatched")
KILLED = """
import os, signal
from fla_train.run.import_ahead import import_ahead
from psutil import Process
import_ahead([])
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
    environment |= {"FLA_TRAIN_BEGAN": "0", "TORCHELASTIC_ERROR_FILE": str(error)}
    before = set(psutil.Process().children())
    import_ahead.import_ahead(["launch.num_processes=1"])
    (waiting,) = started(before)
    worker = import_ahead.start_worker([*import_ahead.COMMAND, "no-plan.json"], environment)
    assert worker.pid == waiting.pid and os.getsid(worker.pid) == worker.pid
    other = import_ahead.start_worker([*import_ahead.COMMAND, "no-plan.json"], environment)
    assert other.pid != waiting.pid
    other.kill()
    other.wait()
    assert worker.wait(300) == 2
    assert "no-plan.json" in json.loads(error.read_text())["message"]


@pytest.mark.parametrize(
    ("visible", "overrides", "expected"),
    [
        (None, [], 3),
        ("1,2", [], 2),
        ("", ["launch.num_processes=auto"], 1),
        (None, ["launch.num_processes=2"], 2),
        (None, ["launch.num_processes=8", "launch.num_machines=2"], 3),
    ],
)
def test_a_worker_waits_per_gpu_and_ends_unless_it_is_used(
    visible: str | None, overrides: list[str], expected: int, tmp_path: Path, monkeypatch
):
    for name in ("nvidia0", "nvidia1", "nvidia2", "nvidiactl"):
        (tmp_path / name).touch()
    monkeypatch.setattr(import_ahead, "COMMAND", [sys.executable, "-S", "-c", "input()"])
    monkeypatch.setattr(import_ahead, "DEVICES", tmp_path)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    before = set(psutil.Process().children())
    import_ahead.import_ahead(overrides)
    waiting = started(before)
    assert len(waiting) == expected
    other = import_ahead.start_worker([sys.executable, "-c", "raise SystemExit(3)"], os.environ)
    assert other.wait(300) == 3
    import_ahead.end_waiting_workers()
    assert not psutil.wait_procs(waiting, timeout=60)[1]


def test_the_waiting_worker_ends_with_a_launcher_that_is_killed():
    done = subprocess.run([sys.executable, "-c", KILLED], capture_output=True, text=True, timeout=300)
    pid = int(done.stdout)
    if psutil.pid_exists(pid):
        psutil.Process(pid).wait(60)
