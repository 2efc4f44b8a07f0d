"""Build any causal language model from a `model` node of a config.

A node without `source` has the fields of `DeltaProductSettings`. Any other node has four keys: `source` (the
library), `model_type` (its name of the architecture), `config` (fields of its config) and `vocab_size`.

The launcher of a run imports this module, but neither transformers nor models, unless its model needs them.
"""

import copy
import dataclasses
import inspect
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from fla_train.models.settings import FIELDS, MACHINE_KEYS, DeltaProductSettings

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

TOKEN_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")  # the tokenizer's, unless the node sets them
# Keys that node["config"] may not have.
NOT_FIELDS = ("vocab_size", "model_type", "architectures", "dtype", "transformers_version")


def is_zoo(node: Mapping[str, Any]) -> bool:
    """Return whether a `model` node describes a class outside the DeltaProduct family."""
    return "source" in node


def architecture(node: Mapping[str, Any]) -> str:
    """Return a name for a node's model: `gated_delta_product_2`, `delta_net+sliding_attention`, `gla`."""
    if node.get("model_type"):
        return node["model_type"]
    layers, count = node.get("layer_types") or ["linear_attention"], node.get("num_householder") or 1
    if "linear_attention" not in layers:
        return "transformer"
    name = f"delta_product_{count}" if count > 1 else "delta_net"
    mixer = (node.get("mixer") or "").rpartition(":")[2]
    name = mixer or ("gated_" if node.get("use_forget_gate") else "") + name
    return "+".join([name, *sorted({*layers} - {"linear_attention"})])


def model_settings(node: Mapping[str, Any]) -> "DeltaProductSettings | PreTrainedConfig":
    """Check a `model` node as `build_model_config` does, and build the config only if it needs classes."""
    plain = not is_zoo(node) and node.get("mixer") is None
    return DeltaProductSettings.from_node(node) if plain else build_model_config(node)


def build_model_config(node: Mapping[str, Any]) -> "PreTrainedConfig":
    """Build the config of a composed `model` node, a plain dict.

    A `vocab_size` of None, before a tokenizer is known, becomes the class's default.

    Raises:
        ValueError: an unknown key or class, a missing package, or settings that contradict each other.
    """
    from transformers import PreTrainedConfig

    from fla_train.models.configuration import DeltaProductConfig

    if not is_zoo(node):
        return DeltaProductConfig.from_node(node)
    model_type, fields = node["model_type"], node["config"]
    config_class = _config_class(node["source"], model_type)
    known = _settings(config_class)
    if wrong := [name for name in NOT_FIELDS if name in fields]:
        raise ValueError(f"model.config.{wrong[0]} can't be set: write model.vocab_size, model.model_type")
    options = {**dict.fromkeys(TOKEN_IDS), **fields}
    if node["vocab_size"] is not None:
        options["vocab_size"] = node["vocab_size"]
    try:
        config = config_class(**options)
    except Exception as failure:  # classes raise anything
        raise ValueError(f"model.config of {model_type}: {' '.join(str(failure).split())}") from failure
    # transformers keeps unknown keywords as attributes, and turns those of earlier versions into fields.
    if unknown := sorted((fields.keys() & vars(config).keys()) - known):
        listed = ", ".join(sorted(known - _settings(PreTrainedConfig) - {*NOT_FIELDS}))
        names = ", model.config.".join(unknown)
        raise ValueError(f"model.config.{names}: no field of {config_class.__name__}, which has {listed}")
    return config


def _config_class(source: str, model_type: str) -> "type[PreTrainedConfig]":
    # They import the list of transformers' models: half a second.
    from fla_train.models.zoo import fla, transformers
    from fla_train.models.zoo.mamba_configuration import SignedMambaConfig

    match source:
        case "hf":
            return transformers.config_class(model_type)
        case "fla":
            return fla.config_class(model_type)
        case "fla_train" if model_type == SignedMambaConfig.model_type:
            return SignedMambaConfig
    raise ValueError(f"model.source={source} with model.model_type={model_type}: use hf or fla")


def _settings(config_class: "type[PreTrainedConfig]") -> set[str]:
    """Return the names of the settings of a config class, including inherited ones."""
    fields = {field.name for field in dataclasses.fields(config_class)}
    parameters = inspect.signature(config_class.__init__).parameters
    return {*fields, *config_class.attribute_map, *parameters} - {"self", "kwargs"}


def model_node(config: "DeltaProductSettings | PreTrainedConfig") -> dict[str, Any]:
    """Return the `model` node from which `build_model_config` builds `config`, without token ids."""
    if isinstance(config, DeltaProductSettings):
        return {name: getattr(config, name) for name in FIELDS if name not in MACHINE_KEYS}
    library = type(config).__module__.split(".")[0]
    source = "hf" if library == "transformers" else library
    names = _settings(type(config)) - {*NOT_FIELDS, *TOKEN_IDS}
    fields = {name: value for name, value in config.to_diff_dict().items() if name in names}
    return {
        "source": source,
        "model_type": config.model_type,
        "config": fields,
        "vocab_size": config.vocab_size,
    }


def model_class(config: "PreTrainedConfig") -> type["PreTrainedModel"]:
    """Return the causal language model class of a config."""
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING

    import fla_train.models.auto  # noqa: F401

    return MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]


def build_model(config: "PreTrainedConfig") -> "PreTrainedModel":
    """Build the model of a config with new weights in fp32. Other libraries' classes get the fused loss.

    Raises:
        ValueError: the class rejects settings that its config accepts, or needs a missing package.
    """
    cls = model_class(config)
    if isinstance(config, DeltaProductSettings):
        return cls(config).float()
    from fla_train.models.zoo.loss import with_fused_loss

    config = copy.copy(config)
    pad, config.pad_token_id = config.pad_token_id, None  # nn.Embedding never trains the row of a padding_idx
    try:
        model = with_fused_loss(cls)(config).float()
    except Exception as failure:  # classes raise anything
        raise ValueError(f"{cls.__name__} can't be built: {' '.join(str(failure).split())}") from failure
    model.config.pad_token_id = pad
    return model


def countable(node: Mapping[str, Any]) -> "DeltaProductSettings | PreTrainedModel":
    """Return what `count_parameters` counts for a `model` node: settings, or a model on the meta device."""
    return build_on_meta(node) if is_zoo(node) else model_settings(node)


def build_on_meta(node: Mapping[str, Any]) -> "PreTrainedModel":
    """Build the model of a `model` node on the meta device, to count it.

    Raises:
        ValueError: as `build_model_config` and `build_model`.
    """
    with torch.random.fork_rng(devices=[]), torch.device("meta"):
        return build_model(build_model_config(node))
