"""The config's checks, the YAML files, and counts of parameters, FLOPs and bytes."""

import pytest
import torch
from omegaconf import OmegaConf
from small_models import every_variant, small_config
from torch.utils.flop_counter import FlopCounterMode

from fla_train.cli.app import compose
from fla_train.kernels.delta_product.interface import BACKENDS
from fla_train.models.configuration import DeltaProductConfig
from fla_train.models.flops import attention_flops, count_parameters, flops_per_token
from fla_train.models.modeling import DeltaProductForCausalLM
from fla_train.models.settings import FIELDS
from fla_train.training.config import register


def test_all_errors_are_reported_together():
    with pytest.raises(ValueError) as error:
        DeltaProductConfig(num_heads=0, norm_eps=-1.0, use_cache=1, conv_size=2.5, backend="cuda")
    names = ("num_heads=0", "norm_eps=-1.0", "use_cache=1", "conv_size=2.5", "backend=cuda")
    assert all(f"model.{name} " in str(error.value) for name in names)
    with pytest.raises(ValueError) as error:
        DeltaProductConfig(hidden_act="nope", mixer="code", sliding_window=4, norm_after="attention")
    assert all(name in str(error.value) for name in ("=nope", "=code", "sliding_window", "norm_after"))


def test_every_backend_of_the_operator_can_be_set():
    assert [DeltaProductConfig(backend=name).backend for name in BACKENDS] == list(BACKENDS)


def test_layer_types_repeat_and_are_saved_for_attention_only(tmp_path):
    pattern = ["linear_attention", "sliding_attention", "full_attention"]
    config = small_config(num_hidden_layers=5, layer_types=pattern, sliding_window=3)
    assert config.layer_types == pattern + pattern[:2] and config.attention_layers == [1, 2, 4]
    config.save_pretrained(tmp_path)
    assert DeltaProductConfig.from_pretrained(tmp_path).to_dict() == config.to_dict() | {"backend": "auto"}
    # Options change a file's fields as arguments of the class do.
    assert len(DeltaProductConfig.from_pretrained(tmp_path, num_hidden_layers=6).layer_types) == 6
    with pytest.raises(ValueError, match="num_hidden_layers=1"):
        DeltaProductConfig.from_pretrained(tmp_path, num_hidden_layers=1)
    linear = small_config()
    assert linear.layer_types == 2 * ["linear_attention"] and linear.num_attention_heads == 2
    assert not {"layer_types", "num_attention_heads", "rope_theta"} & set(linear.to_diff_dict())


def test_the_yaml_files_have_every_field():
    register()
    """`max_position_embeddings` of an export is the training length."""
    assert {*compose("train").model, "max_position_embeddings"} == set(FIELDS)


def config_of(*overrides: str) -> DeltaProductConfig:
    register()
    return DeltaProductConfig.from_node(OmegaConf.to_container(compose("train", overrides).model))


@pytest.mark.parametrize(
    ("overrides", "millions"),
    [
        (["model=delta_net/340m"], 340),
        (["model=delta_net/340m", "model.num_heads=12"], 392),
        (["model=delta_product/340m"], 392),
        (["model=delta_product/340m", "model.num_householder=3"], 443),
        (["model=gated_delta_product/340m"], 393),
        (["model=delta_net/1.3b"], 1300),
        (["model=transformer/340m"], 340),
        (["model=transformer/1.3b"], 1300),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else str(value),
)
def test_the_papers_parameter_counts(overrides, millions):
    """Counts of arXiv 2502.10297 (340M class) and of the 1.3B class: embedding once, no output gate."""
    count = count_parameters(config_of(*overrides))
    assert abs(count.embedding_once / (millions * 1e6) - 1) < 0.01
    assert count.total == count.embedding_once + count.embedding


def test_norm_after_in_older_configs():
    values = [small_config("hybrid", norm_after=value).norm_after for value in (False, True)]
    assert values == [None, "attention"]


@pytest.mark.parametrize("tied", [True, False])
@every_variant
def test_count_equals_the_module_built_on_meta(variant, tied):
    config = small_config(variant, tie_word_embeddings=tied)
    with torch.device("meta"):
        model = DeltaProductForCausalLM(config)
    count = count_parameters(config)
    assert count == count_parameters(model)
    assert count.total == sum(p.numel() for p in model.parameters())
    assert count.body == sum(p.numel() for p in model.model.parameters()) - config.vocab_size * 16
    model.config.backend = "chunk"
    ids = torch.ones(1, 9, dtype=torch.long, device="meta")
    model(ids, labels=ids).loss.backward()  # counters of FLOPs and memory run such a pass
    assert all(p.grad.shape == p.shape for p in model.parameters())


def test_flops_by_hand():
    """Hidden 4, MLP 8, one head of K = V = 2, n_h = 2, vocabulary 10, one layer, width-4 convolutions."""
    sizes = {"vocab_size": 10, "hidden_size": 4, "num_hidden_layers": 1, "num_heads": 1, "head_dim": 2}
    config = DeltaProductConfig(**sizes, num_householder=2, intermediate_size=8)
    matmul_weights = 4 * (2 + 4 + 4 + 2) + 2 * 4 + 3 * 4 * 8 + 10 * 4
    convolution = 6 * 4 * (2 + 4 + 4)
    m = 64
    forward = 2 * (2 * m * 4 + 16 + m * m / 3) + 8 + 2 * m * 4
    backward = 2 * (40 + 12 * m + 4 * m) + 16 + 12 * m + 8 * m
    expected = 6 * matmul_weights + convolution + forward + backward
    assert flops_per_token(config, 128) == pytest.approx(expected)
    assert flops_per_token(config, 4096) == flops_per_token(config, 128)


@pytest.mark.parametrize("kind", ["full_attention", "sliding_attention"])
def test_attention_flops_are_those_of_torchs_counter(kind):
    """The counter also sees the scores that the mask hides: T keys per token instead of the visible ones."""
    length, window = 64, 5 if kind == "sliding_attention" else None
    config = small_config("transformer", layer_types=[kind], num_hidden_layers=3, sliding_window=window)
    model = DeltaProductForCausalLM(config)
    model.set_attn_implementation("eager")
    tokens = torch.zeros(1, length, dtype=torch.long)
    with FlopCounterMode(display=False) as counter:
        model(tokens, labels=tokens).loss.backward()
    visible = sum(min(t, window or t) for t in range(1, length + 1)) / length
    products = counter.get_flop_counts()["Global"][torch.ops.aten.bmm]  # only attention has batched ones
    assert attention_flops(config, length) == pytest.approx(products / length * visible / length)
