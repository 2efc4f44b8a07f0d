"""Load the model and tokenizer of a checkpoint."""

import warnings
from pathlib import Path

import torch
from transformers import AutoTokenizer, PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from fla_train.hub.card import PREFIX
from fla_train.hub.checkpoint_config import (
    class_was_chosen,
    config_content,
    find_translation,
    one_line_errors,
    read_training_record,
    resolve_checkpoint,
)
from fla_train.hub.checksums import REMEDY, find_export_damage
from fla_train.hub.formats import FORMATS, format_name
from fla_train.hub.formats.read import load_reported
from fla_train.hub.paths import has_tokenizer
from fla_train.utils.errors import MixerError

FALLBACK_LENGTH = 2048
HASHED_BYTES = 1 << 24  # hashing all weights takes longer than loading them


def training_record(model: PreTrainedModel) -> dict:
    """Return training.json of the loaded export (fields of `CardInfo`); empty for any other model.

    Raises:
        ValueError: the file is damaged.
    """
    source = model.config.name_or_path
    return read_training_record(source, getattr(model.config, "_commit_hash", None)) if source else {}


def recorded_length(model: PreTrainedModel) -> int | None:
    """Return the tokens per training sequence from the export's record; None without a record."""
    return training_record(model).get("seq_len") or None


def trained_length(model: PreTrainedModel) -> int:
    """Return how many tokens an evaluation should read at once.

    This is `recorded_length`, else `max_position_embeddings`, else 2048. The latter two are not training
    lengths, so reports must not show them as such.
    """
    positions = getattr(model.config, "max_position_embeddings", None)
    return recorded_length(model) or positions or FALLBACK_LENGTH


def document_prefix(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Return the tokens before each document.

    These are those of training, if fla_train exported the model, else BOS, else EOS, else none.
    """
    trained = getattr(model.config, PREFIX, None)
    if trained is not None:
        return trained
    ids = [tokenizer.bos_token_id, tokenizer.eos_token_id]
    return [token for token in ids if token is not None][:1]


def load_model(
    checkpoint: str | Path,
    device: str | torch.device = "cpu",
    dtype: torch.dtype | None = None,
    *,
    mixer: str | None = None,
    trust_remote_code: bool = False,
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Load a causal language model in eval mode, and its tokenizer.

    Args:
        checkpoint: as for `resolve_checkpoint`.
        device: of the model.
        dtype: of the weights; None: the stored one.
        mixer: import path of a custom mixer, `package.module:Class`. A class that only the checkpoint names
            is imported with `trust_remote_code` alone.
        trust_remote_code: run the Python files of a model, and import the mixer that it names.

    Raises:
        ValueError: no such checkpoint, its files are missing or damaged, or it needs its own code.
    """
    source = resolve_checkpoint(checkpoint)
    model = load_causal_lm(source, device, dtype, mixer=mixer, trust_remote_code=trust_remote_code)
    if format_name(model.config.model_type) in FORMATS and not class_was_chosen(source):
        name = type(model).__name__
        line = f"{source} runs as its library's {name}; `fla-export format=hf` converts it to ours"
        warnings.warn_explicit(line, UserWarning, "fla_train", 1)
    return model, load_checkpoint_tokenizer(source, model.config, trust_remote_code=trust_remote_code)


def load_checkpoint_tokenizer(
    source: Path | str, config: PreTrainedConfig, *, trust_remote_code: bool = False
) -> PreTrainedTokenizerBase:
    """Load the tokenizer of a resolved checkpoint whose model has `config`.

    Raises:
        ValueError: it has none, or it can't be read.
    """
    try:
        with one_line_errors(source):
            return AutoTokenizer.from_pretrained(source, config=config, trust_remote_code=trust_remote_code)
    except ValueError as failure:
        if not has_tokenizer(source):
            reason = "has no tokenizer, which only suite=expressivity permits: save one there"
            raise ValueError(f"{source} {reason}") from failure
        raise


def load_causal_lm(
    checkpoint: str | Path,
    device: str | torch.device = "cpu",
    dtype: torch.dtype | None = None,
    *,
    mixer: str | None = None,
    trust_remote_code: bool = False,
    translate: bool | None = None,
) -> PreTrainedModel:
    """Load only the model, as `load_model` does. `translate`: see `find_translation`."""
    source = resolve_checkpoint(checkpoint)
    if isinstance(source, Path) and (damage := find_export_damage(source, hashed_bytes=HASHED_BYTES)):
        raise ValueError(f"{source}/{damage}: {REMEDY}")
    with one_line_errors(source):
        if mixer is not None and config_content(source).get("mixer") is None:
            raise MixerError(f"it has no custom mixer: leave out mixer={mixer}")
        translation = find_translation(source, translate)
        options = {"mixer": mixer, "trust_remote_code": trust_remote_code}
        model, report = load_reported(source, translation, dtype, **options)
    if report["missing_keys"]:
        raise ValueError(f"{source} lacks weights: {', '.join(sorted(report['missing_keys'])[:3])}")
    return model.to(device).eval()
