"""`fused_recurrent` against the float64 recurrence, interpreted and on a GPU: sequences, and one token."""

import pytest
import torch

from fla_train.kernels.delta_product import delta_product_step
from fla_train.kernels.delta_product.select import select_kernel
from fla_train.kernels.delta_product.selfcheck import relative_rms
from tests.kernels.operator_cases import GATED, INTERPRETED, UNGATED, Case, check, uniform

pytestmark = pytest.mark.usefixtures("poisoned_memory")
DEVICE = "cpu" if INTERPRETED else "cuda"
BOUND = {torch.float32: 1e-6, torch.float16: 1e-3, torch.bfloat16: 5e-3}  # of o, by dtype
EXACT = uniform(2e-6)  # no product is cut to fewer bits than float32 has
CASES = [
    Case(tokens=33, heads=2, batch=2),
    Case(tokens=17, num_householder=2, gated=UNGATED, l2norm=False),
    Case(tokens=9, num_householder=3, key_dim=24, value_dim=20),
    Case(tokens=9, num_householder=4, batch=2, states=False, key_dim=32, value_dim=32),
    Case(tokens=21, num_householder=2, cu_seqlens=(0, 0, 9, 10, 21)),
    Case(tokens=13, gated=UNGATED, cu_seqlens=(0, 3, 13, 13), l2norm=False),
    # Many heads: the one sum that a single dbeta or dg is may all but vanish, and its relative error be any.
    Case(tokens=1, scale=1.0, value_dim=5, batch=4, heads=8),
    Case(tokens=20, inputs="correlated", key_dim=32),
    Case(tokens=20, inputs="repeated"),
    Case(tokens=12, inputs="zero beta"),
    Case(tokens=12, num_householder=2, heads=4, group=2, batch=2),
    Case(tokens=20, inputs="resets", num_householder=2),
]


@pytest.mark.skipif(not INTERPRETED, reason="the GPU tests cover these")
@pytest.mark.parametrize("case", CASES, ids=str)
def test_interpreted(case: Case) -> None:
    names = ("batch", "tokens", "heads", "key_dim", "value_dim", "num_householder")
    selection = select_kernel(DEVICE, case.dtype, **{name: getattr(case, name) for name in names})
    assert selection.algorithm == "fused_recurrent"
    check(case, EXACT, "cpu")


@pytest.mark.gpu
@pytest.mark.parametrize("case", CASES, ids=str)
def test_gpu(case: Case) -> None:
    check(case, EXACT, "cuda")


@pytest.mark.gpu
@pytest.mark.parametrize("gated", [GATED, UNGATED])
@pytest.mark.parametrize("num_householder", [1, 2, 3, 4])
@pytest.mark.parametrize("dim", [16, 32])
def test_gpu_word_problems(dim: int, num_householder: int, gated: bool) -> None:
    case = Case(128, num_householder, gated, batch=8, heads=12, key_dim=dim, value_dim=dim, states=False)
    check(case, uniform(1e-5), "cuda")


def step_inputs(num_householder, gated, dims, dtype, batch=2, heads=3, device=DEVICE):
    def normal(*shape):
        return torch.randn(shape, device=device).to(dtype)

    return {
        "q": normal(batch, heads, dims[0]),
        "k": torch.nn.functional.normalize(normal(batch, num_householder, heads, dims[0]), dim=-1),
        "v": normal(batch, num_householder, heads, dims[1]),
        "beta": 2 * torch.rand(batch, num_householder, heads, device=device),
        "g": -torch.rand(batch, heads, device=device).exp() if gated else None,
        "state": torch.randn(batch, heads, *dims, device=device),
    }


def in_float64(inputs):
    return {name: x if x is None else x.double() for name, x in inputs.items()}


def check_step(inputs, l2norm):
    expected = delta_product_step(**in_float64(inputs), qk_l2norm=l2norm, backend="recurrent")
    before = inputs["state"].clone()
    results = delta_product_step(**inputs, qk_l2norm=l2norm, backend="triton")
    assert torch.equal(inputs["state"], before)
    assert results[0].dtype == inputs["q"].dtype and results[1].dtype == torch.float32
    assert relative_rms(results[0], expected[0]) < BOUND[inputs["q"].dtype]
    assert relative_rms(results[1], expected[1]) < 1e-6


@pytest.mark.parametrize(
    ("num_householder", "gated", "dims"),
    [(1, True, (16, 16)), (3, False, (33, 70)), (3, True, (128, 5)), (1, False, (256, 40))],
)
def test_step_shapes(num_householder, gated, dims):
    check_step(step_inputs(num_householder, gated, dims, torch.float32), l2norm=gated)


@pytest.mark.parametrize("dtype", [torch.float16, pytest.param(torch.bfloat16, marks=pytest.mark.gpu)])
def test_step_half_precision(dtype):
    for l2norm in (True, False):
        check_step(step_inputs(2, l2norm, (64, 64), dtype), l2norm)


def test_step_of_grouped_heads():
    inputs = step_inputs(2, True, (16, 24), torch.float32, heads=4)
    check_step(inputs | {"q": inputs["q"][:, ::2], "k": inputs["k"][:, :, ::2]}, l2norm=True)


@pytest.mark.gpu
@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("num_householder", [1, 2, 3, 4])
@pytest.mark.parametrize("dims", [(16, 16), (64, 64), (128, 128), (256, 256), (96, 48)])
def test_gpu_step(dims, num_householder, gated):
    check_step(step_inputs(num_householder, gated, dims, torch.bfloat16, batch=16, heads=16), l2norm=True)


@pytest.mark.parametrize("backend", ["recurrent", pytest.param("triton", marks=pytest.mark.gpu)])
def test_state_in_bfloat16_is_rounded_once_a_token(backend):
    """Both states see the same tokens; a bf16 state's error stays that of a few roundings."""
    inputs = step_inputs(2, True, (64, 64), torch.float32)
    exact, rounded = inputs.pop("state").double(), None
    for _ in range(64):
        inputs = {**step_inputs(2, True, (64, 64), torch.float32), "state": rounded}
        inputs["state"] = exact.to(torch.bfloat16) if rounded is None else rounded
        expected, exact = delta_product_step(
            **in_float64({**inputs, "state": exact}), qk_l2norm=True, backend="recurrent"
        )
        o, rounded = delta_product_step(**inputs, qk_l2norm=True, backend=backend)
    assert rounded.dtype == torch.bfloat16
    assert 1e-4 < relative_rms(rounded, exact) < 1e-2
    assert 1e-4 < relative_rms(o, expected) < 1e-2


def test_auto_keeps_gradients():
    inputs = step_inputs(2, True, (16, 16), torch.float32)
    inputs["v"].requires_grad_()
    auto, definition = (delta_product_step(**inputs, backend=name)[0] for name in ("auto", "recurrent"))
    assert torch.equal(auto, definition)
    assert torch.autograd.grad(auto.sum(), inputs["v"])[0].abs().sum() > 0
