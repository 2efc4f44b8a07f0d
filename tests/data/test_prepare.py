import hashlib
import json
import math
import os
import shutil
import subprocess
import sys
import threading
from collections import Counter
from dataclasses import asdict, replace

import numpy as np
import pytest
import tokenizers
from transformers import PreTrainedTokenizerFast

from fla_train.data.cache import (
    cache_paths,
    mixture_folder,
    open_prepared,
    stream_folder,
)
from fla_train.data.config import DataConfig, PartConfig, TokenizerConfig
from fla_train.data.tokenizers import load_tokenizer
from fla_train.utils.keys import find_errors
from tests.data.conftest import quiet, write_jsonl, write_parquet


def read(prepared, split):
    """(tokens, document ends in the split's stream), read without the library."""
    folder, dtype = prepared.folder / split, "<u2" if prepared.manifest["dtype"] == "uint16" else "<u4"
    tokens = [np.fromfile(f, dtype) for f in sorted(folder.glob("tokens-*.bin"))]
    starts = np.cumsum([0] + [len(t) for t in tokens])
    ends = [
        np.fromfile(f, "<u8").astype(np.int64) + start
        for f, start in zip(sorted(folder.glob("documents-*.bin")), starts, strict=False)
    ]
    return np.concatenate(tokens).tolist(), np.concatenate(ends).tolist()


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


@pytest.mark.parametrize("split", ["train", "validation"])
def test_shards_equal_a_naive_tokenization(local, documents, split):
    prepared = quiet(local)
    tokens, ends, size = expected_bytes(documents, 0.2, split)
    assert read(prepared, split) == (tokens, ends)
    entry = prepared.manifest["splits"][split]
    assert (entry["tokens"], entry["documents"], entry["text_bytes"]) == (len(tokens), len(ends), size)
    assert len(entry["shards"]) > 1
    assert prepared.manifest["empty_documents"] == 1
    counts = Counter(tokens)
    entropy = -math.fsum(n / len(tokens) * math.log(n / len(tokens)) for n in counts.values())
    assert entry["unigram_entropy"] == pytest.approx(entropy, abs=1e-12)
    prepared.verify()


def test_stdlib(tmp_path):
    config = DataConfig(max_documents=40, validation_fraction=0.3, cache_dir=str(tmp_path))
    config.tokenizer = TokenizerConfig(name="bpe", vocab_size=400)
    prepared = quiet(config)
    again = quiet(replace(config, cache_dir=str(tmp_path / "b")))
    for file in sorted(p.relative_to(prepared.folder) for p in prepared.folder.rglob("*") if p.is_file()):
        assert (prepared.folder / file).read_bytes() == (again.folder / file).read_bytes(), file
    splits = {s: prepared.manifest["splits"][s]["documents"] for s in ("train", "validation")}
    assert sum(splits.values()) + prepared.manifest["empty_documents"] == 40
    assert min(splits.values()) > 3
    tokenizer = prepared.tokenizer()
    texts = {}
    for split in splits:
        tokens, ends = read(prepared, split)
        bounds = zip([0, *ends], ends, strict=False)
        texts[split] = {tokenizer.decode(tokens[a : b - 1]) for a, b in bounds}
        assert {tokens[b - 1] for b in ends} == {tokenizer.eos_token_id}
    assert not texts["train"] & texts["validation"]
    assert any("import" in text for text in texts["train"])


def test_caps_and_separators(local, documents):
    few = quiet(replace(local, max_documents=10, validation_fraction=0.0))
    assert read(few, "train")[0] == expected_bytes(documents[:10], 0.0, "train")[0]
    assert few.manifest["splits"]["validation"] == {
        "documents": 0,
        "tokens": 0,
        "text_bytes": 0,
        "unigram_entropy": None,
        "shards": [],
    }
    tokens, ends, _ = expected_bytes(documents, 0.0, "train")
    capped = quiet(replace(local, max_tokens=2000, validation_fraction=0.0))
    stop = next(end for end in ends if end >= 2000)  # the document that reaches the cap stays whole
    assert read(capped, "train")[0] == tokens[:stop]
    bare = quiet(replace(local, append_eos=False, validation_fraction=0.0))
    assert read(bare, "train")[0] == [t for t in tokens if t != 2]


def test_reuse_and_rebuild(local, corpus, documents):
    lines = []
    first = quiet(local, lines.append)
    assert len(lines) == 1
    stamp = (first.folder / "manifest.json").stat().st_mtime_ns
    assert quiet(local, lines.append).folder == first.folder
    assert len(lines) == 1
    assert (first.folder / "manifest.json").stat().st_mtime_ns == stamp
    assert quiet(replace(local, shard_tokens=10**6)).folder == first.folder  # same tokens
    for change in (
        {"validation_fraction": 0.3},
        {"max_tokens": 10},
        {"append_eos": False},
        {"max_documents": 9},
    ):
        assert quiet(replace(local, **change)).folder != first.folder
    bpe = replace(local, tokenizer=TokenizerConfig(name="bpe", vocab_size=280))
    assert quiet(bpe).folder != first.folder
    write_parquet(corpus / "000_00001.parquet", documents[71:])
    assert quiet(local).folder != first.folder


@pytest.mark.parametrize("joined", [False, True], ids=["one corpus", "a mixture"])
def test_a_tokenizer_with_other_settings_than_its_copy_is_logged(tmp_path, local, joined):
    """Exports take the copy, which another run may use."""
    given, lines = load_tokenizer(local.tokenizer), []
    given.chat_template = "former"
    given.save_pretrained(tmp_path / "given")
    config = replace(local, tokenizer=TokenizerConfig(name=str(tmp_path / "given")))
    if joined:
        config = replace(config, source="mixture", path=None, mixture={"a": PartConfig(1.0, path=local.path)})
    former = quiet(config).folder
    quiet(config, lines.append)
    assert "chat_template" not in " ".join(lines)
    given.chat_template = "new"
    given.save_pretrained(tmp_path / "given")
    data = quiet(config, lines.append)
    assert data.folder == former and data.tokenizer().chat_template == "former"
    assert "chat_template" in lines[-1] and str(former / "tokenizer") in lines[-1]


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


def test_invalid_text_or_tokenizer(tmp_path, local, corpus):
    (corpus / "b.jsonl").write_text('{"text": "a"}\n{"text": "\\ud800", "id": "odd"}\n')
    with pytest.raises(ValueError, match=r"document odd: not valid Unicode.*repair"):
        quiet(local)
    (corpus / "b.jsonl").unlink()
    with pytest.raises(ValueError, match="no training document"):
        quiet(replace(local, validation_fraction=1 - 1e-12))
    quiet(local).tokenizer().save_pretrained(tmp_path / "t")
    (tmp_path / "t" / "tokenizer_config.json").unlink()
    with pytest.raises(ValueError, match=r"no end-of-sequence token; set data\.tokenizer\.eos_token"):
        quiet(replace(local, tokenizer=TokenizerConfig(name=str(tmp_path / "t"))))


def test_all_invalid_settings_are_named_together(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # a folder that exists is a path to files
    config = DataConfig(source="hub", validation_fraction=1.0, max_tokens=0)
    config.tokenizer = TokenizerConfig(name="bpe", vocab_size=10)
    with pytest.raises(ValueError) as failure:
        quiet(config)
    for key in ("validation_fraction", "max_tokens", "vocab_size"):
        assert key in str(failure.value)
    for config, key, option in (
        (DataConfig(path="x"), "data.path", "data=local"),
        (DataConfig(source="local", path="x", split="test"), "data.split", "data=hub"),
        (
            DataConfig(
                source="mixture",
                mixture={"a": PartConfig("stdlib", weight=1)},
                path="x",
                tokenizer=TokenizerConfig("bytes"),
            ),
            "data.path",
            "data=local",
        ),
    ):
        (error,) = find_errors(config, "data.")
        assert error.startswith(f"{key}=") and option in error
    for name in ("../x", "/x", "a/../b", "a/b/c", "hf://datasets/a/b"):
        for config in (
            DataConfig(source="hub", path=name),
            DataConfig(source="mixture", mixture={"a": PartConfig("hub", name, weight=1.0)}),
        ):
            assert f"path={name} is neither a dataset on the Hub" in " ".join(find_errors(config, "data."))
    (error,) = find_errors(DataConfig(source="web"), "data.")
    assert error == "data.source=web must be one of stdlib, local, hub, mixture"
    assert not find_errors(DataConfig(), "data.")


SLOW = """
import json, sys
from fla_train.data import files, shards
from fla_train.data import prepare as preparation
from fla_train.data.config import DataConfig, TokenizerConfig
from fla_train.data.prepare import prepare
settings = json.loads(sys.argv[1])
tokenizer = TokenizerConfig(**settings.pop("tokenizer"))
files.CHUNK_BYTES, preparation.COMMIT_SECONDS = 2000, 0.0
write = shards.ShardWriter.add
def slow(self, tokens, lengths, size):
    write(self, tokens, lengths, size)
    if self.documents > 30:
        shards.ShardWriter.add = write
        print("writing", flush=True)
        sys.stdin.readline()
shards.ShardWriter.add = slow
print(prepare(DataConfig(tokenizer=tokenizer, **settings), progress=False).folder, flush=True)
"""


def start(config):
    """A builder that stops in the middle until it is sent a line."""
    return subprocess.Popen(
        [sys.executable, "-c", SLOW, json.dumps(asdict(config))],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


def wait_for(process, text):
    for line in process.stdout:
        if text in line:
            return
    raise AssertionError(f"never said {text!r}")


def test_a_second_builder_waits_for_the_first(local):
    process = start(local)
    wait_for(process, "writing")
    lines = []

    def log(line):
        lines.append(line)
        process.stdin.write("go on\n")
        process.stdin.flush()

    prepared = quiet(local, log)
    assert process.wait() == 0
    assert process.stdout.read().split()[-1] == str(prepared.folder)
    assert len(lines) == 1
    assert "waiting for it" in lines[0]


def test_threads_of_one_process_are_kept_apart_too(local):
    folders = []
    threads = [threading.Thread(target=lambda: folders.append(quiet(local).folder)) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(folders) == 3
    assert len(set(folders)) == 1
    open_prepared(folders[0]).verify()


def test_cache_from_the_environment(tmp_path, local, monkeypatch):
    monkeypatch.setenv("FLA_TRAIN_CACHE", str(tmp_path / "env"))
    assert quiet(replace(local, cache_dir=None)).folder.parent == tmp_path / "env" / "data"


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda m: m.write_text(m.read_text()[:-30]), r"manifest\.json is corrupt.*run fla-prepare again"),
        (lambda m: m.write_text("[]"), r"manifest\.json is corrupt"),
        (
            lambda m: m.write_text(m.read_text().replace('"shards"', '"sards"')),
            r"manifest\.json is not as it was written",
        ),
        (lambda m: m.write_text(m.read_text().replace('"format": 1', '"format": 99')), "has format 99"),
        (lambda m: m.unlink(), r"manifest\.json does not exist.*run fla-prepare"),
    ],
)
def test_damaged_manifest(local, damage, message):
    folder = quiet(local).folder
    damage(folder / "manifest.json")
    with pytest.raises(ValueError, match=message):
        open_prepared(folder)


@pytest.mark.parametrize("file", ["train/tokens-00001.bin", "validation/documents-00000.bin"])
def test_a_shard_that_is_cut_short_or_lost_is_not_called_ready(local, file):
    shard = quiet(local).folder / file
    os.truncate(shard, shard.stat().st_size - 2)
    with pytest.raises(ValueError, match=rf"{file} has \d+ bytes instead of .*run fla-prepare again"):
        quiet(local)
    shard.unlink()
    with pytest.raises(ValueError, match=rf"{file} is missing"):
        quiet(replace(local, source="mixture", path=None, mixture={"a": PartConfig(1.0, path=local.path)}))


@pytest.mark.parametrize("kind", ["one corpus", "mixture", "stream"])
def test_a_lost_or_damaged_tokenizer_is_named(local, kind):
    if kind == "mixture":
        local = replace(local, source="mixture", path=None, mixture={"a": PartConfig(1.0, path=local.path)})
    data = quiet(replace(local, stream=kind == "stream"))
    (part,) = data.parts().values()
    file = part.folder / "tokenizer" / "tokenizer.json"
    file.write_text(file.read_text()[:500])
    message = rf"{part.folder}/tokenizer cannot be loaded .*delete {part.folder} and run fla-prepare again"
    with pytest.raises(ValueError, match=message):
        data.verify()
    shutil.rmtree(file.parent)
    with pytest.raises(ValueError, match=message):
        part.tokenizer()
    shutil.rmtree(data.folder / "tokenizer", ignore_errors=True)
    with pytest.raises(ValueError, match="tokenizer cannot be loaded"):
        data.tokenizer()


def test_folders_are_named_as_by_earlier_versions(tmp_path, monkeypatch):
    """Another name would have every corpus prepared again, and runs refuse to resume."""
    monkeypatch.chdir(tmp_path)
    write_jsonl(tmp_path / "a.jsonl", [{"text": "delta"}, {"text": "state"}])
    bpe = TokenizerConfig(name="bpe", vocab_size=300)
    config = DataConfig(source="local", path="a.jsonl", cache_dir="cache", tokenizer=bpe)
    paths = cache_paths(config)
    assert paths.final.name == "99eeda80fd0e80ed"
    assert paths.building.name == ".building-caeb5f093ab30680"
    assert stream_folder(config, paths.final.name).name == "9e25f323d5684d9f"
    config.mixture = {"a": PartConfig(0.7), "b": PartConfig(0.3)}
    parts = {name: name * 16 for name in config.mixture}
    assert mixture_folder(config, parts).name == "19ad6a0c713a81f6"


def test_describe(local, documents):
    lines = quiet(local).describe()
    tokens, ends, size = expected_bytes(documents, 0.2, "train")
    assert lines[0] == "local, vocabulary 259 (bytes)"
    assert f"train: {len(ends)} documents, {len(tokens):,} tokens, {size / len(tokens):.2f} bytes" in lines[1]
