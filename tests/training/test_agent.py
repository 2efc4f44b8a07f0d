"""The agent restarts, stops and kills workers, which are small scripts here, and counts machines."""

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

import psutil
import pytest

from fla_train.run import agent
from fla_train.run.agent import run_workers
from fla_train.training.config import LaunchConfig
from fla_train.training.failures import TrainingFailed
from fla_train.training.preemption import Preempted
from tests.ranks import free_port

pytestmark = pytest.mark.usefixtures("unheard")
START = "import json, os, shutil, signal, sys, time\nfrom pathlib import Path\nfolder = Path(sys.argv[1])\n"
# The scratch folder disappears in the second attempt, as by a system that cleans up temporary files.
FAIL = """
attempt = len(list(folder.glob('[0-9]*')))
(folder / str(attempt)).touch()
error = Path(os.environ['TORCHELASTIC_ERROR_FILE'])
error.write_text(json.dumps({'message': f'attempt {attempt}'}))
if attempt == 1:
    shutil.rmtree(error.parents[1])
sys.exit(int(sys.argv[2]))
"""
READY = "(folder / f'ready-{os.environ[\"RANK\"]}').touch()\n"
WAIT = "while True: time.sleep(0.05)\n"


def local(processes: int = 1, **options: object) -> LaunchConfig:
    return LaunchConfig(
        device="cpu", num_processes=processes, num_machines=1, main_process_ip="127.0.0.1", **options
    )


def play(
    code: str, folder: Path, launch: LaunchConfig, newest: Callable[[], int] = lambda: 0, status: int = 1
) -> None:
    """Run `code` as workers, whose arguments are `folder` and `status`."""
    with TemporaryDirectory(ignore_cleanup_errors=True) as scratch:
        how = {"newest_step": newest, "run": str(folder / "run"), "scratch": Path(scratch)}
        run_workers(["-c", START + code, str(folder), str(status)], launch, **how)


@contextmanager
def after(folder: Path, ranks: int, action: Callable[[], None]) -> Iterator[None]:
    """Do `action` once all workers are ready, while the block runs. No worker outlives the block."""

    def wait() -> None:
        deadline = time.monotonic() + 60
        while len(list(folder.glob("ready-*"))) < ranks and time.monotonic() < deadline:
            time.sleep(0.02)
        action()

    thread = threading.Thread(target=wait)
    thread.start()
    yield
    thread.join()
    assert not children()


def interrupted_by(*numbers: signal.Signals) -> Callable[[], None]:
    def interrupt() -> None:
        for index, number in enumerate(numbers):
            time.sleep(0.5 if index else 0)
            os.kill(os.getpid(), number)

    return interrupt


def children() -> list[psutil.Process]:
    return [c for c in psutil.Process().children(recursive=True) if "ready-" in " ".join(c.cmdline())]


def test_failures_are_started_again_until_the_restarts_without_a_new_checkpoint_are_used_up(tmp_path, capfd):
    """There is a new checkpoint from the second attempt on."""
    with pytest.raises(TrainingFailed, match="rank 0: attempt 3") as raised:
        play(FAIL, tmp_path, local(max_restarts=2), lambda: min(2, len(list(tmp_path.glob("[0-9]*")))))
    assert not raised.value.final and {path.name for path in tmp_path.iterdir()} == {*"0123"}
    out, error = capfd.readouterr()
    lines = [line.split(maxsplit=1)[1] for line in out.splitlines() if line.startswith("restart")]
    assert lines == [
        "1 of 2, rank 0: attempt 0",
        "1 of 2, rank 0: ended with exit code 1",
        "2 of 2, rank 0: attempt 2",
    ]
    assert not error


def test_an_error_that_would_recur_is_final(tmp_path: Path):
    with pytest.raises(TrainingFailed, match="rank 0: attempt 0") as raised:
        play(FAIL, tmp_path, local(max_restarts=3), status=2)
    assert raised.value.final


def test_a_killed_worker_is_named_and_its_peers_do_not_outlive_it(tmp_path: Path):
    """The peers end by SIGKILL only, like ranks in a collective that waits for the dead one."""
    deaf = "for n in (15, 10, 1, 2): signal.signal(n, signal.SIG_IGN)\n"

    def kill() -> None:
        next(c for c in children() if c.environ()["RANK"] == "1").kill()

    begun = time.monotonic()
    with after(tmp_path, 2, kill), pytest.raises(TrainingFailed, match="rank 1: was killed by SIGKILL"):
        play(deaf + READY + WAIT, tmp_path, local(2))
    assert time.monotonic() - begun < 20


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_request_is_repeated_until_workers_stop_with_a_checkpoint(tmp_path: Path, number: signal.Signals):
    """They act on the second signal only: a compiler had replaced their handlers."""
    stop = (
        "received = []\ndef stop(*_):\n    received.append(1)\n    len(received) < 2 or sys.exit(75)\n"
        "signal.signal(signal.SIGUSR1, stop)\n"
    )
    with after(tmp_path, 2, interrupted_by(number)), pytest.raises(Preempted):
        play(stop + READY + WAIT, tmp_path, local(2, max_restarts=3))


def test_workers_without_handlers_have_nothing_to_save(tmp_path: Path):
    with after(tmp_path, 2, interrupted_by(signal.SIGTERM)), pytest.raises(Preempted):
        play(READY + WAIT, tmp_path, local(2))


@pytest.mark.parametrize(("status", "error"), [(1, Preempted), (2, TrainingFailed)])
def test_a_failure_after_a_request_starts_nothing_again(tmp_path: Path, status: int, error: type):
    """Another start may succeed, unless the failure is final."""
    fail = f"signal.signal(signal.SIGUSR1, lambda *_: sys.exit({status}))\n"
    with after(tmp_path, 1, interrupted_by(signal.SIGTERM)), pytest.raises(error):
        play(fail + READY + WAIT, tmp_path, local(max_restarts=3))


def test_a_second_interrupt_quits_at_once(tmp_path: Path, capfd: pytest.CaptureFixture):
    ignore = "signal.signal(signal.SIGUSR1, signal.SIG_IGN)\n"
    with after(tmp_path, 2, interrupted_by(signal.SIGINT, signal.SIGINT)), pytest.raises(KeyboardInterrupt):
        play(ignore + READY + WAIT, tmp_path, local(2))
    assert "Ctrl-C again" in capfd.readouterr().err


def test_ranks_share_the_cores_that_this_process_may_use(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Batch systems give a part of a machine, and Python counts all of it."""
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(agent, "available_cores", lambda: 6)
    play("(folder / os.environ['RANK']).write_text(os.environ['OMP_NUM_THREADS'])", tmp_path, local(2))
    assert [(tmp_path / rank).read_text() for rank in "01"] == ["3", "3"]


@pytest.mark.parametrize(
    ("rank", "message"), [(None, "1 of 3 machines joined"), (1, "no store answers")], ids=["store", "none"]
)
def test_missing_machines_are_reported(tmp_path, rank, message, monkeypatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")  # allows the loopback address
    monkeypatch.setattr(agent, "RETRY", 0.1)
    address = {"main_process_ip": "127.0.0.1", "main_process_port": free_port()}
    launch = LaunchConfig(
        device="cpu", num_processes=3, num_machines=3, machine_rank=rank, rendezvous_timeout=1, **address
    )
    with pytest.raises(TrainingFailed, match=rf"{message} at 127\.0\.0\.1:\d+ within 1 s"):
        play("", tmp_path, launch)
