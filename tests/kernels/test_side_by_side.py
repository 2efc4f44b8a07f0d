"""Projections as one product: kernels on its columns, gradients side by side, against layers one by one."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fla_train.kernels.fused_ops import recurrence_gates, rms_norm, short_convolution, swiglu_linear
from fla_train.kernels.fused_ops.side_by_side import SideBySideGradients
from fla_train.models.layers import project
from tests.kernels.test_fused_ops import BF16, DEVICE, FP32, INTERPRETED, random

pytestmark = pytest.mark.usefixtures("poisoned_memory")
Consumer = Callable[[list[Tensor], str], list[Tensor]]


def mixer(projections: list[Tensor], backend: str) -> list[Tensor]:
    """Run the operations between projections and operator, and the gate after it."""
    x, gate, b, a = projections
    convolved, _ = short_convolution(x, weights(x.shape[-1], 1, 4), backend=backend)
    beta, g = recurrence_gates(b, a, *weights(2, a.shape[-1]), beta_max=2.0, backend=backend)
    heads = convolved.unflatten(-1, (3, -1))
    return [rms_norm(heads, weights(heads.shape[-1]), 1e-6, gate=gate, backend=backend), beta, g]


def mlp(projections: list[Tensor], backend: str) -> list[Tensor]:
    gate, up = projections
    return [swiglu_linear(gate, up, weights(8, gate.shape[-1]), backend=backend)]


def key_norms(projections: list[Tensor], backend: str) -> list[Tensor]:
    """The last projection gets a gradient from elsewhere."""
    q, k, v = projections
    return [*(rms_norm(x, weights(x.shape[-1]), 1e-6, backend=backend) for x in (q, k)), v.exp()]


def weights(*shape: int) -> Tensor:
    return torch.linspace(-1, 1, torch.Size(shape).numel(), device=DEVICE).sin().view(shape)


CONSUMERS: list[tuple[Consumer, tuple[int, ...]]] = [
    (mixer, (12, 12, 6, 3)),
    (mlp, (20, 20)),
    (key_norms, (12, 4, 5)),
]


@pytest.fixture
def collected(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """For each backward pass of projections: whether all gradients were in one tensor."""
    found, collect = [], SideBySideGradients.collect

    def watched(self: SideBySideGradients, gradients: list[Tensor]) -> Tensor | None:
        wide = collect(self, gradients)
        found.append(wide is not None)
        return wide

    monkeypatch.setattr(SideBySideGradients, "collect", watched)
    return found


def linears(inputs: int, sizes: tuple[int, ...]) -> list[nn.Linear]:
    torch.manual_seed(0)
    return [nn.Linear(inputs, rows, bias=False, device=DEVICE) for rows in sizes]


def gradients(outputs: list[Tensor], leaves: list[Tensor]) -> list[Tensor]:
    generator = torch.Generator(DEVICE).manual_seed(1)
    slopes = [torch.randn(y.shape, generator=generator, device=DEVICE).to(y.dtype) for y in outputs]
    return torch.autograd.grad(outputs, leaves, slopes)


def check(consumer: Consumer, layers: list[nn.Linear], x: Tensor, dtype: torch.dtype, bound: float) -> None:
    """Outputs and gradients of one product with kernels against those of layers by themselves in fp64."""
    leaves = [x.requires_grad_(), *(layer.weight for layer in layers)]
    with torch.autocast(DEVICE, dtype, enabled=dtype != FP32):
        outputs = consumer(project(x, *layers), "triton")
    found = [*outputs, *gradients(outputs, leaves)]

    exact = [leaf.detach().to(dtype).double().requires_grad_() for leaf in leaves]
    expected = consumer([F.linear(exact[0], weight) for weight in exact[1:]], "torch")
    expected = [*expected, *gradients(expected, exact)]
    for i, (actual, wanted) in enumerate(zip(found, expected, strict=True)):
        error = (actual.double() - wanted).norm() / wanted.norm()
        assert error <= bound, f"result {i}: relative error {error:.1e} > {bound:.1e}"


@pytest.mark.skipif(not INTERPRETED, reason="the GPU tests cover these")
@pytest.mark.parametrize(("consumer", "sizes"), CONSUMERS)
def test_interpreted(consumer: Consumer, sizes: tuple[int, ...], collected: list[bool]) -> None:
    check(consumer, linears(8, sizes), random(2, 5, 8), FP32, 1e-5)
    assert collected == [True]


@pytest.mark.gpu
@pytest.mark.parametrize(("consumer", "sizes"), CONSUMERS)
def test_gpu(consumer: Consumer, sizes: tuple[int, ...], collected: list[bool]) -> None:
    check(consumer, linears(256, sizes), random(2, 129, 256), BF16, 1e-2)
    assert collected == [True]


def test_a_projection_with_two_uses(collected: list[bool]) -> None:
    """The gradient of the first projection is a sum, so it is elsewhere in memory."""
    layers, x = linears(8, (20, 20)), random(3, 8).requires_grad_()

    def outputs(projections: list[Tensor]) -> list[Tensor]:
        return [*mlp(projections, "triton"), projections[0] * projections[0]]

    leaves = [x, *(layer.weight for layer in layers)]
    actual, expected = project(x, *layers), [layer(x) for layer in layers]
    torch.testing.assert_close(gradients(outputs(actual), leaves), gradients(outputs(expected), leaves))
    assert collected == [False]


def test_backward_passes_after_one_another() -> None:
    """A gradient of a first pass is not written over by the second."""
    layers, x = linears(8, (20, 20)), random(3, 8).requires_grad_()
    gate, up = project(x, *layers)
    (y,) = mlp([gate, up], "triton")
    (first,) = torch.autograd.grad(y.sum(), gate, retain_graph=True)
    kept = first.clone()
    second = torch.autograd.grad((2 * y).sum(), x, retain_graph=True)
    assert torch.equal(first, kept)
    third = torch.autograd.grad((2 * y).sum(), x)
    torch.testing.assert_close(second, third, rtol=0, atol=0)
    (expected,) = mlp([layer(x) for layer in layers], "torch")
    torch.testing.assert_close(third, torch.autograd.grad((2 * expected).sum(), x))
