"""Load tokenizers: bytes, BPE trained on the corpus, SentencePiece files, or whatever `AutoTokenizer` loads.

transformers (5.23) orders the merges of a bare SentencePiece BPE model (`tokenizer.model`: Mistral, Llama) by
token id, where SentencePiece orders by score. In Mistral's model that changes runs of spaces, so indented
code gets other ids than the published models saw. `from_sentencepiece` gives SentencePiece's ids.
"""

import hashlib
import json
import re
from collections.abc import Iterable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import tokenizers
from sentencepiece import SentencePieceProcessor
from sentencepiece.sentencepiece_model_pb2 import ModelProto, TrainerSpec
from tokenizers import decoders, models, normalizers, pre_tokenizers, trainers

from fla_train.data.config import TokenizerConfig
from fla_train.utils.hub_names import hub_or_cache, read_error
from fla_train.utils.safe_files import read_json

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

PAD, BOS, EOS = "<pad>", "<bos>", "<eos>"
SPECIAL = {"pad_token": PAD, "bos_token": BOS, "eos_token": EOS}
FILE_ENDINGS = (".json", ".model")  # endings of tokenizers that are a single file
_SPACE = "\u2581"  # how SentencePiece writes a space
_BYTE_TOKEN = re.compile(r"<0x[0-9A-F]{2}>")  # SentencePiece's token of a single byte
_PROBE = "Hello  world,\n\tdéjà 2025 日本\n    x  =  [1]"


class TokenizerNotCached(ValueError):
    """A tokenizer of the Hub is not in this machine's cache, and `offline` forbids to fetch it."""


def load_tokenizer(
    config: TokenizerConfig, train_texts: Iterable[str] = (), *, offline: bool = False
) -> "PreTrainedTokenizerBase":
    """Load the tokenizer that `config` names; only "bpe" reads `train_texts`.

    Args:
        offline: load a Hub tokenizer from the cache only.

    Raises:
        TokenizerNotCached: `offline`, and the cache lacks it.
        Interrupted: the Hub can't be reached.
        ValueError: if it cannot be found or loaded, or if there is no text to train on.
    """
    match config.name:
        case "bytes":
            return _byte_tokenizer()
        case "bpe":
            return _train_bpe(train_texts, config.vocab_size, config.train_bytes)
    return _pretrained(config.name, config.eos_token, offline)


def encode(tokenizer: "PreTrainedTokenizerBase", texts: list[str]) -> list[list[int]]:
    """Return the token ids of each text. The name of a special token (`</s>`) in a text stays text."""
    options = {"add_special_tokens": False, "split_special_tokens": True, "return_attention_mask": False}
    return tokenizer(texts, verbose=False, **options)["input_ids"]


def fingerprint(tokenizer: "PreTrainedTokenizerBase") -> str:
    """Return the sha256 of the saved backend, which determines the ids, or of the vocabulary."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    content = backend.to_str() if backend else json.dumps(tokenizer.get_vocab(), sort_keys=True)
    special = [tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id]
    return hashlib.sha256(f"{content}{special}".encode()).hexdigest()


def ids_needed(tokenizer: "PreTrainedTokenizerBase") -> int:
    """Return the largest id + 1, which exceeds `len(tokenizer)` if the vocabulary has unused ids."""
    return max(len(tokenizer), max(tokenizer.get_vocab().values()) + 1)


def tokenizer_size(config: TokenizerConfig, *, offline: bool = False) -> int:
    """Return the rows that an embedding needs for the tokenizer, without reading any text.

    Args:
        offline: load a Hub tokenizer from the cache, or raise `TokenizerNotCached`.

    Raises:
        ValueError: as `load_tokenizer`.
    """
    if config.name == "bpe":  # a small corpus may train fewer
        return config.vocab_size
    return ids_needed(load_tokenizer(config, offline=offline))


def same_tokenizer(one: TokenizerConfig, other: TokenizerConfig) -> bool:
    """Return whether both give each text the same ids; False for bpe, which is not trained yet."""
    if one == other:
        return True
    if "bpe" in (one.name, other.name):
        return False
    return fingerprint(load_tokenizer(one)) == fingerprint(load_tokenizer(other))


def _byte_tokenizer() -> "PreTrainedTokenizerFast":
    """Build the tokenizer of bytes, which follow the special tokens: byte b has id b + 3."""
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    symbols = bytes_to_unicode()
    vocab = {PAD: 0, BOS: 1, EOS: 2} | {symbols[b]: b + 3 for b in range(256)}
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    return _wrap(backend, **SPECIAL)


def _train_bpe(texts: Iterable[str], vocab_size: int, train_bytes: int) -> "PreTrainedTokenizerFast":
    """Train byte-level BPE on the first `train_bytes` bytes of the texts, up to the end of a text."""
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[PAD, BOS, EOS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )

    def limited() -> Iterator[str]:
        left = train_bytes
        for text in texts:
            if left <= 0:
                return
            left -= len(text.encode("utf-8"))
            yield text

    backend.train_from_iterator(limited(), trainer)
    return _wrap(backend, **SPECIAL)


def _wrap(backend: tokenizers.Tokenizer, **special: str) -> "PreTrainedTokenizerFast":
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast(tokenizer_object=backend, clean_up_tokenization_spaces=False, **special)


def _pretrained(name: str, eos_token: str | None, offline: bool) -> "PreTrainedTokenizerBase":
    """Load a folder, a file or a Hub name as `load_tokenizer` does, and set its end-of-sequence token."""
    path = Path(name).expanduser()
    looks_local = name.startswith((".", "/", "~")) or name.count("/") > 1 or name.endswith(FILE_ENDINGS)
    if looks_local and not path.exists():
        raise ValueError(f"data.tokenizer.name={name}: no such folder or file")
    try:
        with nullcontext() if offline or path.exists() else hub_or_cache():
            tokenizer = _load_local(path) if path.exists() else load_saved(name, local_files_only=offline)
    except Exception as failure:
        if offline and not path.exists():
            raise TokenizerNotCached(name) from failure
        reason = str(failure).strip().partition("\n")[0][:300]
        message = (
            f"data.tokenizer.name={name}: cannot be loaded ({reason}); give a folder with tokenizer.json, "
            "tokenizer.model or vocab.json + merges.txt, a Hub name that is cached or reachable, bytes or bpe"
        )
        raise read_error(failure, message) from failure
    if eos_token is not None:
        if eos_token not in tokenizer.get_vocab():
            raise ValueError(f"data.tokenizer.eos_token={eos_token} is not in the vocabulary of {name}")
        # Assigning `eos_token` would make it special only after saving and loading.
        tokenizer.add_special_tokens({"eos_token": eos_token})
    # Turn off truncation and padding, which tokenizer.json keeps from the last call before it was saved.
    if backend := getattr(tokenizer, "backend_tokenizer", None):
        backend.no_truncation()
        backend.no_padding()
    return tokenizer


def _load_local(folder: Path) -> "PreTrainedTokenizerBase":
    """Load a folder by AutoTokenizer, a file or a folder of bare vocabulary files by their format."""
    import transformers

    if folder.is_file():
        if folder.name.endswith(".model"):
            return from_sentencepiece(folder)
        return transformers.PreTrainedTokenizerFast(tokenizer_file=str(folder))
    if not any(folder.glob("*config.json")) and not (folder / "tokenizer.json").exists():
        if (folder / "tokenizer.model").exists():
            return from_sentencepiece(folder / "tokenizer.model")
        if (folder / "merges.txt").exists():
            # This imports the list of transformers' models, a third of a second.
            return transformers.GPT2Tokenizer.from_pretrained(folder)
    return load_saved(folder)


def load_saved(place: str | Path, *, local_files_only: bool = False) -> "PreTrainedTokenizerBase":
    """Load a tokenizer of the Hub or of a folder that transformers wrote. None of its Python files is run."""
    # AutoTokenizer imports the list of transformers' models, a quarter of a second.
    from transformers import AutoTokenizer, PreTrainedConfig

    settings = Path(place) / "tokenizer_config.json"
    known = settings.is_file() and read_json(settings).get("tokenizer_class")
    # Where the class is known, a config of a model type that transformers has not would only draw a warning.
    options = {"config": PreTrainedConfig()} if known else {}
    options["local_files_only"] = local_files_only
    return AutoTokenizer.from_pretrained(place, trust_remote_code=False, **options)


def from_sentencepiece(path: Path) -> "PreTrainedTokenizerFast":
    """Convert the byte-fallback BPE model in `path` to a fast tokenizer, which adds no tokens.

    Raises:
        RuntimeError: the file is not a SentencePiece model.
        ValueError: the model is not of the byte-fallback BPE kind.
    """
    model = SentencePieceProcessor(model_file=str(path))
    pieces = [model.id_to_piece(i) for i in range(model.vocab_size())]
    vocab = {piece: i for i, piece in enumerate(pieces)}
    options = {"unk_token": pieces[model.unk_id()], "fuse_unk": True, "byte_fallback": True}
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=_merges(model, pieces, vocab), **options))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend(_SPACE), normalizers.Replace(" ", _SPACE)])
    if not any(re.search(f"[^{_SPACE}]{_SPACE}", piece) for piece in pieces):
        # No piece crosses the start of a run of spaces, so text may be cut there: short words can be cached.
        words = tokenizers.Regex(f"{_SPACE}+[^{_SPACE}]*|[^{_SPACE}]+")
        backend.pre_tokenizer = pre_tokenizers.Split(words, behavior="isolated")
    spaces, strip_first = decoders.Replace(_SPACE, " "), decoders.Strip(content=" ", left=1)
    backend.decoder = decoders.Sequence([spaces, decoders.ByteFallback(), decoders.Fuse(), strip_first])
    is_bpe = ModelProto.FromString(path.read_bytes()).trainer_spec.model_type == TrainerSpec.BPE
    if not is_bpe or backend.encode(_PROBE).ids != model.encode(_PROBE):
        raise ValueError(f"{path} is a SentencePiece model of another kind than byte-fallback BPE")
    special = {"unk_token": model.unk_id(), "bos_token": model.bos_id(), "eos_token": model.eos_id()}
    return _wrap(backend, **{name: pieces[i] for name, i in special.items() if i >= 0})


def _merges(model: SentencePieceProcessor, pieces: list[str], vocab: dict[str, int]) -> list[tuple[str, str]]:
    """List the pairs of pieces that join to a piece, ordered by the score of that piece, highest first."""
    merges = []
    for i, piece in enumerate(pieces):
        if model.is_control(i) or model.is_unknown(i) or model.is_byte(i):
            continue
        for cut in range(1, len(piece)):
            left, right = piece[:cut], piece[cut:]
            if left in vocab and right in vocab:
                merges.append((-model.get_score(i), -len(left), left, right))
    return [(left, right) for _, _, left, right in sorted(merges)]


def token_bytes(tokenizer: "PreTrainedTokenizerBase") -> np.ndarray | None:
    """Return the number of UTF-8 bytes of each token id, [ids] int64; 0 for special tokens.

    Bits per byte follow from these. The sum over a text's tokens is the text's size, except for what the
    tokenizer changes first: SentencePiece prepends a space, and some normalise characters.

    Returns:
        None for a tokenizer whose tokens do not spell the text: neither byte-level BPE nor SentencePiece.
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        return None
    content = json.loads(backend.to_str())
    spelling = json.dumps([content["decoder"], content["pre_tokenizer"]], ensure_ascii=False)
    by_bytes = "ByteLevel" in spelling
    if not by_bytes and _SPACE not in spelling:
        return None
    sizes = np.zeros(ids_needed(tokenizer), np.int64)
    for piece, i in tokenizer.get_vocab().items():
        if by_bytes:
            sizes[i] = len(piece)  # a character stands for a byte
        else:
            sizes[i] = 1 if _BYTE_TOKEN.fullmatch(piece) else len(piece.replace(_SPACE, " ").encode())
    for i, token in tokenizer.added_tokens_decoder.items():
        sizes[i] = 0 if token.special else len(token.content.encode())
    return sizes
