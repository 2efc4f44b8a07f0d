"""Read the settings of the checkpoint `init_from`, and compare them with those of a run.

Importing this module imports no models, which would cost the launcher seconds.
"""

from typing import Any

from fla_train.data.config import TokenizerConfig
from fla_train.data.tokenizers import same_tokenizer
from fla_train.hub.card import recorded_config
from fla_train.hub.checkpoint_config import read_config, read_training_record, resolve_checkpoint
from fla_train.hub.paths import has_tokenizer
from fla_train.models.build import TOKEN_IDS, is_zoo, model_node, model_settings
from fla_train.models.settings import FREE_FIELDS
from fla_train.training.config import TrainConfig
from fla_train.utils.keys import rule
from fla_train.utils.overrides import flatten


def architecture(source: str) -> dict[str, Any]:
    """Return the `model` section for a run that starts from `source`.

    Raises:
        ValueError: `source` does not name a model of this package.
    """
    return model_node(read_config(resolve_checkpoint(source)))


def tokenizer_source(source: str) -> str | None:
    """Return `data.tokenizer.name` for a run that starts from `source`, or None without a tokenizer."""
    model = resolve_checkpoint(source)
    return str(model) if has_tokenizer(model) else None


def batch_sizes(source: str) -> dict[str, Any]:
    """Return the `trainer` keys of the batch that `source` was trained with, if it records them."""
    try:
        record = recorded_config(read_training_record(resolve_checkpoint(source)))
        trainer = record["trainer"] | {"target_batch_tokens": record["trainer"]["global_batch_tokens"]}
    except (KeyError, TypeError):  # an export of another program
        return {}
    return {k: value for k, value in trainer.items() if rule(TrainConfig, "from_weights", f"trainer.{k}")}


def check_initial_weights(config: TrainConfig) -> None:
    """Compare architecture and tokenizer of `init_from` with those of the run.

    Raises:
        ValueError: names the differences, and how to copy the values of `init_from`.
    """
    source = config.init_from
    initial = read_config(resolve_checkpoint(source), translate=not is_zoo(config.model))
    node = config.model | {"vocab_size": config.model["vocab_size"] or initial.vocab_size}
    new, old = (dict(flatten(model_node(settings))) for settings in (model_settings(node), initial))
    differing = [
        f"model.{name}={new.get(name)} (init_from has {old.get(name)})"
        for name in sorted({*new, *old})
        if name.removeprefix("config.") not in {*FREE_FIELDS, *TOKEN_IDS} and new.get(name) != old.get(name)
    ]
    if differing:
        raise ValueError(f"init_from={source} has another architecture: leave out {', '.join(differing)}")
    if config.task is not None:
        return
    tokenizer = tokenizer_source(source)
    if tokenizer is None:
        raise ValueError(f"init_from={source} has no tokenizer, so it can't train on text: choose task=")
    if not same_tokenizer(config.data.tokenizer, TokenizerConfig(name=tokenizer)):
        raise ValueError(f"init_from={source} has another tokenizer: set data.tokenizer.name={tokenizer}")
