"""Prepared data: its tokens against a definition of a few lines, exactness, and damage."""

import errno
import hashlib
import math
import multiprocessing
import os
import random
import shutil
import signal
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import datasets
import numpy as np
import psutil
import pytest
import tokenizers
from transformers import ByT5Tokenizer, PreTrainedTokenizerFast

from fla_train.data import tokenize
from fla_train.data.cache import open_prepared
from fla_train.data.config import CorpusConfig, DataConfig, TokenizerConfig
from fla_train.data.dataset import TokenDataset
from fla_train.utils import filesystem
from fla_train.utils.errors import Interrupted
from fla_train.utils.keys import find_errors
from tests.data.conftest import WORDS, quiet, write_jsonl, write_parquet
from tests.refusal import refusal


def read(prepared, split):
    """(tokens, document ends in the split's stream), read without the library."""
    second, dtype = int(split == "validation"), np.dtype(prepared.manifest["dtype"])
    tokens, ends = [], []
    for number, shard in enumerate(prepared.manifest["shards"]):
        raw = (prepared.folder / f"shard-{number:05d}.bin").read_bytes()
        counts = [shard["train"], shard["validation"]]
        sizes = [*(c["tokens"] * dtype.itemsize for c in counts), *(c["documents"] * 8 for c in counts)]
        starts = np.cumsum([0, *sizes])
        part, end = (raw[starts[i] : starts[i + 1]] for i in (second, 2 + second))
        ends += (np.frombuffer(end, "<u8").astype(int) + len(tokens)).tolist()
        tokens += np.frombuffer(part, dtype).tolist()
    return tokens, ends


def expected_bytes(documents, fraction, split):
    """What the byte tokenizer must yield, by the definition: [b + 3 for each byte] + eos, split by sha1."""
    out, ends, size = [], [], 0
    for document in documents:
        raw = document["text"].encode()
        held_out = int(hashlib.sha1(raw).hexdigest()[:16], 16) < fraction * 2**64
        if raw and held_out == (split == "validation"):
            out += [b + 3 for b in raw] + [2]
            size += len(raw)
            ends.append(len(out))
    return out, ends, size


def contents(folder):
    """{relative path: bytes} of all files."""
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def mixture_of(local):
    mixture = {"a": CorpusConfig(path=local.path, weight=1.0)}
    return replace(local, source="mixture", path=None, mixture=mixture)


@pytest.mark.parametrize("kind", ["parquet", "jsonl", "jsonl.gz", "hub"])
def test_shards_equal_a_naive_tokenization(tmp_path, local, documents, kind):
    if kind.startswith("jsonl"):
        write_jsonl(tmp_path / f"a.{kind}", documents)
        local = replace(local, path=str(tmp_path / f"a.{kind}"))
    prepared = quiet(replace(local, source="hub" if kind == "hub" else "local"))
    assert len(prepared.manifest["shards"]) > 5 or kind == "jsonl.gz"
    for split in ("train", "validation"):
        tokens, ends, size = expected_bytes(documents, 0.2, split)
        assert read(prepared, split) == (tokens, ends)
        entry = prepared.manifest["splits"][split]
        assert (entry["tokens"], entry["documents"], entry["text_bytes"]) == (len(tokens), len(ends), size)
        counts = Counter(tokens)
        entropy = -math.fsum(n / len(tokens) * math.log(n / len(tokens)) for n in counts.values())
        assert entry["unigram_entropy"] == pytest.approx(entropy, abs=1e-12)
        line = f"{split}: {len(ends)} documents, {len(tokens):,} tokens, {size / len(tokens):.2f} bytes"
        assert any(line in text for text in prepared.describe())
    prepared.verify()


def test_limits_and_separators(local, documents):
    for few in (2, 10, 60, 119):
        limited = quiet(replace(local, max_documents=few))
        for split in ("train", "validation"):
            assert read(limited, split)[0] == expected_bytes(documents[:few], 0.2, split)[0]
    tokens, ends, _ = expected_bytes(documents, 0.2, "train")
    for most in (1, 2000, 15_000, 10**9):
        limited = quiet(replace(local, max_tokens=most))
        # The document that reaches the limit stays whole.
        assert read(limited, "train")[0] == tokens[: next((end for end in ends if end >= most), len(tokens))]
    bare = quiet(replace(local, append_eos=False, validation_fraction=0.0))
    assert read(bare, "train")[0] == [t for t in expected_bytes(documents, 0.0, "train")[0] if t != 2]
    assert bare.manifest["splits"]["validation"]["tokens"] == 0


def test_a_bpe_tokenizer_is_trained_without_the_validation_text(tmp_path, local, documents):
    bpe = replace(local, tokenizer=TokenizerConfig(name="bpe", vocab_size=400))
    rows = [row for row in documents if expected_bytes([row], 0.2, "train")[0]]
    write_jsonl(tmp_path / "train.jsonl", rows)
    alone = replace(bpe, path=str(tmp_path / "train.jsonl"), validation_fraction=0.0)
    assert 0 < len(rows) < len(documents)
    assert quiet(bpe).tokenizer().get_vocab() == quiet(alone).tokenizer().get_vocab()


def test_reuse_and_rebuild(local, corpus, documents):
    lines = []
    (corpus / "lost.jsonl.zst").write_bytes(b"of a kind that is not read")
    first = quiet(local, lines.append)
    assert len(lines) == 1 and f"{len([*corpus.iterdir()]) - 1} local" in lines[0]
    before = contents(first.folder)
    for same in ({}, {"shard_bytes": 10**6}, {"max_line_bytes": 10**5}, {"num_workers": None}):
        assert quiet(replace(local, **same), lines.append).folder == first.folder
    assert len(lines) == 1 and contents(first.folder) == before
    others = {"validation_fraction": 0.3}, {"max_tokens": 10}, {"append_eos": False}, {"max_documents": 9}
    for change in (*others, {"tokenizer": TokenizerConfig(name="bpe", vocab_size=280)}):
        assert quiet(replace(local, **change)).folder != first.folder
    write_parquet(corpus / "000_00001.parquet", documents[71:])
    assert quiet(local).folder != first.folder


def test_uint32_for_large_vocabularies(tmp_path, local):
    vocab = {f"w{i}": i for i in range(70_000)} | {"<eos>": 70_000}
    backend = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocab))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<eos>").save_pretrained(tmp_path / "large")
    write_jsonl(tmp_path / "words.jsonl", [{"text": "w65535 w65536"}, {"text": "w69999"}])
    large = replace(local, path=str(tmp_path / "words.jsonl"), validation_fraction=0.0)
    large = quiet(replace(large, tokenizer=TokenizerConfig(name=str(tmp_path / "large"))))
    assert large.manifest["dtype"] == "uint32"
    assert read(large, "train") == ([65535, 65536, 70_000, 69_999, 70_000], [3, 5])


def test_a_wrong_name_of_a_dataset_is_named():
    for name in ("../x", "/x", "a/../b", "a/b/c", "hf://datasets/a/b"):
        part = {"a": CorpusConfig("hub", name, weight=1.0)}
        for config in (DataConfig(source="hub", path=name), DataConfig(source="mixture", mixture=part)):
            assert f"path={name} is neither a dataset on the Hub" in " ".join(find_errors(config, "data."))


def test_a_tokenizer_without_a_tokenizer_json(tmp_path, local, documents):
    ByT5Tokenizer(extra_ids=0).save_pretrained(tmp_path / "byt5")  # byte b has id b + 3, and </s> is 1
    prepared = quiet(replace(local, tokenizer=TokenizerConfig(name=str(tmp_path / "byt5"))))
    tokens, ends, _ = expected_bytes(documents, 0.2, "train")
    assert read(prepared, "train") == ([1 if token == 2 else token for token in tokens], ends)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("limits", "num_workers"), [({}, None), ({"max_documents": 77}, 1), ({"max_tokens": 9000}, 1)]
)
def test_processes_give_the_same_bytes(tmp_path, local, monkeypatch, limits, num_workers):
    monkeypatch.setattr(tokenize, "available_cores", lambda: 2)
    local = replace(local, **limits)
    config = replace(local, num_workers=num_workers, cache_dir=str(tmp_path / "processes"))
    assert contents(quiet(config).folder) == contents(quiet(local).folder)


def _prepare_until_killed(config, after):
    """In a process of its own: dies by SIGKILL at the disk operation of that number."""
    left = [after]

    def deadly(operation):
        def wrapped(*arguments, **named):
            left[0] -= 1
            if left[0] == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            return operation(*arguments, **named)

        return wrapped

    for owner, name in ((os, "fsync"), (os, "replace"), (os, "rename"), (Path, "mkdir"), (Path, "unlink")):
        setattr(owner, name, deadly(getattr(owner, name)))
    quiet(config)


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind", ["local", *(pytest.param(x, marks=pytest.mark.long) for x in ("hub", "bpe"))]
)
def test_killed_at_any_disk_operation(tmp_path, local, kind):
    config = replace(local, source="hub" if kind == "hub" else "local", max_tokens=18_000)
    if kind == "bpe":
        config.tokenizer = TokenizerConfig(name="bpe", vocab_size=300)
    undisturbed = contents(quiet(replace(config, cache_dir=str(tmp_path / "once"))).folder)
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.data.test_prepare"])
    draw, kills = random.Random(0), 0
    for limit in [1, 3, 6, *(draw.randrange(7, 60) for _ in range(5 if kind == "local" else 2)), 10**9]:
        process = context.Process(target=_prepare_until_killed, args=(config, limit))
        process.start()
        process.join()
        kills += process.exitcode == -signal.SIGKILL
        assert process.exitcode in (0, -signal.SIGKILL)
    assert kills >= 3
    found = contents(quiet(config).folder)
    assert {name: found[name] for name in undisturbed} == undisturbed


@pytest.mark.long
def test_killed_at_random_moments_with_processes(tmp_path, local):
    draw = random.Random(1)
    rows = [{"text": " ".join(draw.choices(WORDS, k=4000))} for _ in range(400)]
    write_parquet(tmp_path / "large" / "a.parquet", rows)
    large = replace(local, path=str(tmp_path / "large"), shard_bytes=10**5)
    killed = replace(large, num_workers=2, cache_dir=str(tmp_path / "killed"))
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.data.test_prepare"])
    process = context.Process(target=quiet, args=(killed,))
    process.start()
    deadline = time.monotonic() + 120
    while len(list((tmp_path / "killed").glob(".building-*/*.bin"))) < 7:
        assert process.is_alive() and time.monotonic() < deadline
        time.sleep(0.01)
    workers = psutil.Process(process.pid).children()
    process.kill()
    process.join()
    names = [path.name for path in (tmp_path / "killed").glob(".building-*/*.bin")]
    lines = []
    assert contents(quiet(killed, lines.append).folder) == contents(quiet(large).folder)
    assert "resuming" in lines[0] and len(names) >= 7
    _, alive = psutil.wait_procs(workers, timeout=10)
    assert len(workers) >= 2 and not alive  # no process outlives its parent


@pytest.mark.slow
def test_a_process_that_dies(local, monkeypatch):
    monkeypatch.setattr(tokenize, "begin_process", math.sqrt)  # fails with its two arguments
    with pytest.raises(Interrupted, match=r"data\.num_workers"):
        quiet(replace(local, num_workers=1))
    monkeypatch.undo()
    quiet(local).verify()


def test_an_invalid_file_costs_nothing_that_lies_before_it(tmp_path, local, corpus, documents, monkeypatch):
    bad = corpus / "c.jsonl"
    bad.write_text('{"text": "a"}\n' * 300 + '{"text": "b\n')
    for _ in range(2):
        assert f"{bad}, line 301: not JSON" in refusal(quiet, local)
    written, write = [], tokenize.Encoder.write

    def counted(self, folder, number, *arguments):
        written.append(number)
        return write(self, folder, number, *arguments)

    monkeypatch.setattr(tokenize.Encoder, "write", counted)
    bad.write_text('{"text": "a"}\n' * 300 + '{"text": "b"}\n')
    whole = documents + [{"text": "a"}] * 300 + [{"text": "b"}]
    prepared = quiet(local)
    assert read(prepared, "train")[0] == expected_bytes(whole, 0.2, "train")[0]
    assert len(written) <= 2 < len(prepared.manifest["shards"])
    prepared.verify()


def test_an_interrupted_stream_continues(local, documents, monkeypatch):
    load, rows = datasets.load_dataset, []

    class Breaking:
        """A stream whose connection is lost after 70 rows of a process."""

        def __init__(self, stream, left):
            self._stream, self._left = stream, left

        def __getattr__(self, name):
            return getattr(self._stream, name)

        def select_columns(self, columns):
            return Breaking(self._stream.select_columns(columns), self._left)

        def __iter__(self):
            for count, row in enumerate(self._stream):
                if count == self._left:
                    raise ConnectionError("connection reset by peer")
                rows.append(row)
                yield row

    hub = replace(local, source="hub")
    monkeypatch.setattr(datasets, "load_dataset", lambda *a, **k: Breaking(load(*a, **k), 70))
    assert "cannot be read (connection reset by peer)" in refusal(quiet, hub)
    assert read(quiet(hub), "train")[0] == expected_bytes(documents, 0.2, "train")[0]
    assert len(rows) < len(documents) + 30  # only the rows of an unfinished shard are read twice


@pytest.mark.parametrize("name", ["bytes", "bpe"])
def test_text_that_changes_before_a_resume(local, corpus, documents, name):
    local = replace(local, tokenizer=TokenizerConfig(name=name, vocab_size=300))
    (corpus / "z.jsonl").write_text('{"text": 3}' if name == "bytes" else "{")
    refusal(quiet, local)
    (corpus / "z.jsonl").unlink()
    write_parquet(corpus / "000_00000.parquet", documents[:69])
    once = quiet(replace(local, cache_dir=f"{local.cache_dir}/once"))
    assert contents(quiet(local).folder) == contents(once.folder)


def test_text_that_changes_and_is_put_back(local, corpus, documents, monkeypatch):
    """A shard of the changed text is not kept, although the file is again as it was."""
    once = contents(quiet(replace(local, cache_dir=f"{local.cache_dir}/once")).folder)
    file, write = corpus / "000_00001.parquet", tokenize.Encoder.write
    whole = file.read_bytes()

    def changed(self, folder, number, *arguments):
        if number == 6:
            rows = [row | {"text": row["text"].replace("state", "taste")} for row in documents[70:]]
            write_parquet(file, rows)
        return write(self, folder, number, *arguments)

    monkeypatch.setattr(tokenize.Encoder, "write", changed)
    assert f"{file} changed" in refusal(quiet, local)
    monkeypatch.undo()
    file.write_bytes(whole)
    assert contents(quiet(local).folder) == once


def test_disk_full(local, documents, monkeypatch):
    replaced, room = os.replace, [9]

    def full(source, target):
        room[0] -= 1
        if room[0] < 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), target)
        replaced(source, target)

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(OSError, match="No space left on device"):
        quiet(local)
    monkeypatch.undo()
    lines = []
    prepared = quiet(local, lines.append)
    assert "resuming" in lines[0]
    assert read(prepared, "train")[0] == expected_bytes(documents, 0.2, "train")[0]
    prepared.verify()


@pytest.mark.parametrize("kind", ["corpus", "stream", "mixture"])
def test_concurrent_preparations_find_the_folder_whole(local, monkeypatch, kind):
    """Machines of one run, or runs of a sweep, that prepare at the same time."""
    config = mixture_of(local) if kind == "mixture" else replace(local, stream=kind == "stream")
    sync = filesystem.sync

    def slow_disk(path):
        time.sleep(0.005)
        sync(path)

    monkeypatch.setattr(filesystem, "sync", slow_disk)
    with ThreadPoolExecutor(4) as machines:
        found = list(machines.map(quiet, [config] * 4))
    assert len({prepared.folder for prepared in found}) == 1
    found[0].verify()
    assert not list(found[0].folder.parent.glob(".*/")) and not list(found[0].folder.glob("*.tmp"))


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('"shards"', '"shards', "damaged"),
        ('"uint16"', '"float16"', "not as it was written"),
        ('"format": 1', '"format": 99', "has format 99"),
    ],
)
def test_damaged_manifest(local, old, new, message):
    folder = quiet(local).folder
    file = folder / "manifest.json"
    file.write_text(file.read_text().replace(old, new))
    line = refusal(open_prepared, folder)
    assert str(file) in line and message in line and "run fla-prepare again" in line
    file.unlink()
    assert "run fla-prepare" in refusal(open_prepared, folder)


def flip(path, position):
    content = bytearray(path.read_bytes())
    content[position] ^= 1
    path.write_bytes(content)


def test_a_flipped_bit_is_found_when_its_block_is_read(local, corpus):
    """In tokens, bounds of documents, or checksums."""
    prepared = quiet(replace(local, shard_bytes=10**9, path=str(corpus / "000_00000.parquet")))
    shard = prepared.folder / "shard-00000.bin"
    counts = prepared.manifest["shards"][0]
    ends = 2 * (counts["train"]["tokens"] + counts["validation"]["tokens"])
    assert counts["bytes"] < 1 << 16  # one block
    for position in (6, ends + 8, counts["bytes"] - 1):
        flip(shard, position)
        dataset = TokenDataset(prepared.folder, "train", 8)
        for read_again in (dataset.sequences, dataset.sequences, dataset.boundaries):
            message = refusal(read_again, np.array([0]))
            assert str(shard) in message and f"delete {prepared.folder} and run" in message
        assert str(shard) in refusal(prepared.verify)
        flip(shard, position)
    prepared.verify()


@pytest.mark.parametrize("damage", ["cut", "lost"])
def test_a_shard_that_is_cut_short_or_lost_is_named(local, damage):
    prepared = quiet(local)
    shard = prepared.folder / "shard-00001.bin"
    if damage == "cut":
        os.truncate(shard, shard.stat().st_size - 2)
    else:
        shard.unlink()
    dataset = TokenDataset(prepared.folder, "train", 16)
    for work in (lambda: quiet(local), lambda: quiet(mixture_of(local)), prepared.verify):
        assert str(shard) in refusal(work)
    assert str(shard) in refusal(dataset.sequences, np.arange(len(dataset)))


@pytest.mark.parametrize("kind", ["corpus", "mixture", "stream"])
def test_a_lost_or_damaged_tokenizer_is_named(local, kind):
    data = quiet(mixture_of(local) if kind == "mixture" else replace(local, stream=kind == "stream"))
    (part,) = data.corpora().values()
    file = part.folder / "tokenizer" / "tokenizer.json"
    file.write_text(file.read_text()[:500])
    message = f"delete {part.folder} and run fla-prepare again"
    assert message in refusal(data.verify)
    shutil.rmtree(file.parent)
    assert message in refusal(data.tokenizer)
