"""The models under torch.compile: no graph break, and loss and gradients are those of the eager model."""

import pytest
import torch
from small_models import small_config

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


@pytest.mark.skipif(CUDA, reason="the kernels are compiled there")
@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing_enable")
@pytest.mark.parametrize(
    ("variant", "triton", "packed", "autocast", "checkpointing"),
    [
        # tests/kernels/test_compile.py compiles each interpreted kernel alone.
        pytest.param("gated_delta_product", True, True, False, False, marks=pytest.mark.long),
        ("hybrid", False, True, True, True),
    ],
)
def test_one_graph_with_the_gradients_of_plain_pytorch(
    monkeypatch, tokens, variant, triton, packed, autocast, checkpointing
):
    """Interpreted Triton kernels or PyTorch under torch.compile against PyTorch without it."""
    for name in ("FORWARD", "BACKWARD"):
        monkeypatch.setattr(f"fla_train.kernels.fused_ops.short_conv.{name}", (4, 16, 64, 4))
    tokens = tokens[:1, :6] if triton else tokens.reshape(1, -1) if packed else tokens
    inputs = {"input_ids": tokens, "labels": tokens}
    if packed:
        length = tokens.shape[1]
        inputs["cu_seqlens"] = torch.tensor([0, 1, 3, length // 2, length // 2, length])
    layers = 2 if variant == "hybrid" else 1
    torch.manual_seed(0)
    model = DeltaProductForCausalLM(small_config(variant, backend="chunk", num_hidden_layers=layers)).train()
    if checkpointing:
        model.gradient_checkpointing_enable()
    expected = loss_and_gradients(model, model, autocast, **inputs)
    if triton:
        monkeypatch.setenv("FLA_TRAIN_FUSED_OPS", "triton")
        model.config.backend = "triton"
    run = torch.compile(model, fullgraph=True, backend="aot_eager")
    error = (loss_and_gradients(model, run, autocast, **inputs) - expected).norm() / expected.norm()
    assert error <= (2e-2 if autocast else 1e-5)  # products may round to another bf16, 2^-8 away


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing_enable")
@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("variant", ["gated_delta_product", "delta_net"])
def test_gpu_inductor(variant, checkpointing):
    """A whole step in inductor's code around the kernels; its fused arithmetic rounds elsewhere."""
    sizes = {"hidden_size": 128, "head_dim": 64, "intermediate_size": 256, "initializer_range": 0.05}
    model = DeltaProductForCausalLM(small_config(variant, backend="auto", **sizes)).cuda().train()
    if checkpointing:
        model.gradient_checkpointing_enable()
    tokens = torch.randint(1, 31, (2, 130), device="cuda")
    inputs = {"input_ids": tokens, "labels": tokens}
    expected = loss_and_gradients(model, model, True, **inputs)
    run = torch.compile(model, fullgraph=True)
    error = (loss_and_gradients(model, run, True, **inputs) - expected).norm() / expected.norm()
    assert error <= 2e-2
