"""Contiguous order: what rows read over steps, against the text on disk."""

import numpy as np
import pytest
import torch

from fla_train.data.open_dataset import open_contiguous
from tests.data.conftest import quiet
from tests.data.test_mixture import mixture  # noqa: F401  a fixture
from tests.data.test_prepare import read

ROWS, SEQ_LEN = 5, 64


def steps(data, count: int, rows: int = ROWS) -> list:
    """The batches of the first steps."""
    return [data.sequences(np.arange(step * rows, (step + 1) * rows)) for step in range(count)]


def opened(prepared, boundaries: bool = False, seed: int = 3, rows: int = ROWS):
    return open_contiguous(prepared.folder, SEQ_LEN, seed, rows, document_boundaries=boundaries)


def test_a_row_reads_on_where_it_has_ended(prepared):
    text, _ = read(prepared, "train")
    size = len(text) // SEQ_LEN
    cut = torch.tensor(text[: size * SEQ_LEN]).view(size, SEQ_LEN)
    data, length = opened(prepared), size // ROWS
    batches = steps(data, 3 * length)
    places = data.locate(np.arange(3 * length * ROWS))[1].reshape(-1, ROWS)
    for batch, at in zip(batches, places, strict=True):
        assert torch.equal(batch.input_ids, cut[at]) and torch.equal(batch.labels, cut[at])
    continues = np.array([batch.continues.numpy() for batch in batches])
    assert not continues[0].any() and continues.mean() > 0.9
    follows = places[1:] == places[:-1] + 1
    assert not (continues[1:] & ~follows).any()
    starts = np.arange(1, 3 * length) % length == 0  # of an epoch: rows jump, if only by chance not far
    assert (continues[1:] == follows)[~starts].all() and not continues[1:][starts].any()
    for epoch in places.reshape(3, -1):
        assert len(set(epoch)) == len(epoch) == ROWS * length
    firsts = places[::length, 0]
    assert len(set(firsts)) == 3 and opened(prepared, seed=4).locate(np.array([0]))[1] != firsts[0]


def test_no_document_continues_with_another(prepared):
    text, ends = read(prepared, "train")
    size = len(text) // SEQ_LEN
    data, plain = opened(prepared, boundaries=True, rows=2), opened(prepared, rows=2)
    at_bounds = 0
    for step, batch in enumerate(steps(data, size // 2, rows=2)):
        indices = np.arange(2 * step, 2 * step + 2)
        _, places, follows = plain.locate(indices)
        begins = np.array([place * SEQ_LEN in {0, *ends} for place in places.tolist()])
        assert batch.continues.tolist() == (follows & ~begins).tolist()
        at_bounds += int((follows & begins).sum())
        assert torch.equal(batch.input_ids, plain.sequences(indices).input_ids.view(1, -1))
        inner = [
            row * SEQ_LEN + end - place * SEQ_LEN
            for row, place in enumerate(places.tolist())
            for end in ends
            if place * SEQ_LEN < end < (place + 1) * SEQ_LEN
        ]
        assert batch.cu_seqlens.tolist() == sorted({0, SEQ_LEN, 2 * SEQ_LEN, *inner})
    assert at_bounds or not any(end % SEQ_LEN == 0 for end in ends[:-1])


def test_rows_of_a_mixture_keep_to_their_part(mixture):  # noqa: F811
    prepared = quiet(mixture)
    with pytest.raises(ValueError, match=r"\braise .*global_batch_tokens"):  # a corpus gets none of two rows
        open_contiguous(prepared.folder, 16, 1, 2, document_boundaries=False)
    data = open_contiguous(prepared.folder, 16, 1, 10, document_boundaries=False)
    corpora = np.array([data.locate(np.arange(10 * step, 10 * step + 10))[0] for step in range(40)])
    assert (corpora == corpora[0]).all()
    assert np.bincount(corpora[0]).tolist() == [5, 3, 2]
    texts = [read(corpus, "train")[0] for corpus in prepared.corpora().values()]
    ids = torch.stack([batch.input_ids for batch in steps(data, 3, rows=10)])
    for row, corpus in enumerate(corpora[0]):
        text = np.asarray(texts[corpus]).tolist()
        first = int(data.locate(np.array([row]))[1][0]) * 16
        if first + 48 <= len(text):
            assert ids[:, row].flatten().tolist() == text[first : first + 48]
