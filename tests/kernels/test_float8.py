"""Casts to float8 and their products against float8 worked out in fp64, for both backends."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from fla_train.kernels.fused_ops.float8 import (
    E4M3,
    E5M2,
    cast_float8,
    cast_swiglu,
    cast_swiglu_backward,
    float8_product,
    norm_scale,
    transpose_float8,
)
from fla_train.kernels.fused_ops.rms_norm import add_rms_norm, cast_rms_norm, rms_norm
from tests.interpreted_float8 import round_to_nearest
from tests.kernels.test_fused_ops import DEVICE, INTERPRETED

BF16, FP32 = torch.bfloat16, torch.float32
FORMATS = {
    E4M3: (3, -6, 448.0),
    E5M2: (2, -14, 57344.0),
}  # bits of the mantissa, least exponent, largest number
GPU_SHAPES = [(16384, 2048), (4112, 5632)]
SHAPES = [(48, 272), *(pytest.param(shape, marks=pytest.mark.gpu) for shape in GPU_SHAPES)]

pytestmark = pytest.mark.usefixtures("poisoned_memory")
backends = pytest.mark.parametrize("backend", ["torch", "triton"])
formats = pytest.mark.parametrize("dtype", [E4M3, E5M2], ids=str)
shapes = pytest.mark.parametrize("shape", SHAPES, ids=str)


@pytest.fixture(autouse=True)
def _interpreter_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    round_to_nearest(monkeypatch)


def rounded(x: Tensor, dtype: torch.dtype) -> Tensor:
    """The nearest numbers of a format, ties to even, in fp64."""
    bits, least, largest = FORMATS[dtype]
    exponent = torch.frexp(x.double())[1].sub(1).clamp(min=least)  # 2^exponent <= |x| < 2^(exponent + 1)
    step = torch.exp2((exponent - bits).double())
    assert x.abs().max() <= largest
    return torch.round(x.double() / step) * step


def scale_for(x: Tensor, dtype: torch.dtype) -> float:
    """Return the power of two that scales the largest magnitude to the binade below the format's last."""
    top = int(np.log2(FORMATS[dtype][2])) - 1
    return 2.0 ** (top - int(np.floor(np.log2(x.double().abs().max().item()))))


def wide_range(*shape: int, dtype: torch.dtype) -> Tensor:
    """Numbers over thirty binades."""
    x = torch.randn(shape, device=DEVICE) * torch.exp2(torch.randint(-24, 6, shape, device=DEVICE))
    return x.to(dtype)


@backends
@formats
@shapes
@pytest.mark.parametrize("given", [BF16, FP32], ids=str)
@pytest.mark.parametrize("dim", [-1, 0])
def test_a_cast_is_the_nearest_number_of_bf16_with_one_scale(backend, dtype, shape, given, dim):
    whole = wide_range(*shape, dtype=given)
    size = whole.shape[dim]
    cast = cast_float8(whole.split([16, size - 32, 16], dim), dtype, dim=dim, backend=backend)
    scale = scale_for(whole, dtype)
    assert cast.inverse.item() == 1 / scale
    expected = rounded(whole.to(BF16).double() * scale, dtype)
    assert torch.equal(cast.data.double(), expected)
    assert torch.equal(cast.transposed.double(), expected.t())
    assert cast.data.is_contiguous() and cast.transposed.is_contiguous()


@backends
@formats
@pytest.mark.parametrize("value", [0.0, 1e-42, 1e-30, 3e38], ids=str)
def test_extreme_numbers_keep_their_value(backend: str, dtype: torch.dtype, value: float) -> None:
    cast = cast_float8([torch.full((16, 16), value, device=DEVICE)], dtype, backend=backend)
    found = cast.data.double() * cast.inverse.double()
    # Below the least scale numbers are rounded to zero: 2^-126 times a subnormal of the format
    torch.testing.assert_close(found, torch.full_like(found, value), rtol=2**-3, atol=1e-39)


@backends
@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf], ids=str)
def test_what_is_not_finite_shows_in_a_product(backend: str, value: float) -> None:
    x = torch.ones(16, 16, device=DEVICE)
    x[3, 4] = value
    cast, other = (cast_float8([y], E4M3, backend=backend) for y in (x, torch.ones_like(x)))
    y = float8_product(cast.data, other.data, cast.inverse, other.inverse, BF16)
    assert not y.isfinite().any()


@formats
@pytest.mark.parametrize("out_dtype", [BF16, FP32], ids=str)
@pytest.mark.parametrize("fast", [False, True])
@shapes
def test_a_product(dtype: torch.dtype, out_dtype: torch.dtype, fast: bool, shape: tuple[int, int]) -> None:
    a = cast_float8([torch.randn(shape, device=DEVICE)], dtype)
    b = cast_float8([torch.randn(64, shape[1], device=DEVICE) * 1e-3], E4M3)
    y = float8_product(a.data, b.data, a.inverse, b.inverse, out_dtype, fast=fast)
    exact = a.data.double() @ b.data.double().t() * a.inverse.double() * b.inverse.double()
    assert y.dtype == out_dtype
    error = (y.double() - exact).norm() / exact.norm()
    assert error < (2e-2 if fast else 3e-3 if out_dtype == BF16 or not INTERPRETED else 1e-6)


def swiglu(gate_up: Tensor) -> Tensor:
    gate, up = gate_up.chunk(2, -1)
    return F.silu(gate) * up


def assert_nearly_rounded(found: Tensor, exact: Tensor, dtype: torch.dtype) -> None:
    """Nearest numbers, but where fp32 arithmetic took the other side of a tie: there the next one."""
    expected = rounded(exact, dtype)
    assert (found.double() != expected).double().mean() < 1e-3
    step = 2.0 ** -FORMATS[dtype][0]
    torch.testing.assert_close(found.double(), expected, rtol=step, atol=2.0 ** FORMATS[dtype][1] * step)


@backends
@shapes
def test_swiglu(backend: str, shape: tuple[int, int]) -> None:
    rows, columns = shape
    gate_up = (4 * torch.randn(rows, 2 * columns, device=DEVICE)).to(BF16)
    cast = cast_swiglu(gate_up, backend=backend)
    exact = swiglu(gate_up.double())
    scale = scale_for(exact, E4M3)
    assert cast.inverse.item() == 1 / scale
    assert_nearly_rounded(cast.data, exact.to(BF16) * scale, E4M3)


@backends
@formats
@shapes
def test_swiglu_backward(backend: str, dtype: torch.dtype, shape: tuple[int, int]) -> None:
    rows, columns = shape
    gate_up = (4 * torch.randn(rows, 2 * columns, device=DEVICE)).to(BF16)
    dy = (1e-4 * torch.randn(shape, device=DEVICE)).to(BF16)
    forward = cast_swiglu(gate_up, backend=backend)
    d, y_transposed = cast_swiglu_backward(gate_up, dy, forward.inverse, dtype=dtype, backend=backend)
    leaf = gate_up.double().requires_grad_()
    exact = torch.autograd.grad(swiglu(leaf), leaf, dy.double())[0]
    scale = scale_for(exact, dtype)
    assert d.inverse.item() == 1 / scale
    assert_nearly_rounded(d.data, exact.to(BF16) * scale, dtype)
    assert torch.equal(d.transposed.float(), d.data.float().t())
    y = swiglu(gate_up.double()).to(BF16)
    assert_nearly_rounded(y_transposed.t(), y / forward.inverse, E4M3)


@backends
@formats
@shapes
def test_a_transpose(backend: str, dtype: torch.dtype, shape: tuple[int, int]) -> None:
    x = wide_range(*shape, dtype=FP32).to(dtype)
    y = transpose_float8(x, backend=backend)
    assert y.is_contiguous() and torch.equal(y.view(torch.uint8), x.view(torch.uint8).t())


@backends
@pytest.mark.parametrize("with_residual", [False, True])
@pytest.mark.parametrize("shape", [(48, 272), pytest.param((16384, 2048), marks=pytest.mark.gpu)], ids=str)
def test_a_norm(backend: str, with_residual: bool, shape: tuple[int, int]) -> None:
    """Its result is that of fp64 in e4m3, its gradients are those of the norm in bf16."""
    x, residual = torch.randn(shape, device=DEVICE).to(BF16), torch.randn(shape, device=DEVICE)
    weight = torch.rand(shape[1], device=DEVICE) + 0.5
    dy, dtotal = (1e-3 * torch.randn(shape, device=DEVICE)).to(BF16), torch.randn(shape, device=DEVICE)
    leaves = [y.requires_grad_() for y in ([x, weight, residual] if with_residual else [x, weight])]
    scaled, inverse = norm_scale(weight.detach())
    assert weight.max() * shape[1] ** 0.5 / inverse <= FORMATS[E4M3][2]  # no output is beyond the format
    options = {"dtype": BF16, "backend": backend}
    carrier, data, total = cast_rms_norm(
        x, residual if with_residual else None, weight, scaled, 1e-6, narrow=E4M3, **options
    )
    if with_residual:
        y, expected_total = add_rms_norm(x, residual, weight, 1e-6, **options)
        assert torch.equal(total, expected_total)
        outputs, gradients = ([carrier, total], [y, expected_total]), [dy, dtotal]
    else:
        y = rms_norm(x, weight, 1e-6, **options)
        outputs, gradients = ([carrier], [y]), [dy]
    normed = (total if with_residual else x).detach().double()
    exact = normed * (normed.square().mean(-1, keepdim=True) + 1e-6).rsqrt() * weight.detach().double()
    assert_nearly_rounded(data, exact / inverse.double(), E4M3)
    found = [torch.autograd.grad(outputs[i], leaves, gradients) for i in (0, 1)]
    for actual, expected in zip(*found, strict=True):
        assert torch.equal(actual, expected)
