"""Which backend runs the fused ops, and the errors for arguments that do not fit."""

from collections.abc import Callable

import pytest
import torch

from fla_train.kernels.fused_ops import (
    consume_logits,
    recurrence_gates,
    resolve_backend,
    rms_norm,
    short_convolution,
    swiglu_linear,
)


def test_backend_is_chosen_by_argument_variable_and_input(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.zeros(1)
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert resolve_backend("auto", x) == "torch" and resolve_backend("triton", x) == "triton"
    assert resolve_backend("auto", x.double()) == "torch"
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    with pytest.raises(ValueError, match="needs a CUDA device, got cpu: choose auto or torch"):
        resolve_backend("triton", x)
    with pytest.raises(ValueError, match=r"float64: choose auto or torch"):
        resolve_backend("triton", x.double())
    with pytest.raises(ValueError, match="backend='cuda' is unknown: choose auto, torch, triton"):
        resolve_backend("cuda", x)
    monkeypatch.setenv("FLA_TRAIN_FUSED_OPS", "")
    assert resolve_backend("auto", x) == "torch"
    monkeypatch.setenv("FLA_TRAIN_FUSED_OPS", "fast")
    assert resolve_backend("torch", x) == "torch"
    with pytest.raises(ValueError, match="FLA_TRAIN_FUSED_OPS='fast' is unknown"):
        resolve_backend("auto", x)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda x: recurrence_gates(x, *torch.zeros(3, 3, 3).unbind(), beta_max=1.0), "shapes"),
        (lambda x: short_convolution(x[None], torch.zeros(3, 1, 5), backend="triton"), "4 taps"),
        (lambda x: short_convolution(x[None], torch.zeros(3, 4)), "weight has shape"),
        (lambda x: rms_norm(x, torch.ones(2), 1e-6), "weight has shape"),
        (lambda x: swiglu_linear(x, x.bfloat16(), torch.eye(3)), "expected the same"),
        (lambda x: consume_logits(x, torch.zeros(3), with_gradient=True), "and"),
    ],
)
def test_arguments_that_do_not_fit(call: Callable[[torch.Tensor], object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call(torch.zeros(2, 3))
