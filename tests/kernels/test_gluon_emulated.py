"""The Gluon gradient kernel on the CPU, in place of the Triton one, against the float64 recurrence.

Its own Python is run by `emulated_gluon`, which also checks fences, barriers and phases; that these checks
find what they are for is tested by taking such a line out of the kernel.
"""

from collections.abc import Callable
from pathlib import Path

import pytest

from fla_train.kernels.delta_product import gluon_gradient, triton
from tests.kernels.emulated_gluon import Emulator
from tests.kernels.test_triton import INTERPRETED, Case, _poisoned_memory, check, uniform

KERNEL = Path(gluon_gradient.__file__)
PROGRAMS = 2  # so that a program has several chunks
__all__ = ["_poisoned_memory"]  # a fixture for every test here

pytestmark = pytest.mark.skipif(not INTERPRETED, reason="needs the interpreter for the other kernels")


def run(case: Case, path: Path, *, late: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    emulator = Emulator(late=late)
    module = emulator.load_kernel(path)

    class Kernel:
        def __getitem__(self, grid: tuple[int]) -> Callable[..., None]:
            return lambda **arguments: emulator.launch(module, arguments, grid[0], PROGRAMS)

    monkeypatch.setattr(triton, "gradient_kernel", Kernel())
    check(case, uniform(2e-5), "cpu")


@pytest.mark.parametrize("late", [False, True], ids=["copies at once", "copies late"])
@pytest.mark.parametrize(
    "case",
    [
        Case(tokens=130, heads=2, key_dim=64, value_dim=64),
        Case(tokens=70, sub_steps=3, key_dim=64, value_dim=64),
        Case(tokens=130, gated=False, l2norm=False, key_dim=64, value_dim=64),
        Case(tokens=40, sub_steps=4, gated=False, key_dim=64, value_dim=64),
        Case(tokens=100, sub_steps=2, cu_seqlens=(0, 0, 33, 34, 100), key_dim=64, value_dim=64),
        Case(tokens=1, key_dim=64, value_dim=64),
        Case(tokens=65, sub_steps=2, inputs="resets", key_dim=64, value_dim=64),
        Case(tokens=65, inputs="zero beta", key_dim=64, value_dim=64),
    ],
    ids=str,
)
def test_gradients(case: Case, late: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    run(case, KERNEL, late=late, monkeypatch=monkeypatch)


@pytest.mark.parametrize(
    ("line", "instead", "message"),
    [
        ("        mbarrier.wait(bars.index(2), step & 1)\n", "", "has not come"),
        ("        barrier()  # the states are read\n", "", "threads may still use"),
        (
            "        fence_async_shared()\n        barrier()\n        b_dk = warp",
            "        barrier()\n        b_dk = warp",
            "without fence or barrier",
        ),
        (
            "warpgroup_mma_wait(0, deps=[b_kq, b_kk])",
            "warpgroup_mma_wait(1, deps=[b_kq, b_kk])",
            "on its way",
        ),
        ("barrier()  # the outputs have left", "pass  # the outputs have left", "threads may still use"),
        ("(step >> 1) & 1", "((step >> 1) & 1) ^ 1", "never completes"),
    ],
)
def test_a_kernel_that_could_race_is_caught(
    line: str, instead: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = KERNEL.read_text()
    assert line in text
    changed = tmp_path / "kernel.py"
    changed.write_text(text.replace(line, instead))
    case = Case(tokens=260, key_dim=64, value_dim=64)
    with pytest.raises(AssertionError, match=message):
        run(case, changed, late=False, monkeypatch=monkeypatch)
