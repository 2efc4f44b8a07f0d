"""Shared test setup. Without a GPU the Triton kernels run in Triton's interpreter, which must be chosen
before the first `import triton`; with one they are compiled.

Tests marked `gpu` draw fresh random numbers each time. A failed one shows its seed, and runs again with it by
FLA_TRAIN_TEST_SEED=<seed>.
"""

import os
import secrets

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("WANDB_MODE", "offline")

import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"

import pytest
from triton.runtime import interpreter

from tests.untraced import untraced

interpreter.GridExecutor.__call__ = untraced(interpreter.GridExecutor.__call__)
torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    # Files with slow tests first: `make test` would end with one worker on the last of them, the other idle.
    slow = {item.path for item in items if "slow" in item.keywords}
    items.sort(key=lambda item: item.path not in slow)
    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="needs a CUDA GPU")
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(skip)


@pytest.fixture(autouse=True)
def _seeded(request: pytest.FixtureRequest) -> None:
    seed = 0
    if "gpu" in request.node.keywords:
        seed = int(os.environ.get("FLA_TRAIN_TEST_SEED") or secrets.randbits(32))
        print(f"FLA_TRAIN_TEST_SEED={seed}")
    torch.manual_seed(seed)


@pytest.fixture
def unwatched(monkeypatch: pytest.MonkeyPatch) -> None:
    """Processes that the test starts run without coverage, which slows them; it sees that code elsewhere."""
    for name in ("COVERAGE_PROCESS_CONFIG", "COVERAGE_PROCESS_START"):
        monkeypatch.delenv(name, raising=False)
