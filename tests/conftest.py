"""Shared test setup. Without a GPU the Triton kernels run in Triton's interpreter, which must be chosen
before the first `import triton`; with one they are compiled.

Tests marked `gpu` draw fresh random numbers each time. A failed one shows its seed, and runs again with it by
FLA_TRAIN_TEST_SEED=<seed>.
"""

import atexit
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

from tests.startup import sitecustomize

# Processes that the tests start import it, too.
os.environ["PYTHONPATH"] = os.pathsep.join(
    # and the root: commands that ran in this process keep their children from the current folder.
    [
        str(Path(sitecustomize.__file__).parent),
        str(Path(__file__).parents[1]),
        *filter(None, [os.environ.get("PYTHONPATH")]),
    ]
)

import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"

import pytest
import yaml
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from triton.runtime import interpreter

from tests.interpreter import speed_up
from tests.untraced import untraced

speed_up()
# Hydra reads twenty files for a config, with this class.
yaml.SafeLoader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
interpreter.GridExecutor.__call__ = untraced(interpreter.GridExecutor.__call__)
ConfigLoaderImpl.load_configuration = untraced(ConfigLoaderImpl.load_configuration)
torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))

if not (Path(__file__).parent.parent / "docs" / "reports").is_dir():  # in an sdist
    collect_ignore = ["test_docs.py", "training/test_plan.py"]

SHARING = "tests/training/"  # its tests share ranks, whose imports cost more than most of them


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """As `--dist loadfile`, but the tests that share ranks are done by one worker."""
    from xdist.scheduler import LoadFileScheduling

    class ByFile(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return SHARING if nodeid.startswith(SHARING) else super()._split_scope(nodeid)

    return ByFile(config, log) if config.getoption("dist") == "loadfile" else None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    # What takes long comes first: `make test` would end with one worker on the last of it, the other idle.
    slow = {item.path for item in items if any(map(item.get_closest_marker, ("slow", "long")))}
    items.sort(key=lambda item: (not item.nodeid.startswith(SHARING), item.path not in slow))
    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="needs a CUDA GPU")
    for item in items:
        if item.get_closest_marker("gpu"):  # keywords would include the name of the checkout's folder
            item.add_marker(skip)


@pytest.fixture(autouse=True)
def _seeded(request: pytest.FixtureRequest) -> Iterator[None]:
    seed, on_gpu = 0, request.node.get_closest_marker("gpu") is not None
    if on_gpu:
        seed = int(os.environ.get("FLA_TRAIN_TEST_SEED") or secrets.randbits(32))
        print(f"FLA_TRAIN_TEST_SEED={seed}")
    torch.manual_seed(seed)
    yield
    if on_gpu:
        torch.cuda.empty_cache()  # the tests of other processes need it


@pytest.fixture
def run_command(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture
) -> Callable[..., tuple[int, str, str]]:
    """`run_command("fla-train", word, ...)` in this process: the exit status, stdout and stderr."""
    monkeypatch.delenv("FLA_TRAIN_TRACEBACK", raising=False)

    def run(name: str, *words: str) -> tuple[int, str, str]:
        module, code = import_module(f"fla_train.cli.{name.removeprefix('fla-')}"), 0
        monkeypatch.setattr(sys, "argv", [name, *words])
        try:
            module.main()
        except SystemExit as end:
            code = end.code or 0
        return code, *capfd.readouterr()

    return run


@pytest.fixture
def unwatched(monkeypatch: pytest.MonkeyPatch) -> None:
    """Processes that the test starts run without coverage, which slows them; it sees that code elsewhere."""
    for name in ("COVERAGE_PROCESS_CONFIG", "COVERAGE_PROCESS_START"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def fresh_compiler() -> Iterator[None]:
    """torch.compile remembers nothing of other tests, nor these of it."""
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.fixture
def launch_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty folder for the user's launch table, and nothing remembered of another one."""
    from fla_train.kernels.delta_product.select import clear_caches

    monkeypatch.setenv("FLA_TRAIN_CACHE", str(tmp_path))
    clear_caches()
    yield tmp_path
    clear_caches()


@pytest.fixture
def unheard() -> Iterator[None]:
    """A signal for which nobody waits any more does not end the tests."""
    from fla_train.training.preemption import SIGNALS

    previous = {number: signal.signal(number, signal.SIG_IGN) for number in SIGNALS}
    yield
    for number, handler in previous.items():
        signal.signal(number, handler)
