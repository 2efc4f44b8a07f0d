"""Narrow heads in float32, walked step by step, against the float64 recurrence: interpreted and on a GPU."""

import pytest
import torch

from fla_train.kernels.delta_product import delta_product
from fla_train.kernels.delta_product.triton import fused_recurrent
from tests.kernels.operator_cases import GATED, INTERPRETED, UNGATED, Case, check, make_inputs, uniform

pytestmark = pytest.mark.usefixtures("poisoned_memory")
DEVICE = "cpu" if INTERPRETED else "cuda"
EXACT = uniform(2e-6)  # no product is cut to fewer bits than float32 has
CASES = [
    Case(tokens=33, heads=2, batch=2),
    Case(tokens=17, sub_steps=2, gated=UNGATED, l2norm=False),
    Case(tokens=9, sub_steps=3, key_dim=24, value_dim=20),
    Case(tokens=9, sub_steps=4, batch=2, states=False, key_dim=32, value_dim=32),
    Case(tokens=21, sub_steps=2, cu_seqlens=(0, 0, 9, 10, 21)),
    Case(tokens=13, gated=UNGATED, cu_seqlens=(0, 3, 13, 13), l2norm=False),
    # Many heads: the one sum that a single dbeta or dg is may all but vanish, and its relative error be any.
    Case(tokens=1, scale=1.0, value_dim=5, batch=4, heads=8),
    Case(tokens=20, inputs="correlated", key_dim=32),
    Case(tokens=20, inputs="repeated"),
    Case(tokens=12, inputs="zero beta"),
    Case(tokens=20, inputs="resets", sub_steps=2),
]


def is_walked(case: Case) -> bool:
    q = torch.empty(case.batch, case.tokens, case.heads, case.key_dim, dtype=case.dtype)
    k = q.new_empty(case.batch, case.tokens, case.sub_steps, case.heads, case.key_dim)
    return fused_recurrent.suits(q, k, k.new_empty(*k.shape[:-1], case.value_dim))


@pytest.mark.skipif(not INTERPRETED, reason="the GPU tests cover these")
@pytest.mark.parametrize("case", CASES, ids=str)
def test_interpreted(case: Case) -> None:
    assert is_walked(case)
    check(case, EXACT, "cpu")


@pytest.mark.parametrize(
    ("case", "walked"),
    [
        (Case(key_dim=32, value_dim=32), True),
        (Case(key_dim=33, value_dim=32), False),
        (Case(key_dim=8, value_dim=128), True),
        (Case(dtype=torch.bfloat16), False),
        (Case(tokens=2048, sub_steps=2), True),
        (Case(tokens=2049, sub_steps=2), False),
    ],
    ids=str,
)
def test_what_is_walked(case: Case, walked: bool) -> None:
    assert is_walked(case) == walked


def test_without_gradients_no_states_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    kept, run = [], fused_recurrent.walk_forward
    monkeypatch.setattr(fused_recurrent, "walk_forward", lambda *args: (kept.append(args[-2]), run(*args)))
    q, k = torch.randn(1, 3, 1, 8, device=DEVICE), torch.randn(1, 3, 2, 1, 8, device=DEVICE)
    beta = torch.rand(1, 3, 2, 1, device=DEVICE)
    expected, _ = delta_product(q, k, k, beta, qk_l2norm=True, backend="triton")
    trained, _ = delta_product(q.requires_grad_(), k, k, beta, qk_l2norm=True, backend="triton")
    assert kept[0] is None and kept[1].shape == (1, 3, 2, 1, 8, 8)
    assert torch.equal(trained, expected)


def test_only_the_final_state_is_used() -> None:
    (q, k, v, beta, g, _), _, dstate = make_inputs(Case(tokens=9, sub_steps=2), DEVICE)
    found = []
    for backend in ("recurrent", "triton"):
        leaves = [x.clone().requires_grad_() for x in (k, v, beta, g)]
        _, state = delta_product(q, *leaves, output_final_state=True, qk_l2norm=True, backend=backend)
        found.append(torch.autograd.grad(state, leaves, dstate))
    torch.testing.assert_close(found[1], found[0], rtol=1e-4, atol=1e-5)


@pytest.mark.gpu
@pytest.mark.parametrize("case", CASES, ids=str)
def test_gpu(case: Case) -> None:
    check(case, EXACT, "cuda")


@pytest.mark.gpu
@pytest.mark.parametrize("gated", [GATED, UNGATED])
@pytest.mark.parametrize("sub_steps", [1, 2, 3, 4])
@pytest.mark.parametrize("dim", [16, 32])
def test_gpu_word_problems(dim: int, sub_steps: int, gated: bool) -> None:
    case = Case(128, sub_steps, gated, batch=8, heads=12, key_dim=dim, value_dim=dim, states=False)
    check(case, uniform(1e-5), "cuda")
