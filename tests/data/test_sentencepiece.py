import io

import pytest
import sentencepiece
from sentencepiece import sentencepiece_model_pb2
from transformers import AutoTokenizer

from fla_train.data.config import TokenizerConfig
from fla_train.data.tokenizers import encode, from_sentencepiece, load_tokenizer

CODE = "def step(state, key):\n    for x in state:\n        if x  ==  key:\n            return  x\n" * 20
PROSE = "The state decays by its gate; the delta rule writes a value at a key, 0.25 at a time.\n" * 20
TEXTS = [CODE, PROSE, " leading", "    x", "a     b  c", "日本 é 😀", "</s><s>", "", "\t\n", "x   \n  y"]


@pytest.fixture(scope="module")
def models(tmp_path_factory):
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


def test_ids_are_those_of_sentencepiece(models, tmp_path):
    oracle = sentencepiece.SentencePieceProcessor(model_file=str(models["bpe"]))
    tokenizer = load_tokenizer(TokenizerConfig(name=str(models["bpe"].parent)))
    ids = encode(tokenizer, TEXTS)
    assert ids == [oracle.encode(text) for text in TEXTS]
    assert [tokenizer.decode(i) for i in ids] == TEXTS
    assert (tokenizer.eos_token_id, tokenizer.bos_token_id) == (oracle.eos_id(), oracle.bos_id())
    assert len(tokenizer) == oracle.vocab_size()
    tokenizer.save_pretrained(tmp_path)
    assert encode(AutoTokenizer.from_pretrained(tmp_path), TEXTS) == ids


def test_other_kinds_are_refused(models, tmp_path):
    with pytest.raises(ValueError, match="another kind"):
        from_sentencepiece(models["unigram"])
    (tmp_path / "tokenizer.model").write_bytes(b"nothing")
    with pytest.raises(ValueError, match="not a SentencePiece model"):
        load_tokenizer(TokenizerConfig(name=str(tmp_path)))
