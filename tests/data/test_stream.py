"""Training from a stream: the tokens are those of a preparation, also after any resume."""

import json
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from fla_train.data import cache, files, sources
from fla_train.data import stream as stream_module
from fla_train.data.open_dataset import open_train, open_validation
from fla_train.data.sampler import BatchSampler, PrefetchLoader
from fla_train.data.stream import INDEX, IndexWriter, Record, StreamDataset, read_index
from tests.data.conftest import quiet, write_jsonl, write_mirror, write_parquet
from tests.data.test_prepare import expected_bytes


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch):
    for module in (files, sources):
        monkeypatch.setattr(module, "CHUNK_BYTES", 1500)
    monkeypatch.setattr(stream_module, "SPACING", 3000)


@pytest.fixture
def streamed(local):
    return replace(local, stream=True, stream_head_documents=60)


def endless(documents, epochs=4):
    tokens, ends, _ = expected_bytes(documents, 0.2, "train")
    bounds = [end + epoch * len(tokens) for epoch in range(epochs) for end in ends]
    return np.array(tokens * epochs), bounds


def test_a_prepared_stream_is_not_written_again(streamed, documents):
    """Its cache may belong to somebody who lets others only read."""
    first = quiet(streamed)
    before = (first.folder / "manifest.json").stat().st_mtime_ns
    again = quiet(streamed)
    assert again.manifest == first.manifest
    assert (first.folder / "manifest.json").stat().st_mtime_ns == before


@pytest.mark.parametrize("kind", ["parquet", "jsonl", "hub", "SlimPajama", "c4"])
def test_the_stream_is_the_documents_in_order_over_epochs(tmp_path, streamed, documents, kind):
    if kind == "jsonl":
        write_jsonl(tmp_path / "a.jsonl", documents)
        streamed = replace(streamed, path=str(tmp_path / "a.jsonl"))
    elif kind == "hub":
        streamed = replace(streamed, source="hub")
    elif kind != "parquet":
        name = write_mirror(tmp_path / "mirror", documents, kind)
        streamed = replace(streamed, source="hub", path=str(tmp_path / "mirror"), name=name)
    prepared = quiet(streamed)
    tokens, bounds = endless(documents)
    data = open_train(prepared.folder, 48, seed=0)
    assert isinstance(data, StreamDataset)
    for first in range(0, len(tokens) // 48 - 8, 8):
        indices = np.arange(first, first + 8)
        expected = tokens[first * 48 : (first + 8) * 48].reshape(8, 48)
        assert data.sequences(indices).tolist() == expected.tolist()
        for index, starts in zip(indices, data.boundaries(indices), strict=True):
            begin = index * 48
            assert starts.tolist() == [b - begin for b in bounds if begin < b < begin + 48]
    assert len(read_index(prepared.folder / INDEX)) > 10


def test_resumed_twice_on_other_ranks(streamed, documents):
    tokens, _ = endless(documents)
    folder = quiet(streamed).folder

    def steps(first, last, world, micro):
        """The global batches of steps first to last - 1, from `world` ranks that all start afresh."""
        ranks = []
        for rank in range(world):
            plan = BatchSampler(12, micro, rank, world)
            with PrefetchLoader(StreamDataset(folder, 48), plan, first, last) as batches:
                ranks.append(list(batches))
        return torch.cat([part for group in zip(*ranks, strict=True) for part in group])

    seen = torch.cat([steps(0, 30, 2, 3), steps(30, 55, 1, 4), steps(55, 70, 3, 2), steps(70, 75, 2, 6)])
    assert seen.flatten().tolist() == tokens[: 75 * 12 * 48].tolist()


def test_resume_opens_near_the_place_and_works_without_the_index(streamed, documents, monkeypatch):
    tokens, _ = endless(documents)
    folder = quiet(streamed).folder
    first = StreamDataset(folder, 48)
    for step in range(40):
        first.sequences(np.arange(step * 8, step * 8 + 8))
    wanted = np.arange(320, 328)
    expected = tokens[320 * 48 : 328 * 48].reshape(8, 48).tolist()
    read = []
    encode_all = stream_module.encode_all

    def counted(*arguments):
        for piece in encode_all(*arguments):
            read.append(len(piece.tokens))
            yield piece

    with monkeypatch.context() as patch:
        patch.setattr(stream_module, "encode_all", counted)
        assert StreamDataset(folder, 48).sequences(wanted).tolist() == expected
    assert 0 < sum(read) < 8 * 48 + 3 * 3000
    assert first.sequences(np.arange(0, 2)).tolist() == tokens[:96].reshape(2, 48).tolist()  # back again
    index = folder / INDEX
    index.write_text(index.read_text()[:-20] + "\n")  # the last line cut short
    assert StreamDataset(folder, 48).sequences(wanted).tolist() == expected
    index.unlink()
    assert StreamDataset(folder, 48).sequences(wanted).tolist() == expected


@pytest.mark.parametrize(
    "line",
    [
        b'{"token": 9, "cursor": null, "digest": "\xff"}',
        b"null",
        b"[9, null, 3]",
        b'{"token": 9}',
        b'{"token": "9", "cursor": null, "digest": "a"}',
        b'{"token": NaN, "cursor": null, "digest": "a"}',
        b'{"token": 9, "cursor": [4], "digest": "a"}',
        b'{"token": 9, "cursor": {}, "digest": 4}',
    ],
)
def test_a_line_of_the_index_that_is_no_note_is_left_out(tmp_path, line):
    index = tmp_path / INDEX
    notes = [Record(5, {"file": 0, "row": 2}, "a"), Record(12, None, "b")]
    first, second = (json.dumps(note._asdict()).encode() for note in notes)
    index.write_bytes(b"\n".join([first, line, second, b""]))
    assert read_index(index) == notes


@pytest.fixture
def unseen_changes(monkeypatch):
    """As in the middle of a file, or on the Hub: the source's description stays."""
    monkeypatch.setattr(sources, "describe_files", lambda files: "the same")


def test_another_file_is_refused_when_the_stream_is_opened(streamed, corpus, documents):
    """At the next epoch, and by a run that resumes."""
    folder = quiet(streamed).folder
    data = StreamDataset(folder, 48)
    epoch = len(expected_bytes(documents, 0.2, "train")[0]) // 48
    data.sequences(np.arange(epoch))
    write_parquet(corpus / "000.parquet", documents[:9])
    with pytest.raises(ValueError, match=rf"{corpus} back as it was, or begin another run"):
        data.sequences(np.arange(epoch, epoch + 1))
    with pytest.raises(ValueError, match="back as it was"):
        StreamDataset(folder, 48).sequences(np.arange(1))
    (corpus / "000.parquet").unlink()
    StreamDataset(folder, 48).sequences(np.arange(epoch, epoch + 1))


def test_a_changed_stream_is_refused(streamed, corpus, documents, unseen_changes):
    folder = quiet(streamed).folder
    data = StreamDataset(folder, 48)
    for step in range(40):
        data.sequences(np.arange(step * 8, step * 8 + 8))
    changed = [{**d, "text": d["text"].replace("state", "taste")} for d in documents]
    write_parquet(corpus / "000_00000.parquet", changed[:70])
    write_parquet(corpus / "000_00001.parquet", changed[70:])
    with pytest.raises(ValueError, match=r"not what it was at token .*data\.revision"):
        StreamDataset(folder, 48).sequences(np.arange(320, 328))


def test_a_stream_without_text_is_an_error_and_no_endless_search(streamed, corpus, documents, unseen_changes):
    folder = quiet(streamed).folder
    for name in ("000_00000.parquet", "000_00001.parquet"):
        write_parquet(corpus / name, [{**d, "text": ""} for d in documents])
    with pytest.raises(ValueError, match="no training document"):
        StreamDataset(folder, 48).sequences(np.arange(2))


def test_a_corpus_that_has_moved_is_read_where_it_is(streamed, corpus, documents):
    folder = quiet(streamed).folder
    moved = corpus.rename(corpus.with_name("moved"))
    assert quiet(replace(streamed, path=str(moved))).folder == folder
    tokens, _ = endless(documents)
    assert StreamDataset(folder, 48).sequences(np.arange(2)).flatten().tolist() == tokens[:96].tolist()


def test_validation_is_held_out_of_the_stream(streamed, documents):
    prepared = quiet(streamed)
    ((dataset, weight),) = open_validation(prepared.folder, 16).values()
    held_out, _, _ = expected_bytes(documents[:60], 0.2, "validation")
    whole = dataset.sequences(np.arange(len(dataset))).flatten().tolist()
    assert (whole, weight) == (held_out[: len(whole)], 1.0)
    assert prepared.describe()[0].startswith("stream of local")
    assert quiet(streamed).folder == prepared.folder


def test_errors_of_streams(streamed, monkeypatch):
    with pytest.raises(ValueError, match=r"data\.max_tokens caps no stream"):
        quiet(replace(streamed, max_tokens=10))
    monkeypatch.setattr(sources.importlib.metadata, "version", lambda name: "5.0.0")
    with pytest.raises(ValueError, match=r"datasets 5\.0\.0 resumes streams at wrong places"):
        quiet(replace(streamed, source="hub"))


def test_an_index_that_the_disk_refuses_does_not_end_the_reading(tmp_path):
    writer = IndexWriter(tmp_path / "has gone" / INDEX)
    for token in (0, 5):
        writer.append(Record(token, None, ""))


def test_machines_agree_on_the_commit_of_such_a_shard(streamed, monkeypatch):
    monkeypatch.setattr(
        cache, "cache_paths", lambda config: SimpleNamespace(commit=lambda: None, is_ready=lambda: True)
    )
    monkeypatch.setattr(cache, "hub_commit", lambda config: "of now")
    hub = replace(streamed, source="hub", path="some/dataset")
    assert cache.find_commits(hub) == {"": "of now"}
    assert cache.find_commits(replace(hub, stream=False)) == {}
