"""The fused decoding step against the float64 recurrence, interpreted and on a GPU."""

import pytest
import torch

from fla_train.kernels.delta_product import delta_product_step
from fla_train.kernels.delta_product.selfcheck import relative_rms

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
BOUND = {torch.float32: 1e-6, torch.float16: 1e-3, torch.bfloat16: 5e-3}


def step_inputs(sub_steps, gated, dims, dtype, batch=2, heads=3, device=DEVICE):
    def normal(*shape):
        return torch.randn(shape, device=device).to(dtype)

    return {
        "q": normal(batch, heads, dims[0]),
        "k": torch.nn.functional.normalize(normal(batch, sub_steps, heads, dims[0]), dim=-1),
        "v": normal(batch, sub_steps, heads, dims[1]),
        "beta": 2 * torch.rand(batch, sub_steps, heads, device=device),
        "g": -torch.rand(batch, heads, device=device).exp() if gated else None,
        "state": torch.randn(batch, heads, *dims, device=device),
    }


def in_float64(inputs):
    return {name: x if x is None else x.double() for name, x in inputs.items()}


def check(inputs, l2norm):
    expected = delta_product_step(**in_float64(inputs), qk_l2norm=l2norm, backend="recurrent")
    before = inputs["state"].clone()
    torch.use_deterministic_algorithms(True, warn_only=True)  # fills fresh memory with NaN
    try:
        results = delta_product_step(**inputs, qk_l2norm=l2norm, backend="triton")
    finally:
        torch.use_deterministic_algorithms(False)
    assert torch.equal(inputs["state"], before)
    assert results[0].dtype == inputs["q"].dtype and results[1].dtype == torch.float32
    assert relative_rms(results[0], expected[0]) < BOUND[inputs["q"].dtype]
    assert relative_rms(results[1], expected[1]) < 1e-6  # the inputs are what they are; arithmetic is fp32


@pytest.mark.parametrize("dims", [(16, 16), (33, 70), (128, 5), (256, 40)])
@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("sub_steps", [1, 3])
def test_shapes(sub_steps, gated, dims):
    check(step_inputs(sub_steps, gated, dims, torch.float32), l2norm=gated)


@pytest.mark.parametrize("dtype", [torch.float16, pytest.param(torch.bfloat16, marks=pytest.mark.gpu)])
def test_half_precision(dtype):
    check(step_inputs(2, True, (64, 64), dtype), l2norm=True)


def test_closed_gates_and_step_sizes_at_their_ends():
    inputs = step_inputs(4, True, (32, 32), torch.float32)
    inputs["g"][:, 0] = -torch.inf
    inputs["beta"][:, 0], inputs["beta"][:, 1] = 0.0, 2.0
    check(inputs, l2norm=True)


@pytest.mark.gpu
@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("sub_steps", [1, 2, 3, 4])
@pytest.mark.parametrize("dims", [(16, 16), (64, 64), (128, 128), (256, 256), (96, 48)])
def test_gpu(dims, sub_steps, gated):
    check(step_inputs(sub_steps, gated, dims, torch.bfloat16, batch=16, heads=16), l2norm=True)


@pytest.mark.gpu
@pytest.mark.parametrize("l2norm", [True, False])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_gpu_other_types(dtype, l2norm):
    check(step_inputs(2, not l2norm, (128, 128), dtype, batch=16, heads=16), l2norm)


@pytest.mark.parametrize("backend", ["recurrent", pytest.param("triton", marks=pytest.mark.gpu)])
def test_state_in_bfloat16_is_rounded_once_a_token(backend):
    """Both states walk over the same tokens; a bf16 state's error stays that of a few roundings."""
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


def test_gradients_and_float64_are_refused():
    inputs = step_inputs(1, True, (16, 16), torch.float32)
    with pytest.raises(ValueError, match="records no gradients"):
        delta_product_step(**{**inputs, "v": inputs["v"].requires_grad_()}, backend="triton")
    with pytest.raises(ValueError, match="takes no torch"):
        delta_product_step(**in_float64({**inputs, "v": inputs["v"].detach()}), backend="triton")


def test_auto_keeps_gradients():
    inputs = step_inputs(2, True, (16, 16), torch.float32)
    inputs["v"].requires_grad_()
    auto, definition = (delta_product_step(**inputs, backend=name)[0] for name in ("auto", "recurrent"))
    assert torch.equal(auto, definition)
    assert torch.autograd.grad(auto.sum(), inputs["v"])[0].abs().sum() > 0
