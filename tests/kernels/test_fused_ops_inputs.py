"""Choice of the fused ops' backend, and unusual inputs: strided, empty, excluded logits, autocast."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from fla_train.kernels.fused_ops import (
    add_rms_norm,
    consume_logits,
    recurrence_gates,
    resolve_backend,
    rms_norm,
    rotary,
    short_convolution,
    swiglu_linear,
)
from tests.kernels.test_fused_ops import DEVICE, EPS, FP32, random

pytestmark = pytest.mark.usefixtures("poisoned_memory")


def test_logits_may_begin_with_many_that_are_excluded() -> None:
    logits = random(2, 5000)
    logits[:, :4500] = -torch.inf
    targets = torch.tensor([4600, 4999], device=DEVICE)
    expected, actual = (
        consume_logits(logits.clone(), targets, with_gradient=True, backend=backend)
        for backend in ("torch", "triton")
    )
    torch.testing.assert_close(actual, expected)


@pytest.mark.filterwarnings("ignore:invalid value encountered")  # NumPy warns in the interpreter
@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_a_row_without_a_target_has_no_gradient_whatever_its_logits(backend: str) -> None:
    logits = torch.tensor([[torch.nan, 1.0], [torch.inf, 0.0], [2.0, 0.0]], device=DEVICE)
    targets = torch.tensor([-100, -100, 0], device=DEVICE)
    losses, gradient = consume_logits(logits, targets, with_gradient=True, backend=backend)
    assert not losses[:2].any() and not gradient[:2].any() and gradient[2].all()


def test_a_target_outside_the_vocabulary_gives_nan() -> None:
    targets = torch.tensor([7, -1, 6], device=DEVICE)
    losses, _ = consume_logits(random(3, 7), targets, with_gradient=True, backend="triton")
    assert losses.isnan().tolist() == [True, True, False]


@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_swiglu_with_one_row_a_frozen_weight_and_autocast(backend: str) -> None:
    gate, up, weight = random(20).requires_grad_(), random(20), random(3, 20)
    with torch.autocast(DEVICE, torch.bfloat16):
        y = swiglu_linear(gate, up, weight, backend=backend)
    assert y.dtype == FP32
    torch.testing.assert_close(y, F.linear(F.silu(gate) * up, weight))
    frozen = torch.autograd.grad(y.sum(), gate)[0]
    y = swiglu_linear(gate, up, weight.requires_grad_(), backend=backend)
    dgate, dweight = torch.autograd.grad(y.sum(), (gate, weight))
    torch.testing.assert_close(dgate, frozen)
    torch.testing.assert_close(dweight, (F.silu(gate) * up).detach().expand(3, 20))


def test_swiglu_keeps_its_dtype_where_the_backward_pass_is_under_autocast() -> None:
    leaves = [x.requires_grad_() for x in (random(5, 20), random(5, 20), random(3, 20))]
    z = swiglu_linear(*leaves, backend="triton")
    expected = torch.autograd.grad(z.sum(), leaves, retain_graph=True)
    with torch.autocast(DEVICE, torch.bfloat16):
        actual = torch.autograd.grad(z.sum(), leaves)
    assert all(map(torch.equal, actual, expected))


def test_strided_inputs_and_tables_of_angles_without_a_gradient() -> None:
    both, weight = random(3, 5, 40), random(20)
    a, b = both.chunk(2, dim=-1)
    q, k = random(1, 3, 2, 8).requires_grad_(), random(1, 3, 1, 8).requires_grad_()
    cos, sin = random(2, 3, 8).requires_grad_()[..., :4]

    def outputs(backend: str) -> list[Tensor | None]:
        rotated = rotary(q, k, cos, sin, backend=backend)
        leaves = (q, k, cos, sin)
        gradients = torch.autograd.grad(sum(x.sum() for x in rotated), leaves, allow_unused=True)
        normed = rms_norm(a, weight, EPS, gate=b, backend=backend)
        return [normed, swiglu_linear(a, b, weight[None], backend=backend), *rotated, *gradients]

    found = outputs("triton")
    assert found[-1] is found[-2] is None
    torch.testing.assert_close(found, outputs("torch"))


@pytest.mark.parametrize("backend", ["torch", "triton"])
@pytest.mark.parametrize("cut", [3, 6])
def test_a_packed_row_is_convolved_in_two_parts(backend: str, cut: int) -> None:
    """The second part starts inside a document, which begins fewer tokens before it than there are taps."""
    positions = torch.tensor([0, 1, 2, 3, 4, 0, 1, 2, 0, 1], device=DEVICE)
    x, weight, dy = random(1, 10, 20).requires_grad_(), random(20, 1, 4), random(1, 10, 20)
    whole, _ = short_convolution(x, weight, position_in_document=positions, backend=backend)
    first, state = short_convolution(
        x[:, :cut], weight, position_in_document=positions[:cut], backend=backend
    )
    options = {"state": state, "position_in_document": positions[cut:], "backend": backend}
    second, _ = short_convolution(x[:, cut:], weight, **options)
    parts = torch.cat([first, second], dim=1)
    torch.testing.assert_close(parts, whole)
    torch.testing.assert_close(torch.autograd.grad(parts, x, dy), torch.autograd.grad(whole, x, dy))


@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_no_rows(backend: str) -> None:
    x, weight = random(0, 8).requires_grad_(), random(8).requires_grad_()
    functions = {
        "norm": lambda: rms_norm(x, weight, EPS, gate=x, backend=backend),
        "sum": lambda: add_rms_norm(x, x, weight, EPS, backend=backend)[0],
        "swiglu": lambda: swiglu_linear(x, x, weight[None], backend=backend),
        "convolution": lambda: short_convolution(x[None], weight[:, None, None], backend=backend)[0],
        "gates": lambda: recurrence_gates(x, x, weight, weight, beta_max=1.0, backend=backend)[1],
    }
    for name, function in functions.items():
        dx, dweight = torch.autograd.grad(function().sum(), (x, weight))
        assert dx.shape == x.shape and not dweight.any(), name


def test_backend_is_chosen_by_argument_variable_and_input(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.zeros(1)
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert resolve_backend("auto", x) == "torch" and resolve_backend("triton", x) == "triton"
    assert resolve_backend("auto", x.double()) == "torch"
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    for backend, y, message in (
        ("triton", x, "needs a CUDA device"), ("triton", x.double(), "float64"), ("cuda", x, "is unknown"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=message):
            resolve_backend(backend, y)
    monkeypatch.setenv("FLA_TRAIN_FUSED_OPS", "fast")
    assert resolve_backend("torch", x) == "torch"
    with pytest.raises(ValueError, match="FLA_TRAIN_FUSED_OPS='fast' is unknown"):
        resolve_backend("auto", x)
