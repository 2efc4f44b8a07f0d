"""The Gluon kernels on the CPU, in place of the Triton ones, against the float64 recurrence.

Their own Python is run by `emulated_gluon`, which also checks fences, barriers and phases; that these checks
find what they are for is tested by taking such a line out of a kernel.
"""

from collections.abc import Callable
from pathlib import Path

import pytest

from fla_train.kernels.delta_product import gluon_gradient, gluon_prepare, triton
from tests.kernels.emulated_gluon import Emulator
from tests.kernels.test_triton import INTERPRETED, Case, _poisoned_memory, check, uniform

MODULES = {"gradient": gluon_gradient, "prepare": gluon_prepare}
PROGRAMS = {"gradient": 2, "prepare": 1 << 30}  # of two, each has several chunks; of many, one each
__all__ = ["_poisoned_memory"]  # a fixture for every test here

pytestmark = pytest.mark.skipif(not INTERPRETED, reason="needs the interpreter for the other kernels")


def run(
    name: str, case: Case, *, late: bool, monkeypatch: pytest.MonkeyPatch, path: Path | None = None
) -> None:
    emulator, module = Emulator(late=late), MODULES[name]
    kernel = getattr(emulator.load_kernel(path or Path(module.__file__)), f"{name}_kernel")

    class Kernel:
        def __getitem__(self, grid: tuple[int]) -> Callable[..., None]:
            options = {"n_work": grid[0], "programs": PROGRAMS[name], "warps": module.WARPS}
            return lambda **arguments: emulator.launch(kernel, arguments, **options)

    monkeypatch.setattr(triton, f"{name}_kernel", Kernel())
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
    run("gradient", case, late=late, monkeypatch=monkeypatch)


@pytest.mark.parametrize(
    "case",
    [
        Case(tokens=130, heads=2, key_dim=64, value_dim=64),
        Case(tokens=70, sub_steps=3, key_dim=128, value_dim=64),
        Case(tokens=40, sub_steps=4, gated=False, key_dim=64, value_dim=64),
        Case(tokens=100, sub_steps=2, cu_seqlens=(0, 0, 33, 34, 100), key_dim=128, value_dim=64),
        Case(tokens=1, key_dim=64, value_dim=64),
        Case(tokens=65, sub_steps=2, inputs="resets", key_dim=64, value_dim=64),
        Case(tokens=65, inputs="correlated", key_dim=128, value_dim=64),
    ],
    ids=str,
)
def test_prepared(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    run("prepare", case, late=True, monkeypatch=monkeypatch)


@pytest.mark.parametrize(
    ("name", "line", "instead", "message"),
    [
        ("gradient", "        mbarrier.wait(bars.index(2), step & 1)\n", "", "has not come"),
        ("gradient", "        barrier()  # the states are read\n", "", "threads may still use"),
        (
            "gradient",
            "        fence_async_shared()\n        barrier()\n        b_dk = warp",
            "        barrier()\n        b_dk = warp",
            "without fence or barrier",
        ),
        (
            "gradient",
            "warpgroup_mma_wait(4, deps=[b_kq, b_kk])",
            "warpgroup_mma_wait(5, deps=[b_kq, b_kk])",
            "on its way",
        ),
        (
            "gradient",
            "barrier()  # the outputs have left",
            "pass  # the outputs have left",
            "threads may still use",
        ),
        ("gradient", "(step >> 1) & 1", "((step >> 1) & 1) ^ 1", "never completes"),
        ("prepare", "    mbarrier.wait(bar, 0)\n", "", "has not come"),
        (
            "prepare",
            "        s_x.store(b_y)\n        fence_async_shared()\n",
            "        s_x.store(b_y)\n",
            "without fence or barrier",
        ),
        (
            "prepare",
            "b_w = warpgroup_mma_wait(0, deps=[b_w])\n    barrier()\n    s_rest.store((unit - b_w)",
            "s_rest.store((unit - b_w.value)",
            "changed in a product",
        ),
    ],
)
def test_a_kernel_that_could_race_is_caught(
    name: str, line: str, instead: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = Path(MODULES[name].__file__).read_text()
    assert line in text
    changed = tmp_path / "kernel.py"
    changed.write_text(text.replace(line, instead))
    case = Case(tokens=260, key_dim=64, value_dim=64)
    with pytest.raises(AssertionError, match=message):
        run(name, case, late=False, monkeypatch=monkeypatch, path=changed)
