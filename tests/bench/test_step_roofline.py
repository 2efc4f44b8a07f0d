"""Roofline of a training step: bytes against the tensors that pass a model's modules, times by hand."""

import pytest
import torch
from torch import Tensor, nn

from fla_train.bench.roofline import Ceilings, elementwise_bytes, step_roofline
from fla_train.cli.app import compose
from fla_train.models import build_config, layers
from fla_train.models.layers import RMSNorm, ShortConvolution
from fla_train.models.mixers import attention
from fla_train.models.modeling import DeltaProductForCausalLM
from fla_train.training.config import TrainConfig, register, to_config

SIZES = {"vocab_size": 50, "hidden_size": 32, "num_heads": 2, "head_dim": 8, "expand_v": 1.5}
SIZES |= {"num_hidden_layers": 3, "intermediate_size": 40}
MODELS = [
    {},
    {"num_householder": 3, "use_forget_gate": False},
    {"use_output_gate": False},
    {"use_short_conv": False, "num_householder": 2},
    {
        "layer_types": ["linear_attention", "full_attention"],
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "tie_word_embeddings": True,
    },
]


@pytest.mark.parametrize("sizes", [(2, 4), (2, 2), (4, 4)], ids=str)  # of activations, of the residual stream
@pytest.mark.parametrize("options", MODELS, ids=str)
def test_bytes_are_those_of_the_tensors_that_pass(
    options: dict, sizes: tuple[int, int], monkeypatch: pytest.MonkeyPatch
):
    """Backward reads the inputs and the gradients of outputs, and writes those of inputs."""
    (e, s), tokens = sizes, 5
    config = build_config(SIZES | options | {"residual_in_fp32": s == 4})
    model, moved = DeltaProductForCausalLM(config), []

    def add(inputs: list[Tensor], output: Tensor) -> None:
        moved.append(e * (3 * sum(x.numel() for x in inputs) + 2 * output.numel()))

    def watch(module: nn.Module, inputs: tuple, named: dict, output) -> None:
        x, residual = inputs[0], named.get("residual")
        if residual is not None:  # read x, residual, sum, dy, dsum; written y, sum, dx, dresidual
            moved.append(e * (2 * x.numel() + 2 * output[0].numel()) + s * 5 * residual.numel())
            moved.append(-e * x.numel() if s == e else 0)  # dx, which is dresidual
        elif isinstance(module, RMSNorm) and module is model.model.layers[0].attn_norm:
            moved.append(s * 3 * x.numel() + e * 2 * output.numel())
        else:
            gates = [gate for gate in (*inputs[1:2], named.get("gate")) if isinstance(gate, Tensor)]
            add([x, *gates], output[0] if isinstance(output, tuple) else output)

    for module in model.modules():
        if isinstance(module, RMSNorm | ShortConvolution):
            module.register_forward_hook(watch, with_kwargs=True)
    swiglu_linear = layers.swiglu_linear

    def watched(gate: Tensor, up: Tensor, weight: Tensor) -> Tensor:
        add([gate, up], gate)
        moved.append(e * gate.numel())  # the product once more, in the backward pass
        return swiglu_linear(gate, up, weight)

    monkeypatch.setattr(layers, "swiglu_linear", watched)
    rotary = attention.rotary

    def watched_rotary(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        moved.append(4 * e * (q.numel() + k.numel()))
        return rotary(q, k, cos, sin)

    monkeypatch.setattr(attention, "rotary", watched_rotary)
    model(torch.arange(tokens)[None], use_cache=False)
    assert sum(moved) == tokens * elementwise_bytes(config, e)


def test_roofline_is_bytes_and_flops_over_the_ceilings():
    register()
    overrides = ["model=gated_delta_product/tiny", "model.num_hidden_layers=1", "trainer.precision=bf16"]
    overrides += [
        f"trainer.{size}" for size in ("micro_batch_size=2", "seq_len=32", "global_batch_tokens=256")
    ]
    config = to_config(compose("train", overrides))
    model, slow = build_config(config.model), Ceilings(1e6, 1e6, "given")
    bounds = step_roofline(config, 256, 1000, slow)
    weights = DeltaProductForCausalLM(model).num_parameters() - (
        0 if model.tie_word_embeddings else model.vocab_size * model.hidden_size
    )
    assert bounds["matmuls"] == pytest.approx(1e3 * 6 * 256 * weights / 1e6)
    assert bounds["optimizer"] == pytest.approx(1e3 * 7 * 4 * 1000 / 1e6)
    casts = 4 * 2 * (4 + 2) * weights  # four micro-batches: weights one way, gradients the other
    assert bounds["elementwise"] == pytest.approx((256 * elementwise_bytes(model, 2) + casts) / 1e3)
    half = step_roofline(config, 128, 1000, slow)
    assert [half[kind] * 2 for kind in ("operator", "matmuls")] == pytest.approx(
        [bounds[kind] for kind in ("operator", "matmuls")]
    )


def test_roofline_of_one_of_several_ranks():
    register()
    sizes = ["trainer.micro_batch_size=2", "trainer.seq_len=32", "trainer.global_batch_tokens=256"]

    def config_with(*more: str) -> TrainConfig:
        return to_config(compose("train", ["model=gated_delta_product/tiny", *sizes, *more]))

    def communication(*more: str) -> float:
        return step_roofline(config_with(*more), 256, 1000, slow, ranks=2, link=1e6)["communication"]

    config = config_with()
    slow = Ceilings(1e6, 1e6, "given")
    alone = step_roofline(config, 128, 1000, slow)
    one_of_two = step_roofline(config, 256, 1000, slow, ranks=2, link=1e6)
    # Gradients and weights once: half of 4,000 bytes each goes to the other rank.
    assert one_of_two.pop("communication") == pytest.approx(2 * 2000 / 1e3)
    assert one_of_two.pop("optimizer") == pytest.approx(alone.pop("optimizer") / 2)
    assert one_of_two == pytest.approx(alone)
    assert "communication" not in step_roofline(config, 256, 1000, slow, ranks=2)
    assert communication("trainer.gradient_reduction=bf16") == pytest.approx((1000 + 2000) / 1e3)
    # Gradients of two micro-batches, both ways
    overlapped = communication("launch.overlap_communication=true")
    assert overlapped == pytest.approx((2 * 2 * 2000 + 2000) / 1e3)
