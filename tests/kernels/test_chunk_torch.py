"""The `chunk` backend against the recurrence in float64, and under the conditions of a CPU training run."""

import pytest
import torch
from torch import Tensor
from transformers.models.qwen3_next.modeling_qwen3_next import torch_chunk_gated_delta_rule

from fla_train.kernels.delta_product import delta_product
from fla_train.kernels.delta_product.selfcheck import evaluate
from tests.kernels.helpers import (
    assert_agrees,
    assert_matches_definition,
    differentiable,
    documents_of,
    random_inputs,
)

GATES = {
    "none": {},
    "open": {"alpha": (0.999, 1.0)},
    "half": {"alpha": (0.2, 1.0)},
    "nearly closed": {"alpha": (1e-30, 1e-3)},
    "closed at times": {"alpha": (0.5, 1.0), "closed_every": 3},
}


@pytest.mark.parametrize("tokens", [1, 2, 63, 65, 100])
@pytest.mark.parametrize("num_householder", [1, 2, 3, 4])
@pytest.mark.parametrize("gate", ["none", "half"])
def test_every_length(tokens, num_householder, gate):
    inputs = random_inputs(tokens, num_householder, initial_state=True, **GATES[gate])
    assert_matches_definition("chunk", inputs, 1e-12)


@pytest.mark.parametrize("beta", [(0.0, 1e-6), (0.0, 0.0), (1.99, 2.0), (2.0, 2.0)])
@pytest.mark.parametrize("gate", GATES)
def test_extreme_gates_and_step_sizes(gate, beta):
    inputs = random_inputs(70, 2, key_dim=6, value_dim=9, beta=beta, **GATES[gate], initial_state=True)
    assert_matches_definition("chunk", inputs, 1e-11)


def test_a_small_decay_behind_a_closed_gate_keeps_its_digits():
    inputs = random_inputs(64, alpha=(0.9999, 1.0), closed_every=2, dtype=torch.float32)
    assert_matches_definition("chunk", inputs, 2e-5)


@pytest.mark.parametrize("num_householder", [1, 3])
@pytest.mark.parametrize("gate", ["none", "half"])
@pytest.mark.parametrize("documents", [(0, 0, 1, 66, 66, 130), (0, 130), (0, 1, 2, 3, 130, 130)])
def test_packed_documents(num_householder, gate, documents):
    inputs = random_inputs(130, num_householder, documents=documents, initial_state=True, **GATES[gate])
    assert_matches_definition("chunk", inputs, 1e-12)


def test_packed_gradients_equal_those_of_separate_calls():
    inputs = random_inputs(90, 2, alpha=(0.8, 1.0), documents=(0, 30, 30, 31, 90))
    leaves = differentiable(inputs)
    o, _ = delta_product(**inputs, backend="chunk")
    weights = torch.randn_like(o)
    packed = torch.autograd.grad((o * weights).sum(), leaves)
    parts = [delta_product(**call, backend="chunk")[0] for call in documents_of(inputs)]
    separate = torch.autograd.grad((torch.cat(parts, 1) * weights).sum(), leaves)
    for x, y in zip(packed, separate, strict=True):
        torch.testing.assert_close(x, y)


@pytest.mark.parametrize("documents", [None, (0, 0, 1, 5)])
def test_gradients_are_numerically_right(documents, monkeypatch):
    # Several chunks, of two tokens each.
    monkeypatch.setattr("fla_train.kernels.delta_product.chunk_torch.CHUNK_STEPS", 4)
    inputs = random_inputs(
        5,
        2,
        key_dim=3,
        value_dim=2,
        alpha=(0.3, 0.9),
        initial_state=True,
        beta=(0.1, 1.9),
        documents=documents,
    )
    leaves = differentiable(inputs)

    def call(*_: Tensor) -> tuple[Tensor, Tensor]:
        return delta_product(**inputs, output_final_state=True, backend="chunk")

    # gradcheck perturbs its arguments in place, and `inputs` holds the same tensors.
    assert torch.autograd.gradcheck(call, leaves)


@pytest.mark.parametrize("used", ["o", "state"])
def test_gradients_when_only_one_output_is_used(used):
    inputs = random_inputs(70, 2, alpha=(0.8, 1.0), initial_state=True)
    gradients = []
    for backend in ("chunk", "recurrent"):
        leaves = differentiable(inputs)
        o, state = delta_product(**inputs, output_final_state=True, backend=backend)
        loss = (o if used == "o" else state).square().sum()
        gradients.append(torch.autograd.grad(loss, leaves, allow_unused=True))
    for x, y in zip(*gradients, strict=True):
        torch.testing.assert_close(x, torch.zeros_like(x) if y is None else y)


def hard_inputs(kind: str, dtype: torch.dtype) -> dict:
    """Inputs that broke kernels elsewhere: keys that are alike, step sizes near 2, a scale of exactly 1."""
    inputs = random_inputs(96, 2, key_dim=16, value_dim=16, dtype=torch.float64)
    k = inputs["k"]
    if kind in ("correlated", "very correlated"):
        cosine = 0.5 if kind == "correlated" else 0.9
        shared = torch.randn(k.shape[-1], dtype=torch.float64)
        unit = torch.nn.functional.normalize
        k = cosine**0.5 * unit(shared, dim=0) + (1 - cosine) ** 0.5 * unit(k, dim=-1)
        inputs["beta"] = 1.6 + 0.4 * torch.rand_like(inputs["beta"])
    elif kind == "four keys":
        k = torch.randn(4, k.shape[-1], dtype=torch.float64)[torch.randint(4, k.shape[:-1])]
        inputs["beta"] = torch.full_like(inputs["beta"], 2.0)
    elif kind == "positive":
        k = torch.nn.functional.silu(k)
        inputs["beta"] = torch.full_like(inputs["beta"], 2.0)
    elif kind == "ones":
        # Not normalised: the gradient along q would cancel to nothing but rounding.
        k, inputs["q"], inputs["v"] = (torch.ones_like(x) for x in (k, inputs["q"], inputs["v"]))
        k, inputs["qk_l2norm"] = k / k.shape[-1] ** 0.5, False
        inputs["beta"] = torch.full_like(inputs["beta"], 0.7)
    inputs.update(k=k, scale=1.0)
    for name in ("q", "k", "v"):
        inputs[name] = inputs[name].to(dtype)
    inputs["beta"] = inputs["beta"].to(torch.float64 if dtype == torch.float64 else torch.float32)
    return inputs


@pytest.mark.parametrize("kind", ["correlated", "very correlated", "four keys", "positive", "ones"])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-11), (torch.float32, 1e-4)])
def test_hard_keys(kind, dtype, tolerance):
    assert_matches_definition("chunk", hard_inputs(kind, dtype), tolerance)


def test_one_householder_step_equals_transformers_chunks():
    inputs = random_inputs(
        130, key_dim=16, value_dim=24, alpha=(0.5, 1.0), initial_state=True, dtype=torch.float32
    )
    leaves = differentiable(inputs)
    ours = delta_product(**inputs, output_final_state=True, backend="chunk")
    theirs = torch_chunk_gated_delta_rule(
        inputs["q"],
        inputs["k"][:, :, 0],
        inputs["v"][:, :, 0],
        inputs["g"],
        inputs["beta"][:, :, 0],
        initial_state=inputs["initial_state"],
        output_final_state=True,
        use_qk_l2norm_in_kernel=True,
    )
    weights = [torch.randn_like(x) for x in ours]
    for x, y in zip(ours, theirs, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-4, atol=1e-4)
    gradients = [torch.autograd.grad(outputs, leaves, weights) for outputs in (ours, theirs)]
    for x, y in zip(*gradients, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_rounds_only_outputs(dtype):
    inputs = random_inputs(100, 2, alpha=(0.9, 1.0), initial_state=True, dtype=dtype)
    results = evaluate(inputs, "chunk")
    assert results["o"].dtype == results["dk"].dtype == dtype
    assert results["final_state"].dtype == results["dbeta"].dtype == torch.float32
    wide = {name: x.float() if name in ("q", "k", "v") else x for name, x in inputs.items()}
    expected = evaluate(wide, "chunk")
    rounded = {name: expected[name].to(x.dtype) for name, x in results.items()}
    assert_agrees(results, rounded, 1e-6)


def test_strided_views_and_repeated_runs():
    inputs = random_inputs(40, 2, alpha=(0.9, 1.0), initial_state=True)
    views = {
        name: x.movedim(1, -1).contiguous().movedim(-1, 1) if isinstance(x, Tensor) else x
        for name, x in inputs.items()
    }
    expected = evaluate(inputs, "chunk")
    assert not views["k"].is_contiguous()
    for name, x in evaluate(views, "chunk").items():
        assert torch.equal(x, expected[name])


def test_second_derivatives_are_refused():
    inputs = random_inputs(5)
    (q, *_) = differentiable(inputs)
    o, _ = delta_product(**inputs, backend="chunk")
    (gradient,) = torch.autograd.grad(o.square().sum(), q, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        gradient.sum().backward()
