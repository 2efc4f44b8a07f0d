"""The Gluon kernels' PTX, run on the CPU by `simulated_ptx`, against the float64 recurrence.

The Triton kernels beside them are interpreted, in float32; the tiles that a Gluon kernel reads are rounded to
16 bits first. Its warps run in two orders.
"""

import re
from collections.abc import Callable
from functools import cache, partial
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from fla_train.kernels.delta_product import gluon_gradient, gluon_prepare, gluon_reverse, triton
from tests.kernels.simulated_ptx import SPACE, Matrix, Program
from tests.kernels.test_gluon import compiled
from tests.kernels.test_triton import (
    BF16,
    BF16_LOOSE,
    INTERPRETED,
    Case,
    _poisoned_memory,
    make_inputs,
    results,
)

MODULES = {"gradient": gluon_gradient, "prepare": gluon_prepare, "reverse": gluon_reverse}
TILED = {
    "prepare": ("q", "k"),
    "gradient": ("q", "k", "do", "dv", "errors", "states", "dstates"),
    "reverse": (*gluon_reverse.ROW_TILES, *gluon_reverse.STATE_TILES),
}
NARROW = ("dq", "dk", "dv", "p", "x")  # what a kernel writes in 16 bits
compiled = cache(compiled)
__all__ = ["_poisoned_memory"]  # a fixture for every test here

pytestmark = pytest.mark.skipif(not INTERPRETED, reason="needs the interpreter for the other kernels")


def simulate(name: str, case: Case, order: list[int], arguments: dict, programs: int, n_work: int) -> None:
    """Run a kernel of Gluon on what the Triton one gets."""
    packed, gated = int(bool(arguments["PACKED"])), int(case.gated)
    ptx = compiled(name, case.key_dim, case.sub_steps, packed, gated, case.heads)[2]
    parameters, buffers, written, number = {}, {}, [], 0
    kernel = getattr(MODULES[name], f"{name}_kernel")
    constants = {kernel.arg_names[i] for i in (p.num for p in kernel.params if p.is_constexpr)}
    for argument in kernel.arg_names:
        value = {"n_work": n_work, **arguments}.get(argument)
        if value is None or argument in constants:
            continue
        dtype = torch.float16 if argument == "x" and case.l2norm else torch.bfloat16
        if argument in TILED[name]:
            matrix = value.flatten(0, -2) if argument.endswith("states") else value.flatten(0, -3).flatten(1)
            bits = matrix.to(dtype).contiguous().view(torch.int16).numpy().view("uint16")
            parameters[number] = Matrix(bits, value.shape[-2] if argument.endswith("states") else 64)
            number += 5  # the descriptor, its shape and its strides
            continue
        if isinstance(value, Tensor):
            copy = value.to(dtype).clone() if argument in NARROW else value.clone()
            written.append((value, copy))
            buffers[number + 1] = copy.view(-1).view(torch.uint8).numpy()
            value = number + 1 << SPACE
        parameters[number] = value
        number += 1
    for program in range(programs):
        Program(ptx, MODULES[name].WARPS, program, programs, parameters, buffers).run(order)
    for value, copy in written:
        value.copy_(copy)


def replace_kernel(
    name: str, launch: Callable[[dict, int, int], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Have the Triton backend call `launch` with a kernel's arguments, programs, and chunks x heads."""

    class Kernel:
        def __getitem__(self, grid: tuple[int]) -> Callable[..., None]:
            # Of two programs of `gradient`, each has several chunks.
            return lambda **arguments: launch(arguments, 2 if name == "gradient" else grid[0], grid[0])

    if name == "reverse":
        whole = SimpleNamespace(fits=lambda *_: True, launch=lambda *given: launch(*given, 0))
        monkeypatch.setattr(triton, "_hopper", lambda _, other: whole if other == "gluon_reverse" else None)
    else:
        monkeypatch.setattr(triton, f"{name}_kernel", Kernel())


def run(name: str, case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    inputs, *gradients = make_inputs(case, "cpu")
    inputs = [x.bfloat16().float() for x in inputs[:3]] + inputs[3:]
    gradients = [gradients[0].bfloat16().float(), *gradients[1:]]
    expected = results(case, inputs, *gradients, backend="recurrent", dtype=torch.float64)
    warps = list(range(MODULES[name].WARPS))
    found = []
    for order in (warps, warps[::-1]):
        with monkeypatch.context() as patch:
            replace_kernel(name, partial(simulate, name, case, order), patch)
            found.append(results(case, inputs, *gradients, backend="triton"))
    bounds = BF16 if case.gated else BF16_LOOSE
    for key, reference in expected.items():
        assert torch.equal(found[0][key], found[1][key]), f"{key} depends on the order of the warps"
        error = (found[0][key].double() - reference).norm() / reference.norm().clamp_min(1e-6)
        assert error <= bounds[key], f"{key}: relative error {error:.1e} > {bounds[key]:.1e}"


@pytest.mark.parametrize("name", ["reverse", "gradient", "prepare"])
@pytest.mark.parametrize(
    "case",
    [
        Case(tokens=130, key_dim=128, value_dim=128, states=False),
        Case(tokens=70, sub_steps=2, cu_seqlens=(0, 0, 33, 34, 70), key_dim=64, value_dim=64),
        Case(tokens=50, sub_steps=3, gated=False, l2norm=False, states=False, key_dim=64, value_dim=64),
    ],
    ids=str,
)
def test_simulated(name: str, case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    if name == "prepare" and not case.l2norm:
        pytest.skip("prepare in Gluon normalises")
    run(name, case, monkeypatch)


def test_missing_barriers_show(monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case(tokens=70, key_dim=64, value_dim=64, states=False)

    present = compiled

    def without(*arguments: object) -> tuple[int, int, str]:
        shared, products, ptx = present(*arguments)
        start = ptx.index("wgmma.mma_async")  # after the copies' barriers have been made
        return shared, products, ptx[:start] + re.sub(r"bar\.sync\s+0;", "", ptx[start:])

    monkeypatch.setitem(globals(), "compiled", without)
    with pytest.raises(AssertionError):
        run("reverse", case, monkeypatch)
