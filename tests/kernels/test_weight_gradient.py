"""The gradient of a weight against fp64: rounded to 16 bits on a CPU, and not on a GPU."""

import pytest
import torch

from fla_train.kernels.weight_gradient import add_weight_gradient, weight_gradient


@pytest.mark.parametrize(
    ("device", "bound"), [("cpu", 4e-3), pytest.param("cuda", 1e-5, marks=pytest.mark.gpu)]
)
def test_of_bf16_factors_in_fp32(device: str, bound: float) -> None:
    dy, x = torch.randn(512, 3, 48, device=device).bfloat16().unbind(1)[:2]  # rows that are not dense
    exact = dy.double().t() @ x.double()
    found = weight_gradient(dy, x, torch.float32)
    assert found.dtype == torch.float32
    assert (found - exact).norm() < bound * exact.norm()
    assert weight_gradient(dy, x, torch.bfloat16).dtype == torch.bfloat16
    before = found.clone()
    add_weight_gradient(found, dy, x)
    assert (found - before - exact).norm() < bound * exact.norm()
