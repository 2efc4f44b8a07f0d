"""The `chunk` backend against the recurrence in float64, and under the conditions of a CPU training run."""

import pytest
import torch

from tests.kernels.helpers import assert_matches_definition, random_inputs

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
