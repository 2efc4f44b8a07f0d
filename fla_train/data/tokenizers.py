"""Tokenizers: bytes, a byte-level BPE trained on the corpus, or whatever `AutoTokenizer` loads."""

import hashlib
import json
from collections.abc import Iterable
from itertools import islice
from pathlib import Path

import tokenizers
from huggingface_hub.errors import LocalEntryNotFoundError
from tokenizers import decoders, models, pre_tokenizers, trainers
from transformers import (
    AutoTokenizer,
    GPT2Tokenizer,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
)

from fla_train.data.config import DataConfig, TokenizerConfig
from fla_train.data.encoding import Encoder
from fla_train.data.faults import Interrupted
from fla_train.data.sentencepiece import from_sentencepiece

PAD, BOS, EOS = "<pad>", "<bos>", "<eos>"


class TokenizerNotCached(ValueError):
    """A tokenizer of the Hub is not on this machine, and was not to be fetched."""


def load_tokenizer(
    config: TokenizerConfig, train_texts: Iterable[str] = (), *, offline: bool = False
) -> PreTrainedTokenizerBase:
    """The tokenizer that `config` names; `train_texts` is read only by "bpe".

    Args:
        offline: take one on the Hub from its cache, or not at all.

    Raises:
        TokenizerNotCached: `offline`, and it is not there.
        Interrupted: the Hub can't be asked for it.
        ValueError: if it cannot be found or loaded, or if there is no text to train on.
    """
    match config.name:
        case "bytes":
            return _byte_tokenizer()
        case "bpe":
            return _train_bpe(train_texts, config.vocab_size, config.train_bytes)
    return _pretrained(config.name, config.eos_token, offline)


def encode(tokenizer: PreTrainedTokenizerBase, texts: list[str]) -> list[list[int]]:
    """Token ids of each text. None are special: `</s>` in a text stays text and ends no document."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        return tokenizer(texts, add_special_tokens=False, split_special_tokens=True)["input_ids"]
    _keep_texts_whole(tokenizer)
    before = backend.encode_special_tokens
    backend.encode_special_tokens = True
    try:
        return [e.ids for e in backend.encode_batch_fast(texts, add_special_tokens=False)]
    finally:
        backend.encode_special_tokens = before


def make_encoder(tokenizer: PreTrainedTokenizerBase, folder: Path, config: DataConfig, dtype: str) -> Encoder:
    """What tokenizes a corpus as `config` says; `folder` holds the saved tokenizer."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    return Encoder(
        backend=backend.to_str() if backend else None,
        folder=str(folder),
        separator=tokenizer.eos_token_id if config.append_eos else None,
        validation_fraction=config.validation_fraction,
        dtype=dtype,
    )


def fingerprint(tokenizer: PreTrainedTokenizerBase) -> str:
    """sha256 of what decides the ids: the saved backend, or the vocabulary of a tokenizer without one."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    content = backend.to_str() if backend else json.dumps(tokenizer.get_vocab(), sort_keys=True)
    special = [tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id]
    return hashlib.sha256(f"{content}{special}".encode()).hexdigest()


def ids_needed(tokenizer: PreTrainedTokenizerBase) -> int:
    """Its largest id + 1: more than `len(tokenizer)` where the vocabulary has holes."""
    return max(len(tokenizer), max(tokenizer.get_vocab().values()) + 1)


def tokenizer_size(config: TokenizerConfig, *, offline: bool = False) -> int:
    """Rows that an embedding needs for the tokenizer, known before any text is read.

    Args:
        offline: take a tokenizer of the Hub from the cache, or raise `TokenizerNotCached`.

    Raises:
        ValueError: as `load_tokenizer`.
    """
    if config.name == "bpe":  # a small corpus may train fewer
        return config.vocab_size
    return ids_needed(load_tokenizer(config, offline=offline))


def same_tokenizer(one: TokenizerConfig, other: TokenizerConfig) -> bool:
    """Whether both give every text the same ids. A bpe that is yet to be trained equals no other."""
    if one == other:
        return True
    if "bpe" in (one.name, other.name):
        return False
    return fingerprint(load_tokenizer(one)) == fingerprint(load_tokenizer(other))


def _byte_tokenizer() -> PreTrainedTokenizerFast:
    """256 bytes after the special tokens: byte b has id b + 3."""
    symbols = _byte_symbols()
    vocab = {PAD: 0, BOS: 1, EOS: 2} | {symbols[b]: b + 3 for b in range(256)}
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    return _wrap(backend)


def _train_bpe(texts: Iterable[str], vocab_size: int, train_bytes: int) -> PreTrainedTokenizerFast:
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[PAD, BOS, EOS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    texts = iter(texts)
    first = list(islice(texts, 1))
    if not first:
        raise ValueError("the corpus has no training document to train the bpe tokenizer on; see data.path")

    def limited():
        left = train_bytes
        for part in (first, texts):
            for text in part:
                if left <= 0:
                    return
                left -= len(text.encode("utf-8"))
                yield text

    backend.train_from_iterator(limited(), trainer)
    return _wrap(backend)


def _wrap(backend: tokenizers.Tokenizer) -> PreTrainedTokenizerFast:
    for token in (PAD, BOS, EOS):
        backend.add_special_tokens([tokenizers.AddedToken(token, special=True, normalized=False)])
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token=PAD,
        bos_token=BOS,
        eos_token=EOS,
        clean_up_tokenization_spaces=False,
    )


def _byte_symbols() -> list[str]:
    """The character that stands for each byte in a byte-level BPE: its own if printable, else 256 + n."""
    symbols, spare = [], 256
    for byte in range(256):
        if 33 <= byte <= 126 or 161 <= byte <= 172 or 174 <= byte <= 255:
            symbols.append(chr(byte))
        else:
            symbols.append(chr(spare))
            spare += 1
    return symbols


def _pretrained(name: str, eos_token: str | None, offline: bool) -> PreTrainedTokenizerBase:
    looks_local = name.startswith((".", "/", "~")) or name.count("/") > 1
    path = Path(name).expanduser()
    if looks_local and not path.is_dir():
        raise ValueError(
            f"data.tokenizer.name={name}: no such folder; give a folder, a Hub name, bytes or bpe"
        )
    try:
        tokenizer = (
            _load_folder(path)
            if path.is_dir()
            else AutoTokenizer.from_pretrained(name, local_files_only=offline, trust_remote_code=False)
        )
    except Exception as failure:
        if offline and not path.is_dir():
            raise TokenizerNotCached(name) from failure
        reason = str(failure).strip().partition("\n")[0][:300]
        unreachable = isinstance(failure.__cause__, LocalEntryNotFoundError)
        raise (Interrupted if unreachable else ValueError)(
            f"data.tokenizer.name={name}: cannot be loaded ({reason}); give a folder with tokenizer.json, "
            "tokenizer.model or vocab.json + merges.txt, a Hub name that is cached or reachable, bytes or bpe"
        ) from failure
    if eos_token is not None:
        if eos_token not in tokenizer.get_vocab():
            raise ValueError(f"data.tokenizer.eos_token={eos_token} is not in the vocabulary of {name}")
        # Assigned, it would turn special only once saved and loaded: a text that holds it would be cut there.
        tokenizer.add_special_tokens({"eos_token": eos_token})
    _keep_texts_whole(tokenizer)
    return tokenizer


def _keep_texts_whole(tokenizer: PreTrainedTokenizerBase) -> None:
    """Neither cut texts nor pad them, as tokenizer.json asks for if the last call before it was saved did."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is not None:
        backend.no_truncation()
        backend.no_padding()


def _load_folder(folder: Path) -> PreTrainedTokenizerBase:
    """By AutoTokenizer, unless the folder holds bare vocabulary files and nothing for it to go by."""
    if not any(folder.glob("*config.json")) and not (folder / "tokenizer.json").exists():
        if (folder / "tokenizer.model").exists():
            return from_sentencepiece(folder / "tokenizer.model")
        if (folder / "merges.txt").exists():
            return GPT2Tokenizer.from_pretrained(folder)
    return AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
