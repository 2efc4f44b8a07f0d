"""The tokens that stood before each document in training."""

import yaml
from transformers import PreTrainedTokenizerBase

PREFIX = "document_prefix"  # of an export's config: token ids, none or one


def trained_prefix(config: str | None, tokenizer: PreTrainedTokenizerBase) -> list[int] | None:
    """The tokens before documents by the training config, YAML; None without one.

    Documents end by EOS and have no BOS, so it is EOS, or nothing if the data had `append_eos=false`.
    """
    if config is None:
        return None
    data = (yaml.safe_load(config) or {}).get("data") or {}
    ended = data.get("append_eos") is not False and tokenizer.eos_token_id is not None
    return [tokenizer.eos_token_id] if ended else []
