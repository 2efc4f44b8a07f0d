"""The tokens that stood before each document in training."""

from collections.abc import Mapping
from typing import Any

import yaml
from transformers import PreTrainedTokenizerBase

PREFIX = "document_prefix"  # of an export's config: token ids, none or one


def trained_prefix(record: Mapping[str, Any], tokenizer: PreTrainedTokenizerBase) -> list[int] | None:
    """The tokens before documents by an export's record (fields of `CardInfo`); None: it has no training.

    Documents end by EOS and have no BOS, so it is EOS, or nothing if the data had `append_eos=false`.
    """
    if record.get("config") is None and record.get("seq_len") is None:
        return None
    data = (yaml.safe_load(record.get("config") or "") or {}).get("data") or {}
    ended = data.get("append_eos") is not False and tokenizer.eos_token_id is not None
    return [tokenizer.eos_token_id] if ended else []
