"""The tokens that stood before each document in training."""

from collections.abc import Mapping
from typing import Any

from transformers import PreTrainedTokenizerBase

from fla_train.utils.safe_files import parse_yaml

PREFIX = "document_prefix"  # of an export's config: token ids, none or one


def recorded_config(record: Mapping[str, Any]) -> dict[str, Any]:
    """Return the training config that an export's record holds as YAML; empty without one.

    Raises:
        ValueError: it is not a mapping in YAML.
    """
    text = record.get("config")
    return parse_yaml(text, "the config in training.json") if text else {}


def trained_prefix(record: Mapping[str, Any], tokenizer: PreTrainedTokenizerBase) -> list[int] | None:
    """The tokens before documents by an export's record (fields of `CardInfo`); None: it has no training.

    Documents end by EOS and have no BOS, so it is EOS, or nothing if the data had `append_eos=false`.
    """
    if record.get("config") is None and record.get("seq_len") is None:
        return None
    data = recorded_config(record).get("data") or {}
    ended = data.get("append_eos") is not False and tokenizer.eos_token_id is not None
    return [tokenizer.eos_token_id] if ended else []
