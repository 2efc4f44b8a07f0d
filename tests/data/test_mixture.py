import itertools
from dataclasses import replace

import numpy as np
import pytest
import torch

from fla_train.data.cache import open_prepared
from fla_train.data.config import CorpusConfig
from fla_train.data.dataset import TokenDataset
from fla_train.data.mixture import integer_shares, interleave
from fla_train.data.open_dataset import open_train, open_validation
from tests.data.conftest import quiet, write_jsonl


@pytest.fixture
def mixture(tmp_path, local, documents):
    """Three corpora at 0.5, 0.3 and 0.2."""
    corpora = {"web": documents[:60], "code": documents[60:100], "maths": documents[100:]}
    for name, rows in corpora.items():
        write_jsonl(tmp_path / name / "a.jsonl", rows)
    weights = {"web": 0.5, "code": 0.3, "maths": 0.2}
    parts = {name: CorpusConfig(weight=w, path=str(tmp_path / name)) for name, w in weights.items()}
    return replace(local, source="mixture", path=None, mixture=parts)


@pytest.mark.parametrize("shares", [[1, 1], [7, 2, 1], [5, 3, 2], [97, 2, 1], [1, 1, 1, 1, 40], [13]])
def test_every_window_holds_about_the_shares(shares):
    """To one turn of the corpus, and to the turns that others have before or after it at each end."""
    sequence, period = interleave(shares), sum(shares)
    assert len(sequence) == period
    endless = np.tile(sequence, 3)
    for corpus, share in enumerate(shares):
        had = np.concatenate([[0], np.cumsum(endless == corpus)])
        for length in range(1, 2 * period + 1):
            counts = had[length:] - had[:-length]
            bound = 1 + len(shares) * share / period
            assert np.abs(counts - length * share / period).max() <= bound
            if length % period == 0:
                assert (counts == share * length // period).all()


def test_sequences_are_due_in_the_middle_of_their_shares():
    # 0.1, 0.3, 0.5, 0.7, 0.9; 1/6, 1/2, 5/6; 1/4, 3/4
    assert interleave([5, 3, 2]).tolist() == [0, 1, 2, 0, 0, 1, 0, 2, 1, 0]


def test_shares_of_decimal_weights():
    assert integer_shares({"a": 0.7, "b": 0.2, "c": 0.1}) == {"a": 7, "b": 2, "c": 1}
    assert integer_shares({"a": 2, "b": 1}) == {"a": 2, "b": 1}
    assert integer_shares({"a": 30.0, "b": 10.0}) == {"a": 3, "b": 1}
    with pytest.raises(ValueError, match="fewer digits"):
        integer_shares({"a": 0.123456789, "b": 1})


def test_a_mixture_is_its_parts_in_turn(mixture):
    prepared = quiet(mixture)
    data = open_train(prepared.folder, 32, seed=5)
    corpora = [TokenDataset(corpus.folder, "train", 32, seed=5) for corpus in prepared.corpora().values()]
    order = interleave([5, 3, 2])
    count = 10 * max(len(corpus) for corpus in corpora)  # every corpus starts over
    expected, next_of = [], [itertools.count() for _ in corpora]
    for place in range(count):
        corpus = order[place % 10]
        expected.append(corpora[corpus].sequences(np.array([next(next_of[corpus])]))[0])
    whole = data.sequences(np.arange(count))
    assert torch.equal(whole, torch.stack(expected))
    some = np.array([count - 1, 3, 3, 17])  # any order, at once
    assert torch.equal(data.sequences(some), whole[some])
    every = np.arange(count)
    for corpus, within, found in zip(*data.locate(every), data.boundaries(every), strict=True):
        assert found.tolist() == corpora[corpus].boundaries(np.array([within]))[0].tolist()


def test_manifest_parts_and_validation(mixture):
    lines = []
    prepared = quiet(mixture, lines.append)
    assert open_prepared(prepared.folder).manifest == prepared.manifest
    assert [p["share"] for p in prepared.manifest["parts"]] == [5, 3, 2]
    tokens = [corpus.manifest["splits"]["train"]["tokens"] for corpus in prepared.corpora().values()]
    assert prepared.manifest["splits"]["train"]["tokens"] == sum(tokens)
    assert prepared.tokenizer().vocab_size == 259
    prepared.verify()
    validation = open_validation(prepared.folder, 32)
    assert list(validation) == ["web", "code", "maths"]
    assert [weight for _, weight in validation.values()] == [0.5, 0.3, 0.2]
    some = open_validation(prepared.folder, max(len(d) * 32 for d, _ in validation.values()))
    assert 0 < len(some) < 3  # corpora without a whole sequence are left out
    assert sum(weight for _, weight in some.values()) == pytest.approx(1)
    assert any("web: 5 of 10 sequences" in line for line in prepared.describe())
    reweighted = replace(mixture, mixture={**mixture.mixture})
    reweighted.mixture["web"] = replace(mixture.mixture["web"], weight=1.0)
    other = quiet(reweighted)
    assert other.folder != prepared.folder
    assert [p.folder for p in other.corpora().values()] == [p.folder for p in prepared.corpora().values()]
    assert quiet(mixture).folder == prepared.folder
