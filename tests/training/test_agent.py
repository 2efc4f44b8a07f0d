"""The agent: restarts, requests to stop, final errors, missing machines. Workers are small scripts."""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from fla_train.training import agent
from fla_train.training.agent import WorkersFailed, run_workers
from fla_train.training.config import LaunchConfig
from fla_train.training.preemption import SIGNALS, Preempted
from fla_train.utils.scratch import scratch_folder
from tests.ranks import free_port

COUNT = """
import os, sys
from pathlib import Path
from fla_train.training.worker import report
folder = Path(sys.argv[1])
number = len(list(folder.glob('[0-9]*')))
(folder / str(number)).touch()
def fail(kind): sys.exit(report(kind("attempt %d" % number)))
"""
pytestmark = pytest.mark.usefixtures("unheard")
SLEEP = "import os, signal, sys, time\nfrom pathlib import Path\nrank = os.environ['RANK']\n"
READY = "(Path(sys.argv[1]) / f'ready-{rank}').touch()\n"


def local(processes: int = 1, **options: object) -> LaunchConfig:
    return LaunchConfig("cpu", processes, 1, None, "127.0.0.1", **options)


def play(code: str, folder: Path, launch: LaunchConfig, newest: Callable[[], int] = lambda: 0) -> None:
    """Workers run `code`, whose argument is `folder`."""
    with scratch_folder("fla-train-") as scratch:
        how = {"newest_step": newest, "run": str(folder / "run"), "scratch": scratch}
        run_workers(["-c", code, str(folder)], launch, **how)


def after(folder: Path, ranks: int, action: Callable[[], None]) -> threading.Thread:
    """Do `action` once all workers are ready."""

    def wait() -> None:
        deadline = time.monotonic() + 60
        while len(list(folder.glob("ready-*"))) < ranks and time.monotonic() < deadline:
            time.sleep(0.02)
        action()

    thread = threading.Thread(target=wait)
    thread.start()
    return thread


def children() -> list[psutil.Process]:
    return [c for c in psutil.Process().children(recursive=True) if "ready-" in " ".join(c.cmdline())]


def restarts(said: str) -> list[str]:
    return [line.split()[1] for line in said.splitlines() if line.startswith("restart")]


def test_a_failure_is_started_again_as_often_as_asked(tmp_path: Path, capfd: pytest.CaptureFixture):
    with pytest.raises(WorkersFailed, match="rank 0: RuntimeError: attempt 2") as raised:
        play(COUNT + "fail(RuntimeError)", tmp_path, local(max_restarts=2))
    assert not raised.value.final
    out, error = capfd.readouterr()
    assert restarts(out) == ["1", "2"] and "rank 0: RuntimeError: attempt 0" in out
    assert "torch/distributed" not in error.replace("site-packages/torch", "")  # one line is ours
    assert {path.name for path in tmp_path.iterdir()} == {"0", "1", "2"}  # nothing is left beside the run


def test_workers_are_started_again_where_the_temporary_files_were_deleted(tmp_path: Path):
    scratch = "Path(os.environ['TORCHELASTIC_ERROR_FILE']).parents[4]"
    delete = f"assert {scratch}.name.startswith('fla-train-')\nimport shutil; shutil.rmtree({scratch})\n"
    with pytest.raises(WorkersFailed, match="rank 0: ended with exit code 1"):
        play(COUNT + delete + "fail(OSError)", tmp_path, local(max_restarts=1, rendezvous_timeout=5))
    assert {path.name for path in tmp_path.iterdir()} == {"0", "1"}


def test_a_new_checkpoint_forgives_the_failures_before_it(tmp_path: Path, capfd: pytest.CaptureFixture):
    """A checkpoint is new from the second attempt on, and from the fourth."""
    steps = [0, 0, 3, 3, 3, 3]

    def newest() -> int:
        return steps[min(len(list(tmp_path.glob("[0-9]*"))), len(steps) - 1)]

    with pytest.raises(WorkersFailed, match="attempt 3"):
        play(COUNT + "fail(OSError)", tmp_path, local(max_restarts=2), newest)
    assert restarts(capfd.readouterr().out) == ["1", "1", "2"]


def test_without_restarts_progress_starts_nothing_again(tmp_path: Path):
    with pytest.raises(WorkersFailed, match="attempt 0"):
        play(COUNT + "fail(OSError)", tmp_path, local(), lambda: len(list(tmp_path.glob("[0-9]*"))))


def test_an_error_that_would_come_again_is_final(tmp_path: Path):
    with pytest.raises(WorkersFailed, match="rank 0: attempt 0") as raised:
        play(COUNT + "fail(ValueError)", tmp_path, local(max_restarts=3))
    assert raised.value.final


def test_a_killed_worker_is_named_and_its_peers_do_not_outlive_it(tmp_path: Path):
    """They hear no signal but SIGKILL, as in a collective that waits for the dead."""
    deaf = "for n in (15, 10, 1, 2): signal.signal(n, signal.SIG_IGN)\n"
    code = SLEEP + deaf + READY + "time.sleep(600)"

    def kill() -> None:
        next(c for c in children() if c.environ()["RANK"] == "1").kill()

    thread, begun = after(tmp_path, 2, kill), time.monotonic()
    with pytest.raises(WorkersFailed, match="rank 1: was killed by SIGKILL"):
        play(code, tmp_path, local(2))
    thread.join()
    assert not children() and time.monotonic() - begun < 20


@pytest.mark.parametrize("number", [*SIGNALS, signal.SIGINT])
def test_a_request_reaches_workers_which_leave_with_a_checkpoint(tmp_path: Path, number: signal.Signals):
    """They hear it at the second time only: a compiler had their handlers in its hands."""
    code = SLEEP + (
        "heard = []\ndef leave(*_):\n    heard.append(1)\n    len(heard) < 2 or sys.exit(75)\n"
        "signal.signal(signal.SIGUSR1, leave)\n" + READY + "while True: time.sleep(0.05)"
    )
    signal.signal(signal.SIGHUP, lambda *_: None)  # one that is ignored stays so, as under nohup
    thread = after(tmp_path, 2, lambda: os.kill(os.getpid(), number))
    with pytest.raises(Preempted):
        play(code, tmp_path, local(2, max_restarts=3))
    thread.join()
    assert not children()


def test_workers_that_do_not_listen_yet_have_nothing_to_save(tmp_path: Path):
    thread = after(tmp_path, 2, lambda: os.kill(os.getpid(), signal.SIGTERM))
    with pytest.raises(Preempted):
        play(SLEEP + READY + "time.sleep(600)", tmp_path, local(2))
    thread.join()
    assert not children()


@pytest.mark.parametrize("final", [False, True])
def test_who_is_to_leave_does_not_start_again(tmp_path: Path, final: bool):
    """A failure meanwhile may be repaired by another start, or not."""
    end = 2 if final else 1
    code = SLEEP + f"signal.signal(signal.SIGUSR1, lambda *_: sys.exit({end}))\n"
    code += READY + "time.sleep(600)"
    thread = after(tmp_path, 1, lambda: os.kill(os.getpid(), signal.SIGTERM))
    with pytest.raises(WorkersFailed if final else Preempted):
        play(code, tmp_path, local(max_restarts=3))
    thread.join()


def test_a_second_interrupt_quits_at_once(tmp_path: Path, capfd: pytest.CaptureFixture):
    def interrupt() -> None:
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(2)
        os.kill(os.getpid(), signal.SIGINT)

    code = SLEEP + "signal.signal(signal.SIGUSR1, signal.SIG_IGN)\n" + READY + "time.sleep(600)"
    thread = after(tmp_path, 2, interrupt)
    with pytest.raises(KeyboardInterrupt):
        play(code, tmp_path, local(2))
    thread.join()
    assert not children() and "Ctrl-C again" in capfd.readouterr().out


def test_ranks_share_the_cores_that_this_process_may_use(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Batch systems give a part of a machine, and Python counts all of it."""
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(agent, "available_cores", lambda: 6)
    before = dict(os.environ)
    code = SLEEP + "(Path(sys.argv[1]) / rank).write_text(os.environ['OMP_NUM_THREADS'])"
    play(code, tmp_path, local(2))
    assert [(tmp_path / rank).read_text() for rank in "01"] == ["3", "3"]
    assert dict(os.environ) == before


def test_leftovers_of_a_killed_launcher_are_swept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    code = (
        "import sys, tempfile\nfrom fla_train.utils.scratch import scratch_folder\n"
        "with scratch_folder('fla-train-') as f: (f / 'left').touch(); print(f, flush=True); sys.stdin.read()"
    )
    alive, killed = (
        subprocess.Popen(
            [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        for _ in range(2)
    )
    folders = [Path(process.stdout.readline().strip()) for process in (alive, killed)]
    killed.kill()
    killed.wait()
    for folder in folders:
        os.utime(folder, (0, 0))
    third = subprocess.run([sys.executable, "-c", code], input="", capture_output=True, text=True, check=True)
    assert folders[0].is_dir() and not folders[1].exists()
    assert not Path(third.stdout.strip()).exists()
    alive.communicate("")


def several(port: int, rank: int | None, wait: float, machines: int = 2) -> LaunchConfig:
    return LaunchConfig("cpu", machines, machines, rank, "127.0.0.1", port, rendezvous_timeout=wait)


def test_machines_that_do_not_come_are_counted(tmp_path: Path):
    with pytest.raises(WorkersFailed, match=r"1 of 3 machines joined at 127\.0\.0\.1:\d+ within 1 s"):
        play("", tmp_path, several(free_port(), None, 1, machines=3))


def test_a_store_that_nobody_serves_is_named(tmp_path: Path):
    with pytest.raises(WorkersFailed, match=r"no store answers at 127\.0\.0\.1:\d+ within 1 s"):
        play("", tmp_path, several(free_port(), 1, 1))
