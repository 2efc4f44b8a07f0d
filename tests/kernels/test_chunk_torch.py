"""The `chunk` backend against the recurrence in float64, and under the conditions of a CPU training run."""

import pytest
import torch

from tests.kernels.helpers import assert_matches_definition, random_inputs
from tests.kernels.operator_cases import UNGATED, Case, assert_close, make_inputs, results, uniform

GATES = {
    "none": {},
    "open": {"alpha": (0.999, 1.0)},
    "half": {"alpha": (0.2, 1.0)},
    "nearly closed": {"alpha": (1e-30, 1e-3)},
    "closed at times": {"alpha": (0.5, 1.0), "closed_every": 3},
}


@pytest.mark.parametrize("gate", ["none", "half"])
@pytest.mark.parametrize(
    ("tokens", "num_householder"), [(1, 1), (1, 4), (2, 3), (63, 1), (63, 2), (65, 1), (65, 4), (100, 3)]
)
def test_every_length(tokens, num_householder, gate):
    inputs = random_inputs(tokens, num_householder, initial_state=True, **GATES[gate])
    assert_matches_definition("chunk", inputs, 1e-12)


@pytest.mark.parametrize("beta", [(0.0, 0.0), (1.99, 2.0)])
@pytest.mark.parametrize("gate", GATES)
def test_extreme_gates_and_step_sizes(gate, beta):
    inputs = random_inputs(70, 2, key_dim=6, value_dim=9, beta=beta, **GATES[gate], initial_state=True)
    assert_matches_definition("chunk", inputs, 1e-11)


def test_a_small_decay_behind_a_closed_gate_keeps_its_digits():
    inputs = random_inputs(64, alpha=(0.9999, 1.0), closed_every=2, dtype=torch.float32)
    assert_matches_definition("chunk", inputs, 2e-5)


@pytest.mark.parametrize(
    ("num_householder", "gate", "documents"),
    [(1, "half", (0, 0, 1, 66, 66, 130)), (3, "none", (0, 1, 2, 3, 130, 130)), (3, "half", (0, 130))],
)
def test_packed_documents(num_householder, gate, documents):
    inputs = random_inputs(130, num_householder, documents=documents, initial_state=True, **GATES[gate])
    assert_matches_definition("chunk", inputs, 1e-12)


@pytest.mark.parametrize("inputs", ["correlated", "repeated"])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-11), (torch.float32, 1e-4)])
def test_hard_keys(inputs, dtype, tolerance):
    """Keys that are alike, and step sizes near 2."""
    case = Case(96, 2, UNGATED, heads=2, inputs=inputs, scale=1.0)
    tensors, *gradients = make_inputs(case, "cpu")
    expected = results(case, tensors, *gradients, backend="recurrent", dtype=torch.float64)
    found = results(case, tensors, *gradients, backend="chunk", dtype=dtype)
    assert_close(found, expected, uniform(tolerance))
