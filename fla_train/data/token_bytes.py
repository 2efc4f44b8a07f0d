"""How many bytes of text each token stands for, from which bits per byte follow."""

import json
import re

import numpy as np
from transformers import PreTrainedTokenizerBase

from fla_train.data.tokenizers import ids_needed

SPACE = "\u2581"  # how SentencePiece writes a space
FALLBACK = re.compile(r"<0x[0-9A-F]{2}>")  # SentencePiece's token of a single byte


def token_bytes(tokenizer: PreTrainedTokenizerBase) -> np.ndarray | None:
    """UTF-8 bytes of each token id, [ids] int64; special tokens have none.

    The sum over a text's tokens is the text's size, but for what the tokenizer changes before it cuts the
    text: SentencePiece puts a space before it, and some normalise characters.

    Returns:
        None for a tokenizer whose tokens do not spell the text: neither byte-level BPE nor SentencePiece.
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        return None
    content = json.loads(backend.to_str())
    spelling = json.dumps([content["decoder"], content["pre_tokenizer"]], ensure_ascii=False)
    by_bytes = "ByteLevel" in spelling
    if not by_bytes and SPACE not in spelling:
        return None
    sizes = np.zeros(ids_needed(tokenizer), np.int64)
    for piece, i in tokenizer.get_vocab().items():
        if by_bytes:
            sizes[i] = len(piece)  # a character stands for a byte
        else:
            sizes[i] = 1 if FALLBACK.fullmatch(piece) else len(piece.replace(SPACE, " ").encode())
    for i, token in tokenizer.added_tokens_decoder.items():
        sizes[i] = 0 if token.special else len(token.content.encode())
    return sizes
