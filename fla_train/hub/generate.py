"""Generate text from a prompt and print it token by token."""

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase, TextStreamer

from fla_train.hub.load import document_prefix


def stream(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompt: str,
    *,
    max_new_tokens: int,
    temperature: float = 0.0,
    top_k: int = 0,
    top_p: float = 1.0,
) -> str:
    """Print `prompt` and its continuation to stdout; the prompt stands at the beginning of a document.

    Both are decoded together, since SentencePiece drops the space before the first token it is given.

    Args:
        max_new_tokens: stop after so many tokens, or at the end-of-sequence token.
        temperature: 0 takes the likeliest token; else tokens are drawn, from torch's global generator.
        top_k: draw among the k likeliest; 0 is all.
        top_p: draw among the fewest likeliest tokens with this share of the probability; 1 is all.

    Returns:
        The continuation.

    Raises:
        ValueError: the prompt is empty and the tokenizer has no token to begin with.
    """
    ids = document_prefix(model, tokenizer) + tokenizer(prompt, add_special_tokens=False)["input_ids"]
    if not ids:
        raise ValueError("this tokenizer has no token that begins a text: give a prompt")
    sampling = {"do_sample": True, "temperature": temperature, "top_k": top_k, "top_p": top_p}
    inputs = torch.tensor([ids], device=model.device)  # [1, T]
    output = model.generate(
        inputs,
        attention_mask=torch.ones_like(inputs),
        max_new_tokens=max_new_tokens,
        pad_token_id=tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id,
        streamer=TextStreamer(tokenizer, skip_special_tokens=True),
        **(sampling if temperature > 0 else {"do_sample": False}),
    )
    known, text = (tokenizer.decode(x, skip_special_tokens=True) for x in (ids, output[0]))
    return text[len(known) :]
