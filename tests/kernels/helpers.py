"""Inputs and comparisons shared by the operator's tests."""

import torch
from torch import Tensor

from fla_train.kernels.delta_product.selfcheck import Case, evaluate, make_inputs, relative_rms


def random_inputs(
    tokens: int,
    num_householder: int = 1,
    *,
    key_dim: int = 8,
    value_dim: int = 5,
    heads: int = 2,
    seed: int = 0,
    dtype: torch.dtype = torch.float64,
    **case: object,
) -> dict:
    """Arguments of `delta_product`; `case` holds further fields of `Case` (beta, alpha, documents, ...)."""
    settings = Case("test", tokens, num_householder, **case)
    return make_inputs(settings, dtype, (key_dim, value_dim), seed, heads)


def differentiable(inputs: dict) -> list[Tensor]:
    """The floating tensors of `inputs`, as leaves that ask for gradients (written back into `inputs`)."""
    for name, x in inputs.items():
        if isinstance(x, Tensor) and x.is_floating_point():
            inputs[name] = x.detach().clone().requires_grad_()
    return [x for x in inputs.values() if isinstance(x, Tensor) and x.requires_grad]


def assert_agrees(results: dict[str, Tensor], expected: dict[str, Tensor], tolerance: float) -> None:
    """Every tensor within a relative RMS error; NaN never agrees."""
    assert results.keys() == expected.keys()
    errors = {name: relative_rms(results[name], expected[name]) for name in expected}
    assert all(error <= tolerance for error in errors.values()), errors


def assert_matches_definition(backend: str, inputs: dict, tolerance: float) -> None:
    """Outputs and all gradients of `backend` against the float64 recurrence."""
    reference = {
        name: x.double() if isinstance(x, Tensor) and x.is_floating_point() else x
        for name, x in inputs.items()
    }
    assert_agrees(evaluate(inputs, backend), evaluate(reference, "recurrent"), tolerance)
