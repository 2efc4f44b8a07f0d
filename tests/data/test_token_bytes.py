"""Bytes of tokens against the texts that they were cut from."""

import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from fla_train.data.config import TokenizerConfig
from fla_train.data.tokenizers import encode, load_tokenizer, token_bytes

TEXTS = ["The sky is blue,\n\n  and so on.", "naïve 日本 <eos> Größe 🙂", "", "\t x = 1"]


def sentencepiece() -> PreTrainedTokenizerFast:
    """As Llama's: spaces are marked, and what the vocabulary lacks falls back to bytes."""
    pieces = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "\u2581", *"Theskyisblu,ax=1"]
    vocab = {piece: i for i, piece in enumerate(dict.fromkeys(pieces))}
    backend = Tokenizer(models.BPE(vocab=vocab, merges=[], byte_fallback=True, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never", split=False)
    backend.decoder = decoders.Metaspace()
    return PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="<unk>")


@pytest.mark.parametrize("name", ["bytes", "bpe", "sentencepiece"])
def test_they_add_up_to_the_text(name: str) -> None:
    tokenizer: PreTrainedTokenizerBase = (
        sentencepiece()
        if name == "sentencepiece"
        else load_tokenizer(TokenizerConfig(name=name, vocab_size=300), TEXTS)
    )
    sizes = token_bytes(tokenizer)
    for text, ids in zip(TEXTS, encode(tokenizer, TEXTS), strict=True):
        assert sizes[np.array(ids, dtype=int)].sum() == len(text.encode())
    assert not sizes[tokenizer.all_special_ids].any()


def test_words_do_not_spell_a_text() -> None:
    backend = Tokenizer(models.WordLevel({"<unk>": 0}, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    backend.train_from_iterator(TEXTS, trainers.WordLevelTrainer(special_tokens=["<unk>"]))
    assert token_bytes(PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="<unk>")) is None
