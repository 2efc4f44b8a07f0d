"""The model with the fused ops' Triton kernels, interpreted, against the model in plain PyTorch."""

import pytest
import torch
from small_models import small_config

from fla_train.models.modeling import DeltaProductForCausalLM

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="the kernels are compiled there")


@pytest.fixture(autouse=True)
def _small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    from fla_train.kernels.fused_ops import short_conv

    monkeypatch.setattr(short_conv, "FORWARD", (4, 16, 64, 4))
    monkeypatch.setattr(short_conv, "BACKWARD", (4, 16, 64, 4))


def losses_and_gradients(monkeypatch, config, autocast: bool, checkpointing: bool, **inputs):
    """Loss and all gradients in one vector, per backend of the fused ops."""
    for backend in ("torch", "triton"):
        monkeypatch.setenv("FLA_TRAIN_FUSED_OPS", backend)
        torch.manual_seed(0)
        model = DeltaProductForCausalLM(config).train()
        if checkpointing:
            model.gradient_checkpointing_enable()
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            loss = model(**inputs).loss
        loss.backward()
        yield torch.cat([loss.detach()[None], *(p.grad.flatten() for p in model.parameters())])


@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing_enable")
@pytest.mark.parametrize(
    ("variant", "packed", "autocast", "checkpointing"),
    [
        ("gated_delta_product", True, False, False),
        ("hybrid", False, False, True),
        ("gated_delta_product", False, True, False),
    ],
)
def test_loss_and_gradients_agree(monkeypatch, tokens, variant, packed, autocast, checkpointing):
    inputs = {"input_ids": tokens, "labels": tokens}
    if packed:
        row = tokens.reshape(1, -1)
        inputs = {"input_ids": row, "labels": row, "cu_seqlens": torch.tensor([0, 1, 3, 19, 19, 57])}
    expected, actual = losses_and_gradients(
        monkeypatch, small_config(variant, initializer_range=0.1), autocast, checkpointing, **inputs
    )
    error = (actual - expected).norm() / expected.norm()
    assert error <= (6e-2 if autocast else 1e-5)  # the interpreter cuts to bf16 instead of rounding


def test_generation_agrees(monkeypatch, tokens):
    """Prefill, then single tokens that continue from the convolutions' states."""
    found = []
    for backend in ("torch", "triton"):
        monkeypatch.setenv("FLA_TRAIN_FUSED_OPS", backend)
        torch.manual_seed(0)
        model = DeltaProductForCausalLM(small_config()).eval()
        found.append(model.generate(tokens[:, :5], max_new_tokens=3, do_sample=False, pad_token_id=0))
    assert torch.equal(*found)
