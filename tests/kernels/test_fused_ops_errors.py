"""Which backend runs the fused ops, and the errors for arguments that do not fit."""

from collections.abc import Callable

import pytest
import torch

from fla_train.kernels.fused_ops import (
    consume_logits,
    recurrence_gates,
    resolve_backend,
    rms_norm,
    rotary,
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
        (
            lambda: recurrence_gates(torch.zeros(2, 3), torch.zeros(2, 3), None, None, beta_max=1.0),
            "together",
        ),
        (
            lambda: recurrence_gates(torch.zeros(2, 3), *torch.zeros(3, 3, 3).unbind(), beta_max=1.0),
            r"shapes \[2, 3\], \[3, 3\]",
        ),
        (
            lambda: recurrence_gates(
                torch.zeros(2, 6), torch.zeros(2, 4), *torch.zeros(2, 4).unbind(), beta_max=1.0
            ),
            r"shapes \[2, 6\], \[2, 4\]",
        ),
        (lambda: short_convolution(torch.zeros(1, 2, 3), torch.zeros(3, 1, 5), backend="triton"), "4 taps"),
        (lambda: short_convolution(torch.zeros(1, 2, 3), torch.zeros(3, 4)), "weight has shape"),
        (
            lambda: short_convolution(torch.zeros(1, 2, 3), torch.zeros(3, 1, 4), state=torch.zeros(1, 3, 4)),
            r"state has shape \[1, 3, 4\].* expected \[B, D, W-1\] = \[1, 3, 3\]",
        ),
        (
            lambda: short_convolution(
                torch.zeros(2, 2, 3), torch.zeros(3, 1, 4), position_in_document=torch.arange(2)
            ),
            "batch 1",
        ),
        (
            lambda: rotary(*torch.zeros(2, 1, 3, 2, 8), *torch.zeros(2, 3, 8)),
            r"expected \[B, T, H, D\], \[B, T, H_kv, D\], \[T, D/2\]",
        ),
        (lambda: rms_norm(torch.zeros(2, 3), torch.ones(2), 1e-6), r"weight has shape \[2\]"),
        (lambda: rms_norm(torch.zeros(2, 3), torch.ones(3), 1e-6, gate=torch.zeros(3)), "gate has shape"),
        (
            lambda: rms_norm(torch.zeros(1, 16385), torch.ones(16385), 1e-6, backend="triton"),
            "16384 channels",
        ),
        (
            lambda: swiglu_linear(torch.zeros(2, 2), torch.zeros(2, 2, dtype=torch.bfloat16), torch.eye(2)),
            "expected the same",
        ),
        (
            lambda: swiglu_linear(torch.zeros(2, 2), torch.zeros(2, 2), torch.zeros(2, 3)),
            r"weight has shape \[2, 3\]: expected \[D_out, 2\]",
        ),
        (
            lambda: consume_logits(torch.zeros(2, 3), torch.zeros(3), with_gradient=True),
            r"\[M, V\] and \[M\]",
        ),
    ],
)
def test_arguments_that_do_not_fit(call: Callable[[], object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()
