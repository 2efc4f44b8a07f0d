"""What makes products of 16 bits exact enough: in fp16, which the interpreter can multiply."""

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor

from fla_train.kernels.delta_product.triton.common import add_writes, factored_times_inverse
from tests.kernels.operator_cases import INTERPRETED

SIZE = 64
pytestmark = [
    pytest.mark.skipif(not INTERPRETED, reason="the GPU tests of whole calls cover these"),
    pytest.mark.usefixtures("poisoned_memory"),
]


@triton.jit
def square(M: tl.constexpr):
    return tl.arange(0, M)[:, None] * M + tl.arange(0, M)[None, :]


@triton.jit
def writes_kernel(s, u, k, out, M: tl.constexpr):
    o = square(M)
    tl.store(out + o, add_writes(tl.load(s + o), tl.load(u + o), tl.load(k + o), tl.float16, "tf32x3"))


@triton.jit
def inverse_kernel(w, x, out, factors, M: tl.constexpr):
    o = square(M)
    b_y, b_row = factored_times_inverse(tl.load(w + o), tl.load(x + o), tl.bfloat16, "tf32x3")
    tl.store(out + o, b_y)
    tl.store(factors + tl.arange(0, M), b_row)


def normal() -> Tensor:
    return torch.randn(SIZE, SIZE)


def test_writes_are_exact_beyond_fp16() -> None:
    s, u, k = normal(), normal(), normal().half()
    out = torch.empty_like(s)
    writes_kernel[(1,)](s, u, k, out, SIZE)
    torch.testing.assert_close(out, s + u @ k.float(), rtol=1e-5, atol=2e-5)
    one_term = s + u.half().float() @ k.float()
    assert not torch.allclose(one_term, s + u @ k.float(), rtol=1e-5, atol=2e-5)


def test_rows_of_any_size_fit_and_empty_ones_have_factor_1() -> None:
    w, x = normal(), normal().half()
    sizes = torch.logspace(-20, 20, SIZE)
    sizes[::7] = 0.0
    w *= sizes[:, None]
    out, factors = torch.empty_like(w), torch.empty_like(sizes)
    inverse_kernel[(1,)](w, x, out, factors, SIZE)
    assert (factors[::7] == 1.0).all() and (out[::7] == 0.0).all()
    expected = (w / factors[:, None]) @ x.float()
    assert torch.equal(factors[sizes > 0], w.abs().amax(1)[sizes > 0])
    assert (out - expected).norm() < 1e-3 * expected.norm()
