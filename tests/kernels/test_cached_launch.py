"""Kernels are compiled where Triton would compile one more variant, and else launched as they are."""

from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch
import triton

from fla_train.kernels.cached_launch import run_kernel

NUMBERS = torch.zeros(64)
DESCRIBED = SimpleNamespace(base=NUMBERS.bfloat16(), block_shape=[64, 128])
ARGUMENTS = {"x": NUMBERS, "y": None, "n": 48, "scale": 0.5, "H": 4, "matrix": DESCRIBED}


class Kernel(triton.JITFunction):
    """Notes what it compiles, and what is launched without."""

    __hash__ = object.__hash__

    def __init__(self) -> None:
        self.arg_names = list(ARGUMENTS)
        self.params = [SimpleNamespace(name=name, is_constexpr=name == "H") for name in ARGUMENTS]
        self.compiled, self.launched = [], []

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., dict]:
        def compile_and_launch(**arguments: object) -> dict:
            self.compiled.append(arguments)
            return {(*grid, 1, 1)[:3]: lambda *found: self.launched.append((found, arguments))}

        return compile_and_launch


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> Kernel:
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    kernel = Kernel()
    run_kernel(kernel, (7,), **ARGUMENTS, num_warps=4)
    assert kernel.compiled == [{**ARGUMENTS, "num_warps": 4}] and not kernel.launched
    return kernel


@pytest.mark.parametrize(
    "change",
    [
        {"x": torch.ones(16)},
        {"n": 16},
        {"scale": 1.0},
        {"matrix": SimpleNamespace(base=DESCRIBED.base[16:], block_shape=[64, 128])},
        {},
    ],
    ids=str,
)
def test_the_same_variant(kernel: Kernel, change: dict) -> None:
    given = ARGUMENTS | change
    run_kernel(kernel, (7,), num_warps=4, **dict(reversed(given.items())))
    assert len(kernel.compiled) == 1
    ((found, _),) = kernel.launched
    assert all(x is y for x, y in zip(found, given.values(), strict=True))


@pytest.mark.parametrize(
    "change",
    [
        {"x": NUMBERS[1:]},
        {"x": NUMBERS.half()},
        {"x": None},
        {"y": NUMBERS},
        {"n": 47},
        {"n": 1},
        {"n": 2**31},
        {"H": 8},
        {"matrix": SimpleNamespace(base=NUMBERS.half(), block_shape=[64, 128])},
        {"matrix": SimpleNamespace(base=DESCRIBED.base, block_shape=[64, 64])},
        {"num_warps": 8},
        {"maxnreg": 128},
    ],
    ids=str,
)
def test_another_variant(kernel: Kernel, change: dict) -> None:
    given = {name: change.pop(name, x) for name, x in ARGUMENTS.items()}
    for _ in range(2):
        run_kernel(kernel, (7,), **given, **{"num_warps": 4} | change)
    assert len(kernel.compiled) == 2
    ((_, compiled),) = kernel.launched
    assert compiled is kernel.compiled[1]
