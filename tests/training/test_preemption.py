"""Requests to stop save a checkpoint, are never missed, and lose no step."""

import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from test_resume import losses, steps_logged, wait_for, weights
from warm_ranks import TWO_RANKS

from fla_train.run.launch import launch
from fla_train.training.config import TrainConfig
from fla_train.training.preemption import SIGNALS, Preempted, leaving_at_once

Make = Callable[..., TrainConfig]
pytestmark = pytest.mark.usefixtures("unheard")


def without_saves(run: Path) -> list[dict]:
    """Return the records without those of checkpoints, of which a preempted run has one more."""
    return [record for record in losses(run) if len(record) > 2]


@pytest.fixture
def blocked() -> Iterator[None]:
    """Block the signals, as a process inherits it from its parent."""
    previous = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    yield
    signal.pthread_sigmask(signal.SIG_SETMASK, previous)


@pytest.mark.usefixtures("blocked")
@pytest.mark.slow
def test_a_signal_saves_a_checkpoint_and_the_same_command_goes_on(make_config, warm_ranks, whole, tmp_path):
    run = tmp_path / "run"
    config = make_config(*TWO_RANKS, f"run.dir={run}")

    def ask() -> None:
        wait_for(lambda: steps_logged(run) >= 1)
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGUSR1)  # A second request changes nothing.

    asker = threading.Thread(target=ask)
    asker.start()
    try:
        launch(config)
        pytest.fail("the run was over before the signal came, or did not hear it")
    except Preempted:
        asker.join()
    (saved, *others) = reversed(sorted(path.name for path in (run / "checkpoints").iterdir()))
    assert re.fullmatch(r"step-\d+", saved) and not any(name.startswith(".") for name in others)
    assert int(saved.removeprefix("step-")) < 12
    assert "stopped on request" in (run / "train.log").read_text()
    warm_ranks.launch(config)
    assert without_saves(run) == without_saves(whole) and weights(run) == weights(whole)


COMPILE = """
import os, signal
import triton, triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from fla_train.training.preemption import StopRequest

@triton.jit
def kernel(x):
    tl.store(x, tl.load(x) + 1)

request = StopRequest()
triton.compile(ASTSource(kernel, {"x": "*fp32"}), target=GPUTarget("cuda", 90, 32))
assert not request.arrived()  # The trainer asks after each step.
os.kill(os.getpid(), signal.SIGUSR1)
assert request.arrived()
"""


def test_requests_arrive_after_a_compilation(tmp_path: Path):
    """Triton's LLVM replaces the handler of SIGUSR1 when it compiles, which needs no GPU."""
    (tmp_path / "compile.py").write_text(COMPILE)  # Triton reads a kernel's source from its file.
    environment = os.environ | {"TRITON_CACHE_DIR": str(tmp_path), "TRITON_INTERPRET": "0"}
    subprocess.run([sys.executable, tmp_path / "compile.py"], env=environment, check=True, timeout=120)


ASKED_OFTEN = """
import os, signal, sys
from fla_train.training.preemption import Preempted, SIGNALS, StopSignals, leaving_at_once

def ask():
    for number in SIGNALS * 20:
        os.kill(os.getpid(), number)

for number in SIGNALS:
    signal.signal(number, signal.SIG_DFL)
try:
    with leaving_at_once():
        if sys.argv[1] == "launcher":
            ask()
        with StopSignals():
            ask()
except Preempted:
    ask()  # The command has printed nothing yet.
    sys.exit(75)
"""


@pytest.mark.parametrize("during", ["launcher", "workers"])
def test_requests_that_follow_one_another_do_not_change_the_status(during: str):
    done = subprocess.run([sys.executable, "-c", ASKED_OFTEN, during], timeout=60)
    assert done.returncode == 75


def test_a_signal_while_the_data_are_prepared_can_be_tried_again(make_config, tmp_path, monkeypatch):
    def slow(*arguments: object, **options: object) -> None:
        try:
            os.kill(os.getpid(), signal.SIGUSR1)
        except Exception:
            pytest.fail("the request was treated as an error of the data")

    monkeypatch.setattr("fla_train.run.resolve.prepare", slow)
    with pytest.raises(Preempted), leaving_at_once():
        launch(make_config(*TWO_RANKS, f"run.dir={tmp_path / 'run'}"))
    assert signal.getsignal(signal.SIGUSR1) == signal.SIG_IGN
