"""Shared test setup. Without a GPU the Triton kernels run in Triton's interpreter, which must be chosen
before the first `import triton`; with one they are compiled.

Tests marked `gpu` draw fresh random numbers each time. A failed one shows its seed, and runs again with it by
FLA_TRAIN_TEST_SEED=<seed>.
"""

import atexit
import gc
import os
import secrets
import shutil
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("WANDB_MODE", "offline")
if "FLA_TRAIN_CACHE" not in os.environ:  # the workers of pytest-xdist inherit it, and share what is prepared
    os.environ["FLA_TRAIN_CACHE"] = tempfile.mkdtemp(prefix="fla-train-tests-")
    atexit.register(shutil.rmtree, os.environ["FLA_TRAIN_CACHE"], ignore_errors=True)

# Commands that ran in this process keep their children from importing from the current folder.
os.environ["PYTHONPATH"] = os.pathsep.join(
    [str(Path(__file__).parents[1]), *filter(None, [os.environ.get("PYTHONPATH")])]
)

import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"

import pytest
import yaml

from tests import interpreter, light_hydra

gc.disable()  # While tests are collected: imports make half a million objects, of which few become garbage.
interpreter.speed_up()
light_hydra.speed_up()
# Hydra reads twenty files for a config, with this class.
yaml.SafeLoader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))

# These tests share ranks, whose imports take longer than most of the tests.
SHARING = "tests/training/"


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Schedule as `--dist loadfile` does, but run the tests that share ranks in one worker."""
    from xdist.scheduler import LoadFileScheduling

    class ByFile(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return SHARING if nodeid.startswith(SHARING) else super()._split_scope(nodeid)

    return ByFile(config, log) if config.getoption("dist") == "loadfile" else None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    # Slow tests come first, so that no worker is idle while another one runs the last of them.
    slow = {item.path for item in items if any(map(item.get_closest_marker, ("slow", "long")))}
    items.sort(key=lambda item: (not item.nodeid.startswith(SHARING), item.path not in slow))
    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="needs a CUDA GPU")
    for item in items:
        # `item.keywords` would include the name of the checkout's folder.
        if item.get_closest_marker("gpu"):
            item.add_marker(skip)


def pytest_collection_finish() -> None:
    gc.freeze()
    gc.set_threshold(10_000, 20, 100)
    gc.enable()


@pytest.fixture(autouse=True)
def _seeded(request: pytest.FixtureRequest) -> Iterator[None]:
    seed, on_gpu = 0, request.node.get_closest_marker("gpu") is not None
    if on_gpu:
        seed = int(os.environ.get("FLA_TRAIN_TEST_SEED") or secrets.randbits(32))
        print(f"FLA_TRAIN_TEST_SEED={seed}")
    torch.manual_seed(seed)
    yield
    if on_gpu:
        # Tests in other processes need the memory.
        torch.cuda.empty_cache()


@pytest.fixture
def run_command(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture
) -> Callable[..., tuple[int, str, str]]:
    """Return a function that runs a command in this process and returns its exit status, stdout and stderr.

    Call it as `run_command("fla-train", word, ...)`.
    """
    monkeypatch.delenv("FLA_TRAIN_TRACEBACK", raising=False)

    def run(name: str, *words: str) -> tuple[int, str, str]:
        module, code = import_module(f"fla_train.cli.{name.removeprefix('fla-')}"), 0
        monkeypatch.setattr(sys, "argv", [name, *words])
        if name == "fla-train":  # Workers that import ahead would cost seconds each.
            monkeypatch.setattr(module, "import_ahead", lambda _: None)
        capfd.readouterr()  # what the test wrote before
        try:
            module.main()
        except SystemExit as end:
            code = end.code or 0
        return code, *capfd.readouterr()

    return run


@pytest.fixture
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Return the working directory: a folder outside the repository with a copy of docs/examples."""
    folder = shutil.copytree(Path(__file__).parents[1] / "docs/examples", tmp_path / "elsewhere")
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield folder
    for file in folder.glob("*.py"):
        sys.modules.pop(file.stem, None)


@pytest.fixture
def unwatched(monkeypatch: pytest.MonkeyPatch) -> None:
    """Run processes that the test starts without coverage, which slows them and sees their code elsewhere."""
    for name in ("COVERAGE_PROCESS_CONFIG", "COVERAGE_PROCESS_START"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def fresh_compiler() -> Iterator[None]:
    """Reset torch.compile before and after the test."""
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.fixture
def launch_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Return an empty folder for the user's launch table, with empty caches."""
    from fla_train.kernels.delta_product.select import clear_caches

    monkeypatch.setenv("FLA_TRAIN_CACHE", str(tmp_path))
    clear_caches()
    yield tmp_path
    clear_caches()


@pytest.fixture
def unheard() -> Iterator[None]:
    """Ignore signals that arrive after the process that waited for them has ended."""
    from fla_train.training.preemption import SIGNALS

    previous = {number: signal.signal(number, signal.SIG_IGN) for number in SIGNALS}
    yield
    for number, handler in previous.items():
        signal.signal(number, handler)
