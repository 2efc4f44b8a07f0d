import io
import json
from dataclasses import replace

import numpy as np
import pytest
import sentencepiece
import tokenizers
from sentencepiece import sentencepiece_model_pb2
from tokenizers import decoders, models, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from fla_train.data.config import DataConfig, TokenizerConfig
from fla_train.data.files import TextSlice
from fla_train.data.tokenize import Limits, make_encoder
from fla_train.data.tokenizers import (
    encode,
    fingerprint,
    load_tokenizer,
    same_tokenizer,
    token_bytes,
    tokenizer_size,
)

TEXTS = [
    "plain",
    " two  spaces\n\n\tand é 日本 😀",
    "<eos></s><pad><bos>",
    "\x00\x7f\u00ad\ufffd\r\n",
    "a" * 5000,
]
TRAINING = ["the state of the delta rule is a matrix; the gate decays it\n"] * 50 + TEXTS


def make(kind, tmp_path):
    if kind == "bytes":
        return load_tokenizer(TokenizerConfig(name="bytes"))
    bpe = load_tokenizer(TokenizerConfig(name="bpe", vocab_size=300), TRAINING)
    if kind == "bpe":
        return bpe
    bpe.save_pretrained(tmp_path / "saved")
    if kind == "folder":
        return load_tokenizer(TokenizerConfig(name=str(tmp_path / "saved")))
    saved = json.loads((tmp_path / "saved" / "tokenizer.json").read_text())
    bare = tmp_path / "bare"
    bare.mkdir()
    if kind.endswith("tokenizer.json"):
        file = bare / "tokenizer.json"
        file.write_text(json.dumps(saved))
        place = bare if kind.startswith("bare") else file
        return load_tokenizer(TokenizerConfig(name=str(place), eos_token="<eos>"))
    vocab = saved["model"]["vocab"] | {"<|endoftext|>": len(saved["model"]["vocab"])}
    (bare / "vocab.json").write_text(json.dumps(vocab))
    (bare / "merges.txt").write_text("\n".join(" ".join(pair) for pair in saved["model"]["merges"]))
    return load_tokenizer(TokenizerConfig(name=str(bare)))


KINDS = ["bytes", "bpe", "folder", "bare tokenizer.json", "file tokenizer.json", "bare vocab.json"]


@pytest.mark.parametrize("kind", KINDS)
def test_round_trip_and_reload(kind, tmp_path):
    tokenizer = make(kind, tmp_path)
    ids = encode(tokenizer, TEXTS)
    assert [tokenizer.decode(i) for i in ids] == TEXTS
    special = {tokenizer.eos_token_id, tokenizer.bos_token_id, tokenizer.pad_token_id}
    assert tokenizer.eos_token_id is not None
    assert not special & {i for document in ids for i in document}  # text that looks like <eos> is text
    tokenizer.save_pretrained(tmp_path / "again")
    again = AutoTokenizer.from_pretrained(tmp_path / "again")
    assert encode(again, TEXTS) == ids
    assert fingerprint(again) == fingerprint(tokenizer)
    assert again.eos_token_id == tokenizer.eos_token_id
    assert again("plain")["input_ids"] == ids[0]  # adds nothing by itself


def test_bytes_are_bytes():
    tokenizer = make("bytes", None)
    assert len(tokenizer) == 259
    everything = "".join(chr(c) for c in [*range(0x250), 0x65E5, 0x1F600])
    [ids] = encode(tokenizer, [everything])
    assert ids == [b + 3 for b in everything.encode()]


def test_bpe_is_deterministic_and_obeys_its_size():
    one, two = (load_tokenizer(TokenizerConfig(name="bpe", vocab_size=290), iter(TRAINING)) for _ in range(2))
    assert fingerprint(one) == fingerprint(two)
    assert len(one) == 290
    assert len(encode(one, [TRAINING[0]])[0]) < len(TRAINING[0])
    other = load_tokenizer(TokenizerConfig(name="bpe", vocab_size=290, train_bytes=60), TRAINING)
    assert fingerprint(other) != fingerprint(one)


@pytest.mark.parametrize("added", [True, False], ids=["an added token", "a word of the vocabulary"])
def test_a_chosen_end_of_sequence_in_a_text_stays_text(tmp_path, added):
    """In what is prepared as in what the saved tokenizer makes of it."""
    letters = {letter: i for i, letter in enumerate("<end>b")}
    vocab = letters if added else letters | {"<end>": len(letters)}
    backend = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocab, merges=[]))
    if added:
        backend.add_tokens([tokenizers.AddedToken("<end>", special=False)])
    PreTrainedTokenizerFast(tokenizer_object=backend).save_pretrained(tmp_path / "given")
    chosen = load_tokenizer(TokenizerConfig(name=str(tmp_path / "given"), eos_token="<end>"))
    chosen.save_pretrained(tmp_path / "saved")
    saved = AutoTokenizer.from_pretrained(tmp_path / "saved")
    assert chosen.eos_token_id == saved.eos_token_id == len(letters)
    text = "b<end>b"
    assert encode(chosen, [text]) == encode(saved, [text]) == [[letters[letter] for letter in text]]
    assert fingerprint(chosen) == fingerprint(saved)


def test_the_size_of_a_tokenizer_counts_to_the_largest_id(tmp_path):
    backend = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0, "b": 299}, unk_token="a"))
    PreTrainedTokenizerFast(tokenizer_object=backend).save_pretrained(tmp_path)
    assert tokenizer_size(TokenizerConfig(name=str(tmp_path))) == 300
    assert tokenizer_size(TokenizerConfig(name="bytes")) == 259
    assert tokenizer_size(TokenizerConfig(name="bpe", vocab_size=400)) == 400


def test_tokenizers_are_compared_by_what_they_do(tmp_path):
    load_tokenizer(TokenizerConfig(name="bytes")).save_pretrained(tmp_path)
    saved = TokenizerConfig(name=str(tmp_path))
    assert same_tokenizer(saved, TokenizerConfig(name="bytes"))
    assert not same_tokenizer(saved, TokenizerConfig(name="bpe"))
    assert not same_tokenizer(saved, replace(saved, eos_token="a"))


def test_texts_are_neither_cut_nor_padded(tmp_path):
    """Whatever tokenizer.json asks for; here as fine-tuning leaves it behind."""
    tokenizer = load_tokenizer(TokenizerConfig(name="bytes"))
    tokenizer(["some", "texts"], padding=True, truncation=True, max_length=4)
    tokenizer.save_pretrained(tmp_path)
    saved = json.loads((tmp_path / "tokenizer.json").read_text())
    assert saved["truncation"] and saved["padding"]
    texts = ["ab", "a longer text"]
    for loaded in (tokenizer, AutoTokenizer.from_pretrained(tmp_path)):
        assert [len(ids) for ids in encode(loaded, texts)] == [2, 13]
    loaded = load_tokenizer(TokenizerConfig(name=str(tmp_path)))
    config = DataConfig(append_eos=False, validation_fraction=0.0)
    loaded.save_pretrained(tmp_path / "kept")
    encoder = make_encoder(loaded, tmp_path / "kept", config, "uint16")
    record = encoder.write(tmp_path, 0, TextSlice(config, 0, 0, texts, texts), Limits())
    assert record["train"]["tokens"] == 2 + 13
    assert fingerprint(loaded) == fingerprint(load_tokenizer(TokenizerConfig(name="bytes")))


CODE = "def step(state, key):\n    for x in state:\n        if x  ==  key:\n            return  x\n" * 20
PROSE = "The state decays by its gate; the delta rule writes a value at a key, 0.25 at a time.\n" * 20
SPACED_TEXTS = [
    CODE,
    PROSE,
    " leading",
    "    x",
    "a     b  c",
    "日本 é 😀",
    "</s><s>",
    "",
    "\t\n",
    "x   \n  y",
]


@pytest.fixture(scope="module")
def spm_models(tmp_path_factory):
    """{kind: file} of a BPE like Mistral's (runs of spaces score last) and of a unigram."""
    folder = tmp_path_factory.mktemp("sentencepiece")
    files = {}
    for kind in ("bpe", "unigram"):
        model = io.BytesIO()
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter((CODE + PROSE).splitlines()),
            model_writer=model,
            model_type=kind,
            vocab_size=380 if kind == "bpe" else 300,
            byte_fallback=True,
            character_coverage=1.0,
            normalization_rule_name="identity",
            remove_extra_whitespaces=False,
            allow_whitespace_only_pieces=True,
            minloglevel=2,
        )
        proto = sentencepiece_model_pb2.ModelProto.FromString(model.getvalue())
        if kind == "bpe":
            for piece in proto.pieces:
                if piece.type == 1 and not piece.piece.strip("▁"):
                    piece.score = -1e9
        (folder / kind).mkdir()
        files[kind] = folder / kind / "tokenizer.model"
        files[kind].write_bytes(proto.SerializeToString())
    return files


def test_ids_are_those_of_sentencepiece(spm_models, tmp_path):
    oracle = sentencepiece.SentencePieceProcessor(model_file=str(spm_models["bpe"]))
    tokenizer = load_tokenizer(TokenizerConfig(name=str(spm_models["bpe"].parent)))
    ids = encode(tokenizer, SPACED_TEXTS)
    assert ids == [oracle.encode(text) for text in SPACED_TEXTS]
    assert [tokenizer.decode(i) for i in ids] == SPACED_TEXTS
    assert (tokenizer.eos_token_id, tokenizer.bos_token_id) == (oracle.eos_id(), oracle.bos_id())
    assert len(tokenizer) == oracle.vocab_size()
    tokenizer.save_pretrained(tmp_path)
    assert encode(AutoTokenizer.from_pretrained(tmp_path), SPACED_TEXTS) == ids


SPELLED_TEXTS = ["The sky is blue,\n\n  and so on.", "naïve 日本 <eos> Größe 🙂", "", "\t x = 1"]


def like_llama() -> PreTrainedTokenizerFast:
    """As Llama's: spaces are marked, and what the vocabulary lacks falls back to bytes."""
    pieces = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "\u2581", *"Theskyisblu,ax=1"]
    vocab = {piece: i for i, piece in enumerate(dict.fromkeys(pieces))}
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[], byte_fallback=True, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never", split=False)
    backend.decoder = decoders.Metaspace()
    return PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="<unk>")


@pytest.mark.parametrize("name", ["bytes", "bpe", "sentencepiece"])
def test_bytes_of_tokens_add_up_to_the_text(name: str) -> None:
    tokenizer: PreTrainedTokenizerBase = (
        like_llama()
        if name == "sentencepiece"
        else load_tokenizer(TokenizerConfig(name=name, vocab_size=300), SPELLED_TEXTS)
    )
    sizes = token_bytes(tokenizer)
    for text, ids in zip(SPELLED_TEXTS, encode(tokenizer, SPELLED_TEXTS), strict=True):
        assert sizes[np.array(ids, dtype=int)].sum() == len(text.encode())
    assert not sizes[tokenizer.all_special_ids].any()
