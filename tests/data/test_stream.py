"""Training from a stream: the tokens are those of a preparation, also after any resume."""

import shutil
from dataclasses import replace

import numpy as np
import pytest
import torch

from fla_train.data import prepare as preparation
from fla_train.data import stream
from fla_train.data.config import TokenizerConfig
from fla_train.data.open_dataset import open_train, open_validation
from fla_train.data.sampler import BatchSampler, PrefetchLoader
from fla_train.data.stream import StreamDataset
from tests.data.conftest import quiet, write_jsonl, write_parquet
from tests.data.test_prepare import expected_bytes
from tests.refusal import refusal

T = 48


@pytest.fixture
def streamed(local):
    return replace(local, stream=True, stream_head_documents=60)


def epoch_of(documents):
    """[sequences, T], and the ends of documents, by the definition."""
    tokens, ends, _ = expected_bytes(documents, 0.2, "train")
    return np.array(tokens[: len(tokens) // T * T]).reshape(-1, T), ends


@pytest.mark.parametrize("kind", ["parquet", "jsonl", "hub"])
def test_the_stream_is_the_documents_in_order_over_epochs(tmp_path, streamed, documents, kind):
    if kind == "jsonl":
        write_jsonl(tmp_path / "a.jsonl", documents)
        streamed = replace(streamed, path=str(tmp_path / "a.jsonl"))
    elif kind == "hub":
        streamed = replace(streamed, source="hub")
    sequences, ends = epoch_of(documents)
    data = open_train(quiet(streamed).folder, T, seed=0)
    assert isinstance(data, StreamDataset)
    for indices in np.array_split(np.arange(3 * len(sequences)), 50):
        assert np.array_equal(data.sequences(indices), sequences[indices % len(sequences)])
        for index, starts in zip(indices, data.boundaries(indices), strict=True):
            begin = index % len(sequences) * T
            assert starts.tolist() == [end - begin for end in ends if begin < end < begin + T]


def test_resumed_twice_on_other_ranks(streamed, documents):
    sequences, _ = epoch_of(documents)
    folder = quiet(streamed).folder

    def steps(first, last, world, micro):
        """The global batches of steps first to last - 1, from `world` ranks that all start afresh."""
        ranks = []
        for rank in range(world):
            plan = BatchSampler(12, micro, rank, world)
            with PrefetchLoader(StreamDataset(folder, T), plan, first, last) as batches:
                ranks.append(list(batches))
        return torch.cat([part for group in zip(*ranks, strict=True) for part in group])

    whole = torch.cat([steps(0, 9, 2, 3), steps(9, 30, 1, 4), steps(30, 40, 3, 2), steps(40, 75, 2, 6)])
    assert np.array_equal(whole, sequences[np.arange(75 * 12) % len(sequences)])
    shutil.rmtree(next(folder.glob("shards-*")))  # as on another machine
    assert torch.equal(steps(30, 40, 1, 12), whole[30 * 12 : 40 * 12])


def test_the_first_rank_of_a_machine_writes_and_all_read(streamed, documents, monkeypatch):
    sequences, _ = epoch_of(documents)
    folder = quiet(streamed).folder
    monkeypatch.setattr(stream, "is_first_on_machine", lambda: False)
    reader = StreamDataset(folder, T)
    assert not list(folder.glob("shards-*"))
    monkeypatch.undo()
    # It tokenizes ahead of its requests, and not without end.
    monkeypatch.setattr(stream, "AHEAD", 50 * T)
    writer = StreamDataset(folder, T)
    assert np.array_equal(writer.sequences(np.arange(2)), sequences[:2])
    assert np.array_equal(reader.sequences(np.arange(50)), sequences[:50])
    records = len(list(folder.glob("shards-*/*.json")))
    assert 0 < records < 9 and not list(folder.glob("shards-*/end.json"))


def test_changed_text_is_named(streamed, corpus, documents):
    folder = quiet(streamed).folder
    write_parquet(corpus / "000.parquet", documents[:9])
    message = refusal(StreamDataset(folder, T).sequences, np.arange(1))
    assert f"restore {corpus}: its text has changed" in message
    (corpus / "000.parquet").unlink()
    StreamDataset(folder, T).sequences(np.arange(1))


def test_shards_of_another_tokenizer_are_not_read(tmp_path, streamed, monkeypatch):
    """Another version of tokenizers may train another bpe tokenizer on the same text."""
    bpe = replace(streamed, tokenizer=TokenizerConfig(name="bpe", vocab_size=300))
    first = quiet(bpe)
    ids = StreamDataset(first.folder, T).sequences(np.arange(9))
    (head,) = first.corpora().values()
    shutil.rmtree(head.folder)
    load = preparation.load_tokenizer
    monkeypatch.setattr(preparation, "load_tokenizer", lambda config, texts: load(config, list(texts)[30:]))
    expected = StreamDataset(quiet(replace(bpe, cache_dir=f"{tmp_path}/new")).folder, T)
    again = quiet(bpe)
    assert again.folder == first.folder
    read_again = StreamDataset(again.folder, T).sequences(np.arange(9))
    assert torch.equal(read_again, expected.sequences(np.arange(9))) and not torch.equal(read_again, ids)


def test_text_without_a_sequence_is_an_error_and_no_endless_search(streamed):
    data = StreamDataset(quiet(streamed).folder, 10**6)
    assert "shorter than a sequence" in refusal(data.sequences, np.arange(2))


def test_a_corpus_that_has_moved_is_read_where_it_is(streamed, corpus, documents):
    folder = quiet(streamed).folder
    moved = corpus.rename(corpus.with_name("moved"))
    assert quiet(replace(streamed, path=str(moved))).folder == folder
    assert np.array_equal(StreamDataset(folder, T).sequences(np.arange(2)), epoch_of(documents)[0][:2])


def test_validation_is_held_out_of_the_stream(streamed, documents):
    prepared = quiet(streamed)
    ((dataset, weight),) = open_validation(prepared.folder, 16).values()
    held_out, _, _ = expected_bytes(documents[:60], 0.2, "validation")
    whole = dataset.sequences(np.arange(len(dataset))).flatten().tolist()
    assert (whole, weight) == (held_out[: len(whole)], 1.0)
    assert prepared.describe()[0].startswith("stream of local")


def test_a_stream_has_no_limits(streamed):
    for change in ({"max_tokens": 10}, {"max_documents": 3}):
        assert f"data.{next(iter(change))}" in refusal(quiet, replace(streamed, **change))
