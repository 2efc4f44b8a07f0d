"""Build any causal language model from a `model` node: one of our family, or another library's class.

The node of our family holds the fields of `DeltaProductConfig`. That of any other model has four keys:
`source` (the library), `model_type` (its name of the architecture), `config` (fields of that architecture's
config class) and `vocab_size`.
"""

import copy
import dataclasses
import inspect
from collections.abc import Mapping
from importlib import import_module
from typing import TYPE_CHECKING, Any

import torch
from transformers import PreTrainedConfig

from fla_train.models.auto import LazyModelConfig
from fla_train.models.configuration import MACHINE_KEYS, DeltaProductConfig, build_config, config_fields
from fla_train.models.zoo import fla, transformers
from fla_train.models.zoo.mamba_configuration import SignedMambaConfig

if TYPE_CHECKING:  # models take seconds to import: each function imports its own
    from transformers import PreTrainedModel

NODE_KEYS = ("source", "model_type", "config", "vocab_size")
TOKEN_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")  # the tokenizer's, unless the node has them
# No fields for node["config"]
ELSEWHERE = ("vocab_size", "model_type", "architectures", "dtype", "transformers_version")


def is_zoo(node: Mapping[str, Any]) -> bool:
    """Whether a `model` node is of a class beside our family: another library's, or signed Mamba."""
    return "source" in node


def architecture(node: Mapping[str, Any]) -> str:
    """A name for the model of a node, such as `gated_delta_product_2`, `delta_net+sliding_attention`, `gla`.

    Keys that the node of an older version lacks count as null.
    """
    if node.get("model_type"):
        return node["model_type"]
    layers, count = node.get("layer_types") or ["linear_attention"], node.get("num_householder") or 1
    if "linear_attention" not in layers:
        return "transformer"
    name = f"delta_product_{count}" if count > 1 else "delta_net"
    mixer = (node.get("mixer") or "").rpartition(":")[2]
    name = mixer or ("gated_" if node.get("use_forget_gate") else "") + name
    return "+".join([name, *sorted({*layers} - {"linear_attention"})])


def build_model_config(node: Mapping[str, Any]) -> PreTrainedConfig:
    """The config of a composed `model` node, a plain dict.

    A `vocab_size` of None, which no tokenizer has filled in yet, becomes the class's default.

    Raises:
        ValueError: an unknown key or class, a missing package, or settings that do not fit together.
    """
    if not is_zoo(node):
        return build_config(node)
    model_type, fields = node["model_type"], node["config"]
    kind = _config_class(node["source"], model_type)
    known = _settings(kind)
    if wrong := [name for name in ELSEWHERE if name in fields]:
        raise ValueError(f"model.config.{wrong[0]} can't be set: write model.vocab_size, model.model_type")
    given = {**dict.fromkeys(TOKEN_IDS), **fields}
    if node["vocab_size"] is not None:
        given["vocab_size"] = node["vocab_size"]
    try:
        config = kind(**given)
    except Exception as failure:  # whatever the class raises
        raise ValueError(f"model.config of {model_type}: {' '.join(str(failure).split())}") from failure
    # An unknown keyword stays as an attribute; one of an earlier version becomes a field.
    if unknown := sorted((fields.keys() & vars(config).keys()) - known):
        listed = ", ".join(sorted(class_fields(node["source"], model_type)))
        raise ValueError(
            f"model.config.{', model.config.'.join(unknown)}: no field of {kind.__name__}, which has {listed}"
        )
    return config


def _config_class(source: str, model_type: str) -> type[PreTrainedConfig]:
    match source:
        case "hf":
            return transformers.config_class(model_type)
        case "fla":
            return fla.config_class(model_type)
        case "fla_train" if model_type == SignedMambaConfig.model_type:
            return SignedMambaConfig
    raise ValueError(f"model.source={source} with model.model_type={model_type}: use hf or fla")


def class_fields(source: str, model_type: str) -> set[str]:
    """Names of the fields that `node["config"]` may have, without those that all classes share."""
    return _settings(_config_class(source, model_type)) - _settings(PreTrainedConfig) - {*ELSEWHERE}


def _settings(kind: type[PreTrainedConfig]) -> set[str]:
    """Names of the settings of a config class, with those that all classes share."""
    fields = {field.name for field in dataclasses.fields(kind)}
    return {*fields, *kind.attribute_map, *inspect.signature(kind.__init__).parameters} - {"self", "kwargs"}


def model_node(config: PreTrainedConfig) -> dict[str, Any]:
    """The `model` node that `build_model_config` makes `config` of, without the token ids of a tokenizer."""
    if isinstance(config, DeltaProductConfig):
        return {name: getattr(config, name) for name in config_fields() if name not in MACHINE_KEYS}
    source = {"transformers": "hf"}.get(library := type(config).__module__.split(".")[0], library)
    fields = {
        name: value
        for name, value in config.to_diff_dict().items()
        if name in _settings(type(config)) - {*ELSEWHERE, *TOKEN_IDS}
    }
    return {
        "source": source,
        "model_type": config.model_type,
        "config": fields,
        "vocab_size": config.vocab_size,
    }


def model_class(config: PreTrainedConfig) -> type["PreTrainedModel"]:
    """The causal language model that belongs to a config."""
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING

    if isinstance(config, LazyModelConfig):
        import_module(config.modeling_module)
    return MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]


def build_model(config: PreTrainedConfig) -> "PreTrainedModel":
    """The model of a config with fresh weights in fp32; on other libraries' classes with our loss.

    Raises:
        ValueError: settings that the config let pass and the class refuses, or a package that it needs.
    """
    kind = model_class(config)
    if isinstance(config, DeltaProductConfig):
        return kind(config).float()
    from fla_train.models.zoo.loss import with_fused_loss

    config = copy.copy(config)
    pad, config.pad_token_id = config.pad_token_id, None  # nn.Embedding never trains the row of a padding_idx
    try:
        model = with_fused_loss(kind)(config).float()
    except Exception as failure:
        raise ValueError(f"{kind.__name__} can't be built: {' '.join(str(failure).split())}") from failure
    model.config.pad_token_id = pad
    if config.model_type == "xlstm":
        from fla_train.models.zoo.xlstm import take_whole_chunks

        take_whole_chunks(model)
    return model


def build_on_meta(node: Mapping[str, Any]) -> "PreTrainedModel":
    """The model of a `model` node without memory for its weights, to be counted.

    Raises:
        ValueError: as `build_model_config` and `build_model`.
    """
    with torch.random.fork_rng(devices=[]), torch.device("meta"):
        return build_model(build_model_config(node))
