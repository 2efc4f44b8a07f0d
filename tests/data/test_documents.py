"""Packed documents: the bounds are those on disk, and a model sees each document as if it were alone."""

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
import tokenizers
import torch
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import PreTrainedTokenizerFast

from fla_train.data.config import TokenizerConfig
from fla_train.data.dataset import TokenDataset
from fla_train.data.sampler import BatchSampler, PackedDataset, PrefetchLoader, pack
from fla_train.models.modeling import DeltaProductForCausalLM
from tests.data.conftest import quiet, write_jsonl
from tests.data.test_prepare import read
from tests.models.small_models import small_config


@pytest.mark.parametrize("seq_len", [2, 7, 64, 6000])  # 6000: longer than a shard
def test_boundaries_are_the_documents_ends(prepared, seq_len):
    _, ends = read(prepared, "train")
    dataset = TokenDataset(prepared.folder, "train", seq_len)
    found = dataset.boundaries(np.arange(len(dataset)))
    for place, starts in enumerate(found):
        first = place * seq_len
        assert starts.tolist() == [e - first for e in ends if first < e < first + seq_len]
    assert sum(map(len, found)) > 20
    shuffled = TokenDataset(prepared.folder, "train", seq_len, seed=1)
    place = int(shuffled.positions(np.array([0]))[0])
    assert shuffled.boundaries(np.array([0]))[0].tolist() == found[place].tolist()


def test_a_text_without_tokens_is_not_a_document(tmp_path, local):
    """The bounds of packed documents ascend, so each document has a token."""
    words = tokenizers.Tokenizer(WordLevel({"?": 0}, unk_token="?"))
    words.pre_tokenizer = Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=words, unk_token="?").save_pretrained(tmp_path / "words")
    write_jsonl(tmp_path / "text.jsonl", [{"text": text} for text in ("a b", " \n", "c d e", "f")])
    tokenizer = TokenizerConfig(name=str(tmp_path / "words"))
    settings = {"path": str(tmp_path / "text.jsonl"), "append_eos": False, "validation_fraction": 0.0}
    folder = quiet(replace(local, **settings, tokenizer=tokenizer)).folder
    batch = PackedDataset(TokenDataset(folder, "train", 6)).sequences(np.arange(1))
    assert batch.cu_seqlens.tolist() == [0, 2, 5, 6]


def test_a_packed_micro_batch(prepared):
    dataset = TokenDataset(prepared.folder, "train", 64, seed=3)
    with PrefetchLoader(PackedDataset(dataset), BatchSampler(4, 4), 2, 4) as batches:
        for step, batch in enumerate(batches, start=2):
            indices = np.arange(step * 4, step * 4 + 4)
            ids = dataset.sequences(indices)
            assert torch.equal(batch.input_ids, ids.reshape(1, -1))
            starts = {row * 64 for row in range(4)} | {
                row * 64 + int(s) for row, found in enumerate(dataset.boundaries(indices)) for s in found
            }
            assert batch.cu_seqlens.tolist() == [*sorted(starts), 256]
            assert batch.cu_seqlens.dtype == torch.int32 and batch.max_length_q == 64
            for position in range(256):
                expected = -100 if position in starts else batch.input_ids[0, position]
                assert batch.labels[0, position] == expected


def packed_and_alone(model, ids, boundaries):
    """Summed loss and gradients of a packed batch, and of its documents one by one, on the model's device."""
    batch = pack(ids, boundaries).to(model.device)
    cuts = [np.r_[0, found, ids.shape[1]] for found in boundaries]
    pieces = [
        row[a:b].to(model.device)
        for row, cut in zip(ids, cuts, strict=True)
        for a, b in pairwise(cut.tolist())
        if b - a > 1  # the first token of a document is no target
    ]
    assert int((batch.labels[:, 1:] != -100).sum()) == sum(len(piece) - 1 for piece in pieces)
    results = []
    for run in (
        lambda: (
            model(
                batch.input_ids, labels=batch.labels, cu_seqlens=batch.cu_seqlens, num_items_in_batch=1
            ).loss
        ),
        lambda: sum(model(p[None], labels=p[None], num_items_in_batch=1).loss for p in pieces),
    ):
        model.zero_grad()
        loss = run()
        loss.backward()
        results.append((loss.item(), [p.grad.clone() for p in model.parameters()]))
    return results


@pytest.mark.parametrize("gate", [True, False])
def test_nothing_crosses_a_document(gate):
    torch.manual_seed(0)
    config = small_config(num_householder=2, use_forget_gate=gate, backend="chunk")
    model = DeltaProductForCausalLM(config).double()
    ids = torch.randint(config.vocab_size, (2, 24))
    (packed, gradients), (alone, expected) = packed_and_alone(model, ids, [np.array([1, 9]), np.array([20])])
    assert packed == pytest.approx(alone, rel=1e-12)
    for gradient, reference in zip(gradients, expected, strict=True):
        torch.testing.assert_close(gradient, reference, rtol=1e-9, atol=1e-11)
    # The same rows without bounds are something else: the test can tell.
    joined = model(ids, labels=ids, num_items_in_batch=1).loss
    assert abs(joined.item() - alone) > 1e-3


@pytest.mark.gpu
def test_nothing_crosses_a_document_on_a_gpu():
    torch.manual_seed(0)
    config = small_config(head_dim=16, hidden_size=32, backend="triton")
    model = DeltaProductForCausalLM(config).cuda()
    ids = torch.randint(config.vocab_size, (2, 300))
    cuts = [np.array([1, 64, 65, 200]), np.array([130])]
    (packed, gradients), (alone, expected) = packed_and_alone(model, ids, cuts)
    assert packed == pytest.approx(alone, rel=1e-4)
    for gradient, reference in zip(gradients, expected, strict=True):
        assert (gradient - reference).norm() <= 5e-3 * reference.norm()
