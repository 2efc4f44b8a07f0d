"""The chunked loss and joint projections against plain PyTorch."""

import pytest
import torch
import torch.nn.functional as F

from fla_train.models import loss as loss_module
from fla_train.models.layers import project
from fla_train.models.loss import linear_cross_entropy, token_losses


@pytest.mark.parametrize("chunk_elements", [1, 200, 2**25])
def test_loss_and_gradients_equal_cross_entropy(monkeypatch, chunk_elements):
    monkeypatch.setattr(loss_module, "CHUNK_ELEMENTS", chunk_elements)
    hidden = torch.randn(13, 8, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(29, 8, dtype=torch.float64, requires_grad=True)
    targets = torch.randint(0, 29, (13,))
    targets[[2, 7, 12]] = -100
    ours = linear_cross_entropy(hidden, weight, targets)
    gradients = torch.autograd.grad(0.37 * ours, (hidden, weight))
    reference = F.cross_entropy(hidden @ weight.T, targets, ignore_index=-100, reduction="sum")
    expected = torch.autograd.grad(0.37 * reference, (hidden, weight))
    torch.testing.assert_close(ours, reference, rtol=1e-12, atol=0)
    torch.testing.assert_close(gradients, expected, rtol=1e-10, atol=1e-12)
    each = F.cross_entropy(hidden @ weight.T, targets, ignore_index=-100, reduction="none")
    torch.testing.assert_close(token_losses(hidden, weight, targets), each.detach(), rtol=1e-12, atol=1e-12)


def test_the_factor_of_the_loss_is_not_rounded_to_bf16():
    """1 / 104 in bf16 is 0.3 % off, which would be a bias of all gradients alike."""
    hidden = torch.randn(64, 32).to(torch.bfloat16).requires_grad_()
    weight = torch.randn(50, 32, requires_grad=True)
    targets = torch.randint(0, 50, (64,))
    whole = torch.autograd.grad(linear_cross_entropy(hidden, weight, targets), (hidden, weight))
    mean = torch.autograd.grad(linear_cross_entropy(hidden, weight, targets) / 104, (hidden, weight))
    for one, other in zip(whole, mean, strict=True):
        ratio = (one.double() * other.double()).sum() / one.double().square().sum()
        assert ratio.item() == pytest.approx(1 / 104, rel=5e-4)


def linears(dtype: torch.dtype = torch.float64) -> list[torch.nn.Linear]:
    return [torch.nn.Linear(12, rows, bias=False, dtype=dtype) for rows in (24, 7, 1)]


def gradients(
    outputs: list[torch.Tensor], x: torch.Tensor, layers: list[torch.nn.Linear]
) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    slopes = [torch.randn(y.shape, generator=generator, dtype=torch.float64).to(y.dtype) for y in outputs]
    return torch.autograd.grad(outputs, [x, *(layer.weight for layer in layers)], slopes)


def test_projections_are_those_of_the_layers():
    layers, x = linears(), torch.randn(2, 5, 12, dtype=torch.float64, requires_grad=True)
    outputs, expected = project(x, *layers), [layer(x) for layer in layers]
    for actual, wanted in zip(outputs, expected, strict=True):
        torch.testing.assert_close(actual, wanted, rtol=1e-12, atol=1e-14)
    for actual, wanted in zip(gradients(outputs, x, layers), gradients(expected, x, layers), strict=True):
        torch.testing.assert_close(actual, wanted, rtol=1e-12, atol=1e-14)
    with torch.no_grad():
        assert torch.equal(project(x, *layers)[1], expected[1])


def test_projections_round_no_more_than_the_layers_under_autocast():
    torch.manual_seed(0)
    layers = [torch.nn.Linear(64, 256, bias=False) for _ in range(6)]
    x = torch.randn(128, 64).bfloat16().requires_grad_()
    wide = [torch.nn.Linear(64, 256, bias=False, dtype=torch.float64) for _ in layers]
    for layer, copy in zip(layers, wide, strict=True):
        copy.weight.data = layer.weight.data.bfloat16().double()
    exact_x = x.detach().double().requires_grad_()
    exact = gradients([layer(exact_x) for layer in wide], exact_x, wide)
    with torch.autocast("cpu", torch.bfloat16):
        ours, theirs = project(x, *layers), [layer(x) for layer in layers]
    assert all(y.dtype == torch.bfloat16 for y in ours)

    def error(outputs: list[torch.Tensor]) -> float:
        dx, *dweights = gradients(outputs, x, layers)
        assert dx.dtype == torch.bfloat16 and all(grad.dtype == torch.float32 for grad in dweights)
        return ((dx.double() - exact[0]).norm() / exact[0].norm()).item()

    assert error(ours) <= 1.02 * error(theirs) <= 1e-2
