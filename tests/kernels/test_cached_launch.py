"""`run_kernel` compiles once per variant that Triton would compile, and launches other calls directly."""

from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch
import triton

from fla_train.kernels.cached_launch import run_kernel

NUMBERS = torch.zeros(64)
BF16 = NUMBERS.bfloat16()
ARGUMENTS = {
    "x": NUMBERS, "y": None, "n": 48, "scale": 0.5, "H": 4,
    "matrix": SimpleNamespace(base=BF16, block_shape=[64, 128]), "num_warps": 4,
}  # fmt: skip


class Kernel(triton.JITFunction):
    """Record compilations, and the arguments of direct launches."""

    __hash__ = object.__hash__

    def __init__(self) -> None:
        self.arg_names = [name for name in ARGUMENTS if name != "num_warps"]
        self.params = [SimpleNamespace(name=name, is_constexpr=name == "H") for name in self.arg_names]
        self.compiled, self.launched = 0, []

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., dict]:
        def compile_and_launch(**_: object) -> dict:
            self.compiled += 1
            return {(*grid, 1, 1)[:3]: lambda *arguments: self.launched.append(arguments)}

        return compile_and_launch


@pytest.mark.parametrize(
    ("compilations", "change"),
    [
        *((1, change) for change in ({"x": torch.ones(16)}, {"n": 16}, {"scale": 1.0})),
        (1, {"matrix": SimpleNamespace(base=BF16[16:], block_shape=[64, 128])}),
        *((2, {"x": x}) for x in (NUMBERS[1:], NUMBERS.half(), None)),
        *((2, {"n": n}) for n in (47, 1, 2**31)),
        *((2, change) for change in ({"y": NUMBERS}, {"H": 8}, {"num_warps": 8}, {"maxnreg": 128})),
        (2, {"matrix": SimpleNamespace(base=NUMBERS.half(), block_shape=[64, 128])}),
        (2, {"matrix": SimpleNamespace(base=BF16, block_shape=[64, 64])}),
    ],
    ids=str,
)
def test_variants(monkeypatch: pytest.MonkeyPatch, compilations: int, change: dict) -> None:
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    kernel, changed = Kernel(), ARGUMENTS | change
    run_kernel(kernel, (7,), **ARGUMENTS)
    for _ in range(2):
        run_kernel(kernel, (7,), **dict(reversed(changed.items())))
    assert kernel.compiled == compilations
    assert len(kernel.launched) == 3 - compilations
    assert all(x is changed[name] for name, x in zip(kernel.arg_names, kernel.launched[-1], strict=True))
