"""Continue prompts: one, printed token by token, or a batch."""

from collections.abc import Sequence

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase, TextStreamer

from fla_train.hub.load import document_prefix


def generate(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompts: list[str],
    *,
    max_new_tokens: int,
    temperature: float = 0.0,
    top_k: int = 0,
    top_p: float = 1.0,
    stream: bool = False,
) -> list[str]:
    """The continuations of prompts, which stand at the beginning of a document; they are generated together.

    Prompt and continuation are decoded together, since SentencePiece drops the space before the first token
    it is given.

    Args:
        max_new_tokens: stop after so many tokens, or at the end-of-sequence token.
        temperature: 0 takes the likeliest token; else tokens are drawn, from torch's global generator.
        top_k: draw among the k likeliest; 0 is all.
        top_p: draw among the fewest likeliest tokens with this share of the probability; 1 is all.
        stream: print the text as it comes, the prompt first; for one prompt.

    Raises:
        ValueError: a prompt is empty and the tokenizer has no token to begin with.
    """
    prefix = document_prefix(model, tokenizer)
    rows = [prefix + tokenizer(text, add_special_tokens=False)["input_ids"] for text in prompts]
    if not all(rows):
        raise ValueError("this tokenizer has no token that begins a text: give a prompt")
    made = continue_tokens(
        *(model, tokenizer, rows),
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        stream=stream,
    )
    found = []
    for row, tokens in zip(rows, made, strict=True):
        known, text = (tokenizer.decode(x, skip_special_tokens=True) for x in (row, row + tokens))
        found.append(text[len(known) :])
    return found


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
    """The tokens that follow each of `rows`, which are generated together; settings as those of `generate`.

    Shorter rows are padded on the left. A row that has ended is filled up with the padding token.
    """
    pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id
    width = max(map(len, rows))
    missing = [width - len(row) for row in rows]
    padded = [[pad or 0] * n + list(row) for n, row in zip(missing, rows, strict=True)]
    mask = [[0] * n + [1] * len(row) for n, row in zip(missing, rows, strict=True)]
    sampling = {"do_sample": True, "temperature": temperature, "top_k": top_k, "top_p": top_p}
    output = model.generate(
        torch.tensor(padded, device=model.device),  # [B, T]
        attention_mask=torch.tensor(mask, device=model.device),
        max_new_tokens=max_new_tokens,
        pad_token_id=pad,
        streamer=TextStreamer(tokenizer, skip_special_tokens=True) if stream else None,
        **(sampling if temperature > 0 else {"do_sample": False}),
    )
    return output[:, width:].tolist()
