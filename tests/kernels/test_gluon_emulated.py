"""The Gluon kernels on the CPU, in place of the Triton ones, against the float64 recurrence.

Their own Python is run by `emulated_gluon`, which also checks fences, barriers and phases; that these checks
find what they are for is tested by taking such a line out of a kernel.
"""

from copy import deepcopy
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.kernels.emulated_gluon import Emulator
from tests.kernels.gluon_judge import MODULES, TILED, Launch, judge, replaced
from tests.kernels.operator_cases import INTERPRETED, Case, backward, forward, make_inputs, uniform

pytestmark = [
    pytest.mark.skipif(not INTERPRETED, reason="needs the interpreter for the other kernels"),
    pytest.mark.usefixtures("poisoned_memory"),
]


def emulate(name: str, *, late: bool, path: Path | None = None) -> Launch:
    """Runs the kernel of that name, or the changed one in `path`, with copies that arrive at once or late."""
    emulator, module = Emulator(late=late), MODULES[name]
    kernel = getattr(emulator.load_kernel(path or Path(module.__file__)), f"chunk_{name}_kernel")

    def launch(arguments: dict, programs: int, n_work: int) -> None:
        slices = getattr(module, "SLICES", {})
        emulator.launch(kernel, arguments, n_work, programs, module.WARPS, TILED[name], slices)

    return launch


def emulate_both_ways(name: str) -> Launch:
    """As `emulate`, with copies that arrive at once and, on tensors of their own, late: to the same bits."""
    at_once, late = (emulate(name, late=late) for late in (False, True))

    def launch(arguments: dict, programs: int, n_work: int) -> None:
        # One call of `deepcopy`, for tensors that share memory
        copies = deepcopy({key: x.detach() if isinstance(x, Tensor) else x for key, x in arguments.items()})
        at_once(arguments, programs, n_work)
        late(copies, programs, n_work)
        for key, x in arguments.items():
            if isinstance(x, Tensor):
                same = torch.allclose(x, copies[key], rtol=0, atol=0, equal_nan=True)
                assert same, f"{key} depends on when copies arrive"

    return launch


def run(name: str, case: Case, **kwargs: int) -> None:
    judge(name, case, emulate_both_ways(name), uniform(2e-5), **kwargs)


def narrow(**changes: object) -> Case:
    return Case(**{"key_dim": 64, "value_dim": 64, **changes})


def widened(case: Case) -> Case:
    return replace(case, key_dim=256, value_dim=256)


DOCUMENTS = narrow(tokens=100, num_householder=2, cu_seqlens=(0, 0, 33, 34, 100, 100))
CASES = [
    narrow(tokens=130, heads=2, batch=2),
    narrow(tokens=70, num_householder=3),
    narrow(tokens=40, num_householder=4, gated=False),
    narrow(tokens=1),
    narrow(tokens=65, num_householder=2, inputs="resets"),
    narrow(tokens=70, num_householder=2, heads=4, group=2),
]
OF_GRADIENTS = [
    narrow(tokens=130, gated=False, l2norm=False),
    DOCUMENTS,
    narrow(tokens=65, inputs="zero beta"),
    narrow(tokens=65, inputs="correlated"),
    narrow(tokens=65, inputs="repeated", gated=False),
    narrow(tokens=65, inputs="ones", gated=False, scale=1.0),
]
FURTHER = {
    "bwd_qkg": OF_GRADIENTS,
    "prepare_wy": [
        narrow(tokens=70, num_householder=3, key_dim=128),
        narrow(tokens=100, num_householder=2, cu_seqlens=(0, 0, 33, 34, 100), key_dim=128),
        narrow(tokens=65, inputs="correlated", key_dim=128),
        narrow(tokens=65, inputs="no writes", scale=1e10),
        narrow(tokens=40, heads=2, group=2, key_dim=96),
    ],
    "bwd_fused": [
        *OF_GRADIENTS,
        narrow(tokens=70, num_householder=2, states=False, key_dim=128, value_dim=128),
        narrow(tokens=30, num_householder=7, l2norm=False),
        narrow(tokens=200, cu_seqlens=(0, 1, 130, 200), gated=False),
        narrow(tokens=70, value_dim=128),
        narrow(tokens=70, key_dim=128),
        narrow(tokens=40, num_householder=2, heads=2, group=2, key_dim=128, value_dim=256),
        narrow(tokens=40, num_householder=2, heads=2, key_dim=96, value_dim=192),
        narrow(tokens=70, cu_seqlens=(0, 30, 70), key_dim=80, value_dim=144, l2norm=False),
    ],
}
IN_TWO_LAUNCHES = [
    narrow(tokens=130, heads=2, batch=2, value_dim=144),
    narrow(tokens=70, cu_seqlens=(0, 30, 30, 70), heads=2, key_dim=96, value_dim=192),
    narrow(tokens=40, num_householder=2, heads=2, key_dim=128, value_dim=256, gated=False),
]


@pytest.mark.parametrize(
    ("name", "case"),
    [(name, case) for name, more in FURTHER.items() for case in CASES + more]
    + [("bwd_qkg_wide", widened(case)) for case in CASES + OF_GRADIENTS],
    ids=str,
)
def test_a_kernel(name: str, case: Case) -> None:
    run(name, case)


@pytest.mark.parametrize(
    ("case", "chunks"),
    [
        (CASES[0], 1),
        (narrow(tokens=90, num_householder=3, gated=False, states=False), 2),
        (DOCUMENTS, 1),
        (narrow(tokens=160, inputs="fast decay"), 1),
        (narrow(tokens=130, heads=2, group=2, value_dim=144), 1),
    ],
    ids=str,
)
def test_fused_backward_of_segments(case: Case, chunks: int) -> None:
    run("bwd_fused", case, chunks=chunks)


@pytest.mark.parametrize("case", IN_TWO_LAUNCHES, ids=str)
def test_fused_backward_in_two_launches(case: Case) -> None:
    run("bwd_fused", case, launches=2)


@pytest.mark.parametrize(
    ("name", "line", "instead", "message"),
    [
        ("bwd_qkg", "        mbarrier.wait(bars.index(2), step & 1)\n", "", "has not come"),
        (
            "bwd_qkg",
            "        fence_async_shared()\n        barrier()\n        b_dk = warp",
            "        barrier()\n        b_dk = warp",
            "without fence or barrier",
        ),
        ("bwd_qkg", "(step >> 1) & 1", "((step >> 1) & 1) ^ 1", "never completes"),
        (
            "prepare_wy",
            "b_w = warpgroup_mma_wait(0, deps=[b_w])\n    barrier()\n    s_rest.store((unit - b_w)",
            "s_rest.store((unit - b_w.value)",
            "changed in a product",
        ),
        ("bwd_fused", "barrier()  # du, dO, dS', T and P are read", "pass", "may still read"),
        ("bwd_fused", "barrier()  # q and k are read", "pass", "threads may still use"),
        ("bwd_qkg_wide", "barrier()  # this part of dS' is read", "pass", "may still use"),
        ("bwd_qkg_wide", "count // SLOTS & 1", "(count // SLOTS & 1) ^ 1", "never completes"),
        ("bwd_qkg_wide", "barrier()  # u, dV and dO are read", "pass", "may still use"),
        ("bwd_qkg_wide", "barrier()  # the outputs have left the place of k and q", "pass", "may still use"),
        (
            "bwd_qkg_wide",
            "copy_first(u, m_u, bars.index(FIRST), r_m, f_h, pred)\n        barrier()\n",
            "copy_first(u, m_u, bars.index(FIRST), r_m, f_h, pred)\n",
            "without a barrier",
        ),
        (
            "bwd_fused",
            "b_da = warpgroup_mma_wait(OF_V + OF_K + 4, deps=[b_da])",
            "b_da = warpgroup_mma_wait(OF_V + OF_K + 5, deps=[b_da])",
            "on its way",
        ),
        (  # wrong only where a sum takes two products
            "bwd_fused",
            "b_dp = warpgroup_mma_wait(2 * OF_V + 1 + OF_K, deps=[b_dp])",
            "b_dp = warpgroup_mma_wait(2 * OF_V + 2 * OF_K, deps=[b_dp])",
            "on its way",
        ),
        (
            "bwd_fused",
            "        i_t, n_t, g_last, b_peak = f_t, f_n, scalars[5], f_peak\n",
            "        i_t, n_t, g_last, b_peak = f_t, f_n, scalars[5], f_peak\n"
            "    copy_rows(q, s_q, bar_q, 0, 0, True, TILE_BYTES)\n",
            "nobody waits for",
        ),
    ],
)
def test_a_kernel_that_could_race_is_caught(
    name: str, line: str, instead: str, message: str, tmp_path: Path
) -> None:
    text = Path(MODULES[name].__file__).read_text()
    assert line in text
    changed = tmp_path / "kernel.py"
    changed.write_text(text.replace(line, instead))
    case = narrow(tokens=260)
    if name == "bwd_qkg_wide":
        case = widened(case)
    elif "OF_K" in line:
        case = replace(case, key_dim=96, value_dim=192)
    with pytest.raises(AssertionError, match=message):
        judge(name, case, emulate(name, late=False, path=changed), uniform(2e-5))


@pytest.mark.parametrize(
    "case",
    [
        narrow(tokens=130),
        narrow(tokens=70, num_householder=3),
        DOCUMENTS,
    ],  # in the second, row 64 is of the next chunk
    ids=str,
)
def test_gradients_of_v_take_the_place_of_u_that_nobody_needs_again(case: Case) -> None:
    inputs, *gradients = make_inputs(case, "cpu")
    with replaced("bwd_fused", emulate("bwd_fused", late=True)):
        outputs, leaves = forward(case, inputs, backend="triton")
        node = outputs["o"].grad_fn
        while not hasattr(node, "saved_tensors"):
            node = node.next_functions[0][0]
        places = {x.data_ptr() for x in node.saved_tensors if x is not None}
        first, again = (backward(outputs, leaves, *gradients) for _ in range(2))
        last = backward(outputs, leaves, *gradients, retain_graph=False)
    for name, x in last.items():
        assert torch.equal(x, first[name]) and torch.equal(x, again[name])
        assert (x.data_ptr() in places) == (name == "dv")
        assert first[name].data_ptr() not in places
