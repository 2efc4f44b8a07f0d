"""`init_from`: weights that a run starts from, of an earlier run, an exported folder or the Hub."""

from pathlib import Path
from typing import Any

import yaml
from transformers import AutoConfig, PreTrainedModel

from fla_train.data.config import TokenizerConfig
from fla_train.data.tokenizers import same_tokenizer
from fla_train.hub.load import load_weights, read_training_record, resolve_checkpoint
from fla_train.models.configuration import MACHINE_KEYS, DeltaProductConfig, build_config, config_fields
from fla_train.training.config import TrainConfig

# Fields that a run may choose anew: they change neither the weights nor what the model computes from them.
FREE_FIELDS = (*MACHINE_KEYS, "hidden_ratio", "max_position_embeddings", "initializer_range", "use_cache")
TOKEN_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")  # the tokenizer's, which is compared by itself


def architecture(source: str) -> dict[str, Any]:
    """The `model` section of a run that starts from `source`.

    Raises:
        ValueError: `source` names no model of this package.
    """
    config = _config(source)
    return {name: getattr(config, name) for name in config_fields() if name not in MACHINE_KEYS}


def tokenizer_source(source: str) -> str | None:
    """What `data.tokenizer.name` is for a run that starts from `source`; None: it has no tokenizer."""
    found = resolve_checkpoint(source)
    if isinstance(found, Path) and not any(found.glob("tokenizer*")):  # of a synthetic task
        return None
    return str(found)


def batch_sizes(source: str) -> dict[str, Any]:
    """The `trainer` keys of the batch that `source` was trained with, as far as it records them."""
    try:
        record = yaml.safe_load(read_training_record(resolve_checkpoint(source))["config"] or "")
        trainer = record["trainer"] | {"target_batch_tokens": record["trainer"]["global_batch_tokens"]}
    except (yaml.YAMLError, KeyError, TypeError):  # another program's export
        return {}
    kinds = {
        "seq_len": int,
        "micro_batch_size": int,
        "target_batch_tokens": int,
        "activation_checkpointing": bool,
    }
    return {key: trainer[key] for key, kind in kinds.items() if type(trainer.get(key)) is kind}


def check_initial_weights(config: TrainConfig) -> None:
    """Compare architecture and tokenizer of `init_from` with those of the run.

    Raises:
        ValueError: naming what differs, and how to take it from `init_from`.
    """
    source = config.init_from
    ours, theirs = build_config(config.model), _config(source)
    differing = [
        f"model.{name}={getattr(ours, name)} (there {getattr(theirs, name)})"
        for name in config_fields()
        if name not in FREE_FIELDS + TOKEN_IDS and getattr(ours, name) != getattr(theirs, name)
    ]
    if differing:
        raise ValueError(
            f"init_from={source} has another architecture: {', '.join(differing)}; without these overrides "
            "the run takes its model from there"
        )
    if config.task is not None:
        return
    tokenizer = tokenizer_source(source)
    if tokenizer is None:
        raise ValueError(f"init_from={source} has no tokenizer, so it can't train on text: choose task=")
    if not same_tokenizer(config.data.tokenizer, TokenizerConfig(name=tokenizer)):
        raise ValueError(
            f"init_from={source} was trained with another tokenizer than data.tokenizer.name="
            f"{config.data.tokenizer.name}: set data.tokenizer.name={tokenizer}"
        )


def load_initial_weights(model: PreTrainedModel, source: str) -> None:
    """Copy the weights of `source` into `model`, whose architecture `check_initial_weights` has compared.

    Raises:
        ValueError: they are missing or damaged.
    """
    model.load_state_dict(load_weights(source, dtype=model.dtype).state_dict())


def _config(source: str) -> DeltaProductConfig:
    found = resolve_checkpoint(source)
    try:
        config = AutoConfig.from_pretrained(found, trust_remote_code=False)
    except (OSError, ValueError) as failure:
        reason = str(failure).strip().partition("\n")[0]
        raise ValueError(f"init_from={source} can't be read: {reason}") from failure
    if not isinstance(config, DeltaProductConfig):
        raise ValueError(
            f"init_from={source} is a {config.model_type} model: only models of this package can be continued"
        )
    return config
