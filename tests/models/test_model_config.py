"""The config's checks, its Hydra schema, the YAML files, and counts of parameters, FLOPs and bytes."""

import dataclasses
import subprocess
import sys
from typing import Any

import pytest
import torch
from hydra.core.config_store import ConfigStore
from omegaconf import DictConfig, OmegaConf
from small_models import every_variant, small_config
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import LlamaConfig, LlamaForCausalLM

from fla_train.cli.app import compose
from fla_train.models import DeltaProductConfig, build_config, model_schema
from fla_train.models.activation_checkpointing import checkpoint_activations
from fla_train.models.flops import count_parameters, flops_per_token, training_memory_bytes
from fla_train.models.modeling import DeltaProductForCausalLM


class NewStorages(TorchDispatchMode):
    """The memory that operations of torch have returned."""

    def __init__(self) -> None:
        super().__init__()
        self.found = {}

    def __torch_dispatch__(self, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        results = operation(*args, **(kwargs or {}))
        for tensor in tree_leaves(results):
            if isinstance(tensor, torch.Tensor):
                storage = tensor.untyped_storage()
                self.found[storage._cdata] = (StorageWeakRef(storage), storage.nbytes())
        return results

    def alive(self) -> int:
        """Bytes that something still holds."""
        return sum(size for storage, size in self.found.values() if not storage.expired())


def test_auto_classes_build_a_model_of_a_config():
    """In a process that has imported no more than the package and an Auto class."""
    sizes = "vocab_size=97, hidden_size=16, num_hidden_layers=1, num_heads=1, head_dim=16"
    lines = [
        "import fla_train.models.auto",
        "from transformers import AutoModelForCausalLM",
        "from fla_train.models import DeltaProductConfig",
        f"print(type(AutoModelForCausalLM.from_config(DeltaProductConfig({sizes}))).__name__)",
    ]
    done = subprocess.run([sys.executable, "-c", "\n".join(lines)], capture_output=True, text=True)
    assert done.stdout.split() == ["DeltaProductForCausalLM"], done.stderr


def test_all_errors_are_reported_together():
    with pytest.raises(ValueError) as error:
        DeltaProductConfig(num_heads=0, norm_eps=-1.0, hidden_act="nope", conv_size=2.5, backend="cuda")
    for part in ("num_heads must", "norm_eps must", "hidden_act 'nope'", "conv_size must", "backend='cuda'"):
        assert part in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"layer_types": []}, "layer_types must be null or a list"),
        ({"layer_types": "full_attention"}, "layer_types must be null or a list"),
        ({"layer_types": ["full"]}, "layer_types must be null or a list"),
        ({"layer_types": ["full_attention"] * 3}, "names 3 layers, num_hidden_layers is 2"),
        ({"layer_types": ["sliding_attention"]}, "sliding_window is required"),
        ({"layer_types": ["full_attention"], "sliding_window": 5}, "sliding_window belongs to"),
        (
            {"layer_types": ["sliding_attention"], "sliding_window": 1},
            "sliding_window must be an integer >= 2",
        ),
        ({"layer_types": ["full_attention"], "num_attention_heads": 5}, "num_attention_heads 5 must divide"),
        (
            {"layer_types": ["full_attention"], "num_attention_heads": 0},
            "num_attention_heads must be an integer",
        ),
        ({"layer_types": ["full_attention"], "num_key_value_heads": 3}, "num_key_value_heads 3 must divide"),
        ({"rope_theta": "1e4"}, "rope_theta must be > 0 and finite"),
        ({"use_forget_gate": "false"}, "use_forget_gate must be true or false, got 'false'"),
        ({"allow_neg_eigval": None}, "allow_neg_eigval must be true or false, got None"),
        ({"num_householder": True}, "num_householder must be an integer >= 1, got True"),
    ],
)
def test_errors_of_attention_layers(fields, message):
    with pytest.raises(ValueError, match=message):
        small_config(**fields)


@pytest.mark.parametrize("value", [float("inf"), float("nan")])
@pytest.mark.parametrize("key", ["expand_v", "initializer_range", "embedding_multiplier"])
def test_sizes_and_scales_are_finite(key, value):
    with pytest.raises(ValueError, match=f"{key} must be > 0 and finite"):
        small_config(**{key: value})


def test_layer_types_repeat_and_are_saved_for_attention_only(tmp_path):
    pattern = ["linear_attention", "sliding_attention", "full_attention"]
    config = small_config(num_hidden_layers=5, layer_types=pattern, sliding_window=3)
    assert config.layer_types == pattern + pattern[:2] and config.attention_layers == [1, 2, 4]
    config.save_pretrained(tmp_path)
    assert DeltaProductConfig.from_pretrained(tmp_path).to_dict() == config.to_dict() | {"backend": "auto"}
    linear = small_config()
    assert linear.layer_types == 2 * ["linear_attention"] and linear.num_attention_heads == 2
    assert not {"layer_types", "num_attention_heads", "rope_theta"} & set(linear.to_diff_dict())


def test_unknown_keys_are_refused():
    with pytest.raises(ValueError, match="unknown head_dims, hiden_size"):
        build_config({"hiden_size": 3, "head_dims": 3, "num_heads": 2})


def test_intermediate_size_follows_the_rule():
    assert DeltaProductConfig().intermediate_size == 2816
    assert DeltaProductConfig(hidden_size=2048).intermediate_size == 5632
    assert DeltaProductConfig(intermediate_size=100).intermediate_size == 100


def test_schema_has_the_fields_and_defaults_of_the_config():
    schema, config = model_schema()(), DeltaProductConfig(intermediate_size=None)
    fields = {f.name: getattr(schema, f.name) for f in dataclasses.fields(schema)}
    assert fields.pop("intermediate_size") is None
    assert fields.pop("vocab_size") is None  # a run takes its tokenizer's
    for name in ("layer_types", "num_attention_heads", "num_key_value_heads"):  # the config fills them in
        assert fields.pop(name) is None
    assert fields == {name: getattr(config, name) for name in fields}
    assert {"num_householder", "rope_theta", "backend", "eos_token_id"} <= set(fields)


def compose_model(*overrides: str) -> DictConfig:
    """The `model` node as a command composes it: the schema under the YAML files under the overrides."""
    store = ConfigStore.instance()
    store.store(name="model_schema", node=model_schema(), package="model")
    defaults = ["model_schema", "cli", {"model": "gated_delta_product/tiny"}, "_self_"]
    store.store(name="model_test", node={"defaults": defaults})
    return compose("model_test", overrides).model


def config_of(*overrides: str) -> DeltaProductConfig:
    return build_config(OmegaConf.to_container(compose_model(*overrides), resolve=True))


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


@pytest.mark.parametrize("size", ["tiny", "340m", "1.3b"])
@pytest.mark.parametrize(
    ("variant", "householder", "gate"),
    [
        ("delta_net", 1, False),
        ("gated_delta_net", 1, True),
        ("delta_product", 2, False),
        ("gated_delta_product", 2, True),
    ],
)
def test_every_variant_and_size_composes(variant, size, householder, gate):
    node = compose_model(f"model={variant}/{size}")
    assert set(node) == {f.name for f in dataclasses.fields(model_schema())}
    config = config_of(f"model={variant}/{size}")
    assert (config.num_householder, config.use_forget_gate) == (householder, gate)
    assert config.allow_neg_eigval and not config.use_output_gate


@pytest.mark.parametrize(
    ("name", "attention"),
    [
        ("transformer/tiny", {"full_attention": [0, 1, 2, 3]}),
        ("hybrid/swa/tiny", {"sliding_attention": [1, 3]}),
        ("hybrid/swa/340m", {"sliding_attention": list(range(1, 24, 2))}),
        ("hybrid/global2/tiny", {"full_attention": [1, 2]}),
        ("hybrid/global2/340m", {"full_attention": [1, 12]}),  # the second and the 13th
        ("hybrid/3to1/tiny", {"full_attention": [3]}),
        ("hybrid/3to1/340m", {"full_attention": [3, 7, 11, 15, 19, 23]}),
    ],
)
def test_transformers_and_hybrids_compose(name, attention):
    config = config_of(f"model={name}")
    found = {}
    for layer in config.attention_layers:
        found.setdefault(config.layer_types[layer], []).append(layer)
    assert found == attention
    assert config.num_householder == 1


def test_hydra_refuses_unknown_keys_and_wrong_types():
    with pytest.raises(ValueError, match=r"did you mean model\.hidden_size"):
        compose_model("model.hiden_size=3")
    with pytest.raises(ValueError, match="could not be converted to Integer"):
        compose_model("model.num_heads=many")


@pytest.mark.parametrize("value", [False, True])
def test_what_the_operator_keeps_belongs_to_the_machine(value, tmp_path):
    config = config_of(f"model.recompute_operator={value}")
    assert config.recompute_operator is value
    config.save_pretrained(tmp_path)
    assert DeltaProductConfig.from_pretrained(tmp_path).recompute_operator is False
    assert DeltaProductConfig.from_pretrained(tmp_path, recompute_operator=value).recompute_operator is value


@pytest.mark.parametrize("value", ["1.5", "some", "null"])
def test_a_wrong_recompute_operator_is_named(value):
    with pytest.raises(ValueError, match="recompute_operator") as error:
        config_of(f"model.recompute_operator={value}")
    assert "\n" not in str(error.value)


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


@pytest.mark.parametrize("tied", [True, False])
def test_count_of_a_model_that_is_not_ours(tied):
    size = {"vocab_size": 32, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(**size, intermediate_size=24, tie_word_embeddings=tied))
    count = count_parameters(model)
    assert count.body == 4 * 16 * 16 + 3 * 16 * 24 + 3 * 16 and count.tied == tied
    assert count.embedding_once == count.body + 32 * 16
    assert count.total == sum(p.numel() for p in model.parameters())


def test_flops_by_hand():
    """Hidden 4, MLP 8, one head of K = V = 2, n_h = 2, vocabulary 10, one layer, width-4 convolutions."""
    config = DeltaProductConfig(
        vocab_size=10,
        hidden_size=4,
        num_hidden_layers=1,
        num_heads=1,
        head_dim=2,
        num_householder=2,
        intermediate_size=8,
    )
    matmul_weights = 4 * (2 + 4 + 4 + 2) + 2 * 4 + 3 * 4 * 8 + 10 * 4
    convolution = 6 * 4 * (2 + 4 + 4)
    m = 64
    forward = 2 * (2 * m * 4 + 16 + m * m / 3) + 8 + 2 * m * 4
    backward = 2 * (40 + 12 * m + 4 * m) + 16 + 12 * m + 8 * m
    expected = 6 * matmul_weights + convolution + forward + backward
    assert flops_per_token(config, 128) == pytest.approx(expected)
    assert flops_per_token(config, 4096) == flops_per_token(config, 128)


def test_attention_flops_count_visible_keys():
    full = small_config("hybrid_full_attention")
    windowed = small_config("hybrid")  # window 5
    positions = range(1, 65)
    difference = 12 * 16 * sum(t - min(t, 5) for t in positions) / 64
    assert flops_per_token(full, 64) - flops_per_token(windowed, 64) == pytest.approx(difference)


def test_training_memory_shards_the_optimizer():
    config = DeltaProductConfig(num_householder=2)
    one = training_memory_bytes(config, tokens_per_device=4096)
    eight = training_memory_bytes(config, tokens_per_device=4096, num_devices=8)
    assert one.parameters == eight.parameters == 4 * count_parameters(config).total
    assert eight.gradients == one.gradients and eight.optimizer * 8 == one.optimizer
    more = training_memory_bytes(config, tokens_per_device=4096, accumulates=True)
    assert one.total == one.parameters + one.optimizer + one.activations == more.total - one.gradients
    checkpointed = training_memory_bytes(config, tokens_per_device=4096, gradient_checkpointing=True)
    assert checkpointed.activations < one.activations / 4


@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing_enable")
@pytest.mark.parametrize("variant", ["gated_delta_product", "hybrid_full_attention"])
def test_selective_checkpointing_keeps_as_much_as_is_estimated(variant):
    sizes = {"hidden_size": 256, "head_dim": 64, "intermediate_size": 512, "backend": "chunk"}
    config = small_config(variant, **sizes)
    tokens = torch.randint(config.vocab_size, (2, 256))
    kept, estimate = [], []
    for mode in (True, "selective"):
        model = DeltaProductForCausalLM(config).train()
        checkpoint_activations(model, mode)
        with NewStorages() as storages:
            _loss = model(tokens, labels=tokens, use_cache=False).loss  # holds what is kept
        kept.append(storages.alive())
        of_run = {"tokens_per_device": tokens.numel(), "element_size": 4, "gradient_checkpointing": mode}
        estimate.append(training_memory_bytes(config, **of_run).activations)
    # The projections of the step size and of the decay, and padding, are not in the estimate.
    assert kept[1] - kept[0] == pytest.approx(estimate[1] - estimate[0], rel=0.1)
