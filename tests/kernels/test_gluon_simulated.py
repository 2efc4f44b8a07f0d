"""The Gluon kernels' PTX, run on the CPU by `simulated_ptx`, against the float64 recurrence.

The Triton kernels beside them are interpreted, in float32; the tiles that a Gluon kernel reads are rounded to
16 bits first. Its warps run in two orders.
"""

import re
import struct
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from fla_train.kernels.delta_product.triton.chunk_fwd import MIN_LOG2_DECAY
from tests.kernels.compiled_gluon import Compiled, Variant, compile_for_hopper
from tests.kernels.gluon_judge import MODULES, TILED, Launch, judge
from tests.kernels.operator_cases import BF16, BF16_LOOSE, INTERPRETED, Case
from tests.kernels.simulated_ptx import SPACE, Matrix, Program

NARROW = ("dq", "dk", "dv", "p", "x")  # what a kernel writes in 16 bits
DESCRIPTOR = 5  # parameters that one takes: itself, two sizes, two strides
CASES = [
    Case(tokens=130, key_dim=128, value_dim=128, states=False),
    Case(tokens=70, sub_steps=2, cu_seqlens=(0, 0, 33, 34, 70), key_dim=64, value_dim=64),
    Case(tokens=50, sub_steps=3, gated=False, l2norm=False, states=False, key_dim=64, value_dim=64),
]
SIMULATED = [(name, case) for case in CASES for name in MODULES if case.l2norm or name != "prepare"]
# Triton's `prepare`, which wide keys take.
WIDE = [Variant("prepare", 256, steps, packed=False, gated=True, gluon=False) for steps in (1, 2)]
WITHOUT_BARRIERS = ("reverse", Case(tokens=70, key_dim=64, value_dim=64, states=False))

pytestmark = [
    pytest.mark.skipif(not INTERPRETED, reason="needs the interpreter for the other kernels"),
    pytest.mark.usefixtures("poisoned_memory"),
]


def variant(name: str, case: Case) -> Variant:
    return Variant(name, case.key_dim, case.sub_steps, case.cu_seqlens is not None, case.gated, case.heads)


@pytest.fixture(scope="module")
def kernels() -> dict[Variant, Compiled]:
    return compile_for_hopper([*(variant(*simulated) for simulated in [*SIMULATED, WITHOUT_BARRIERS]), *WIDE])


def simulate(name: str, case: Case, ptx: str, order: Sequence[int]) -> Launch:
    """Runs that PTX of a kernel, its warps in that order."""
    module = MODULES[name]
    kernel = getattr(module, f"{name}_kernel")
    constants = {kernel.arg_names[parameter.num] for parameter in kernel.params if parameter.is_constexpr}

    def launch(arguments: dict, programs: int, n_work: int) -> None:
        parameters, buffers, tensors, number = {}, {}, [], 0
        for argument in kernel.arg_names:
            value = {"n_work": n_work, **arguments}.get(argument)
            if value is None or argument in constants:
                continue
            dtype = torch.float16 if argument in ("x", "p") and case.l2norm else torch.bfloat16
            if argument in TILED[name]:
                parameters[number] = tiles(value.to(dtype), whole=argument.endswith("states"))
                number += DESCRIPTOR
                continue
            if isinstance(value, Tensor):
                copy = value.to(dtype) if argument in NARROW else value.clone()
                buffers[number + 1] = memory = copy.view(-1).view(torch.uint8).numpy()
                tensors.append((value, copy, memory, memory.copy()))
                value = number + 1 << SPACE
            parameters[number] = value
            number += 1
        for program in range(programs):
            Program(ptx, module.WARPS, program, programs, parameters, buffers).run(order)
        for value, copy, memory, before in tensors:
            if (memory != before).any():  # autograd notes writes to what it has kept
                value.copy_(copy)

    return launch


def tiles(x: Tensor, *, whole: bool) -> Matrix:
    """For the copy engine: of [..., heads, columns] 64 rows at once, of [..., V, K] a `whole` matrix."""
    matrix = x.flatten(0, -2) if whole else x.flatten(0, -3).flatten(1)
    bits = matrix.contiguous().view(torch.int16).numpy().view("uint16")
    return Matrix(bits, x.shape[-2] if whole else 64)


def run(name: str, case: Case, ptx: str) -> None:
    warps = range(MODULES[name].WARPS)
    launches = [simulate(name, case, ptx, order) for order in (warps, warps[::-1])]
    judge(name, case, launches, BF16 if case.gated else BF16_LOOSE, torch.bfloat16)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "case"), SIMULATED, ids=str)
def test_simulated(name: str, case: Case, kernels: dict[Variant, Compiled]) -> None:
    run(name, case, kernels[variant(name, case)].ptx)


def test_missing_barriers_show(kernels: dict[Variant, Compiled]) -> None:
    ptx = kernels[variant(*WITHOUT_BARRIERS)].ptx
    start = ptx.index("wgmma.mma_async")  # after the copies' barriers have been made
    with pytest.raises(AssertionError):
        run(*WITHOUT_BARRIERS, ptx[:start] + re.sub(r"bar\.sync\s+0;", "", ptx[start:]))


def test_no_literal_is_stored_with_stmatrix(kernels: dict[Variant, Compiled]) -> None:
    # ptxas 13.3 to 13.5 store such registers before they set them.
    for found, compiled in kernels.items():
        literals = set(re.findall(r"mov\.b32\s+(%r\d+), (?:-?\d+|0f\w+);", compiled.ptx))
        stored = re.findall(r"stmatrix[^{]*\{([^}]*)\}", compiled.ptx)
        assert stored or found.name != "prepare"
        assert not literals & {register for four in stored for register in four.split(", ")}, found


def test_gates_that_are_nan_stay_so(kernels: dict[Variant, Compiled]) -> None:
    # A maximum of NaN and a number is the number: of a NaN it would make the least gate there is.
    gated = [compiled.ptx for found, compiled in kernels.items() if found.name == "prepare" and found.gated]
    assert len(gated) > len(WIDE)
    least = f"0f{struct.pack('>f', MIN_LOG2_DECAY.value).hex().upper()}"
    for ptx in gated:
        assert least in ptx and not re.search(rf"max\.f32[^;]*{least}", ptx)
