"""Continue prompts, one with streamed output or a batch."""

from collections.abc import Sequence
from typing import Any

import torch
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedModel, PreTrainedTokenizerBase, TextStreamer

from fla_train.hub.load import document_prefix


def generate(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, prompts: list[str], **options: Any
) -> list[str]:
    """Return the continuations of prompts, each read as the beginning of a document.

    Prompt and continuation are decoded together, because SentencePiece drops the space before the first
    token of a text.

    Args:
        options: as for `continue_tokens`.

    Raises:
        ValueError: a prompt is empty and the tokenizer has no token that begins a text.
    """
    prefix = document_prefix(model, tokenizer)
    rows = [prefix + tokenizer(text, add_special_tokens=False)["input_ids"] for text in prompts]
    if not all(rows):
        raise ValueError("this tokenizer has no token that begins a text: give a prompt")
    texts = []
    for row, tokens in zip(rows, continue_tokens(model, tokenizer, rows, **options), strict=True):
        known, text = (tokenizer.decode(x, skip_special_tokens=True) for x in (row, row + tokens))
        texts.append(text[len(known) :])
    return texts


def continue_tokens(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    rows: Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    temperature: float = 0.0,
    top_k: int = 0,
    top_p: float = 1.0,
    stream: bool = False,
) -> list[list[int]]:
    """Return the tokens that follow each of `rows`, generated as one batch.

    Shorter rows are padded on the left. Finished rows are filled with the padding token.

    Args:
        max_new_tokens: limit of new tokens; a row also ends at the end-of-sequence token.
        temperature: 0: the most likely token; otherwise tokens are drawn from torch's global generator.
        top_k: draw from the k most likely tokens; 0: all.
        top_p: draw from the smallest set of tokens with this total probability; 1: all.
        stream: print prompt and text token by token; for a single row.
    """
    pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id
    left = {"batch_first": True, "padding_side": "left"}
    ids = pad_sequence([torch.tensor(row) for row in rows], padding_value=pad or 0, **left)  # [B, T]
    mask = pad_sequence([torch.ones(len(row), dtype=torch.int64) for row in rows], **left)
    sampling = {"do_sample": True, "temperature": temperature, "top_k": top_k, "top_p": top_p}
    output = model.generate(
        ids.to(model.device),
        attention_mask=mask.to(model.device),
        max_new_tokens=max_new_tokens,
        pad_token_id=pad,
        streamer=TextStreamer(tokenizer, skip_special_tokens=True) if stream else None,
        **(sampling if temperature > 0 else {"do_sample": False}),
    )
    return output[:, ids.shape[1] :].tolist()
