"""A fast tokenizer from a bare SentencePiece BPE model (`tokenizer.model`: Mistral, Llama).

transformers (5.23) orders the merges of such a file by token id, where SentencePiece orders by score. In
Mistral's model that changes runs of spaces, so indented code gets other ids than the published models saw.
Built here, the ids are SentencePiece's own.
"""

import re
from pathlib import Path

import tokenizers
from sentencepiece import SentencePieceProcessor
from sentencepiece.sentencepiece_model_pb2 import ModelProto, TrainerSpec
from tokenizers import decoders, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

_SPACE = "▁"
_PROBE = "Hello  world,\n\tdéjà 2025 日本\n    x  =  [1]"


def from_sentencepiece(path: Path) -> PreTrainedTokenizerFast:
    """The model in file `path`, as a tokenizer that adds no token by itself.

    Raises:
        ValueError: if the file is no SentencePiece model, or not one of the byte-fallback BPE kind.
    """
    try:
        model = SentencePieceProcessor(model_file=str(path))
    except Exception as failure:
        raise ValueError(f"{path} is not a SentencePiece model ({failure})") from failure
    pieces = [model.id_to_piece(i) for i in range(model.vocab_size())]
    vocab = {piece: i for i, piece in enumerate(pieces)}
    backend = tokenizers.Tokenizer(
        models.BPE(
            vocab=vocab,
            merges=_merges(model, pieces, vocab),
            unk_token=pieces[model.unk_id()],
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    backend.normalizer = normalizers.Sequence([normalizers.Prepend(_SPACE), normalizers.Replace(" ", _SPACE)])
    if not any(re.search(f"[^{_SPACE}]{_SPACE}", piece) for piece in pieces):
        # No piece reaches across the start of a run of spaces. Cut there, words are short and can be cached.
        words = tokenizers.Regex(f"{_SPACE}+[^{_SPACE}]*|[^{_SPACE}]+")
        backend.pre_tokenizer = pre_tokenizers.Split(words, behavior="isolated")
    backend.decoder = decoders.Sequence(
        [
            decoders.Replace(_SPACE, " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(content=" ", left=1),
        ]
    )
    is_bpe = ModelProto.FromString(path.read_bytes()).trainer_spec.model_type == TrainerSpec.BPE
    if not is_bpe or backend.encode(_PROBE).ids != model.encode(_PROBE):
        raise ValueError(f"{path} is a SentencePiece model of another kind than byte-fallback BPE")
    special = {"unk_token": model.unk_id(), "bos_token": model.bos_id(), "eos_token": model.eos_id()}
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        clean_up_tokenization_spaces=False,
        **{name: pieces[i] for name, i in special.items() if i >= 0},
    )


def _merges(model: SentencePieceProcessor, pieces: list[str], vocab: dict[str, int]) -> list[tuple[str, str]]:
    """Every pair of pieces that joins to a piece, best score first: that of the joined piece decides."""
    merges = []
    for i, piece in enumerate(pieces):
        if model.is_control(i) or model.is_unknown(i) or model.is_byte(i):
            continue
        for cut in range(1, len(piece)):
            left, right = piece[:cut], piece[cut:]
            if left in vocab and right in vocab:
                merges.append((-model.get_score(i), -len(left), left, right))
    return [(left, right) for _, _, left, right in sorted(merges)]
