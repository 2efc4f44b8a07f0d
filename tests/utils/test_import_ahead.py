"""The worker that imports while the launcher works: it becomes a rank, or ends with the launcher."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from fla_train.utils.import_ahead import COMMAND, CPU_ONLY, importing_workers, start_worker

pytestmark = pytest.mark.usefixtures("unwatched")
# A launcher that is killed while its worker waits.
KILLED = """
import os, signal
from fla_train.utils.import_ahead import importing_workers
from psutil import Process
with importing_workers():
    print(Process().children()[0].pid, flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
"""


@contextmanager
def waiting_worker() -> Iterator[psutil.Process]:
    """Inside `importing_workers` for a CPU, with the process; pytest may have other children."""
    before = set(psutil.Process().children())
    with importing_workers(["launch.device=cpu"]):
        (worker,) = set(psutil.Process().children()) - before
        yield worker


def test_the_waiting_worker_gets_arguments_and_environment(tmp_path: Path):
    """A config that isn't there is what it reports, in the file that only its new environment names."""
    error = tmp_path / "error.json"
    environment = os.environ | {"FLA_TRAIN_LAUNCHER": str(os.getpid()), "OMP_NUM_THREADS": "1"}
    environment |= {"FLA_TRAIN_BEGAN": "0", "TORCHELASTIC_ERROR_FILE": str(error), **CPU_ONLY}
    config = tmp_path / "no-config.yaml"
    with waiting_worker() as waiting:
        worker = start_worker([*COMMAND, str(config), "."], environment)
        assert worker.pid == waiting.pid and os.getsid(worker.pid) == worker.pid
        other = start_worker([*COMMAND, str(config), "."], environment)
        assert other.pid != waiting.pid  # one waits, no more
        other.kill()
        other.wait()
    assert worker.wait(300) != 0  # not ended with the block
    assert str(config) in json.loads(error.read_text())["message"]


def test_a_worker_that_imports_for_another_device_is_not_used():
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": "0", "FLA_TRAIN_LAUNCHER": str(os.getpid())}
    with waiting_worker() as waiting:
        worker = start_worker([*COMMAND, "no-config.yaml", "."], environment)
        assert worker.pid != waiting.pid
        assert not waiting.is_running()
        worker.kill()
        worker.wait()


def test_as_many_workers_wait_as_the_command_names_while_cores_last():
    for cores, expected in ((8, 3), (2, 1)):
        before = set(psutil.Process().children())
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("fla_train.utils.import_ahead.available_cores", lambda cores=cores: cores)
            with importing_workers(["launch.device=cpu", "launch.num_processes=3"]):
                assert len(set(psutil.Process().children()) - before) == expected


def test_a_worker_waits_for_each_gpu_that_is_visible(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    for name in ("nvidia0", "nvidia1", "nvidia2", "nvidiactl"):
        (tmp_path / name).touch()
    monkeypatch.setattr("fla_train.utils.import_ahead.DEVICES", tmp_path)
    monkeypatch.setattr("fla_train.utils.import_ahead.available_cores", lambda: 8)
    for visible, expected in ((None, 3), ("1,2", 2), ("", 1)):
        if visible is None:
            monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        else:
            monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        before = set(psutil.Process().children())
        with importing_workers():
            assert len(set(psutil.Process().children()) - before) == expected


def test_other_commands_are_started_and_the_waiting_worker_ends_with_the_block():
    with waiting_worker() as waiting:
        other = start_worker([sys.executable, "-c", "raise SystemExit(3)"], os.environ)
        assert other.pid != waiting.pid and other.wait(300) == 3
        assert waiting.is_running()
    assert not waiting.is_running()


def test_the_waiting_worker_ends_with_a_launcher_that_is_killed():
    done = subprocess.run([sys.executable, "-c", KILLED], capture_output=True, text=True, timeout=300)
    pid = int(done.stdout)
    if psutil.pid_exists(pid):
        psutil.Process(pid).wait(60)
