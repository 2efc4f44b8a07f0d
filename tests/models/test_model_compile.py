"""The models under torch.compile: no graph break, and loss and gradients are those of the eager model."""

import pytest
import torch
from small_models import small_config

from fla_train.models import DeltaProductConfig
from fla_train.models.modeling import DeltaProductForCausalLM

CUDA = torch.cuda.is_available()
pytestmark = pytest.mark.usefixtures("fresh_compiler")


def loss_and_gradients(model: torch.nn.Module, run: object, autocast: bool, **inputs) -> torch.Tensor:
    """In one vector."""
    model.zero_grad()
    with torch.autocast(model.device.type, torch.bfloat16, enabled=autocast):
        loss = run(**inputs).loss
    loss.backward()
    return torch.cat([loss.detach()[None], *(p.grad.flatten() for p in model.parameters())])


def compare(
    config: DeltaProductConfig, device: str, inputs: dict, backend: str, autocast: bool, checkpointing: bool
):
    """Relative error of the compiled model's loss and gradients."""
    torch.manual_seed(0)
    model = DeltaProductForCausalLM(config).to(device).train()
    if checkpointing:
        model.gradient_checkpointing_enable()
    expected = loss_and_gradients(model, model, autocast, **inputs)
    run = torch.compile(model, fullgraph=True, backend=backend)
    return (loss_and_gradients(model, run, autocast, **inputs) - expected).norm() / expected.norm()


@pytest.mark.skipif(CUDA, reason="the kernels are compiled there")
@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing_enable")
@pytest.mark.parametrize(
    ("variant", "backend", "packed", "autocast", "checkpointing"),
    [
        ("gated_delta_product", "triton", False, False, False),
        ("gated_delta_product", "chunk", False, True, False),
        ("hybrid", "chunk", True, False, True),
    ],
)
def test_one_graph_with_the_gradients_of_the_eager_model(
    monkeypatch, tokens, variant, backend, packed, autocast, checkpointing
):
    if backend == "triton":
        monkeypatch.setenv("FLA_TRAIN_FUSED_OPS", "triton")
        monkeypatch.setattr("fla_train.kernels.fused_ops.short_conv.FORWARD", (4, 16, 64, 4))
        monkeypatch.setattr("fla_train.kernels.fused_ops.short_conv.BACKWARD", (4, 16, 64, 4))
        tokens = tokens[:1, :6]
    inputs = {"input_ids": tokens, "labels": tokens}
    if packed:
        row = tokens.reshape(1, -1)
        inputs = {"input_ids": row, "labels": row, "cu_seqlens": torch.tensor([0, 1, 3, 19, 19, 57])}
    config = small_config(
        variant, backend=backend, num_hidden_layers=1 + (variant in ("hybrid", "transformer"))
    )
    error = compare(config, "cpu", inputs, "aot_eager", autocast, checkpointing)
    assert error <= (2e-2 if autocast else 1e-6)  # products may round to another bf16, 2^-8 away


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing_enable")
@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("variant", ["gated_delta_product", "delta_net"])
def test_gpu_inductor(variant, checkpointing):
    """A whole step in inductor's code around the kernels; its fused arithmetic rounds elsewhere."""
    config = small_config(
        variant, hidden_size=128, head_dim=64, intermediate_size=256, backend="auto", initializer_range=0.05
    )
    tokens = torch.randint(1, 31, (2, 130), device="cuda")
    inputs = {"input_ids": tokens, "labels": tokens}
    error = compare(config, "cuda", inputs, "inductor", True, checkpointing)
    assert error <= 2e-2
