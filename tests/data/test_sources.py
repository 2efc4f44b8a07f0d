"""Sources: every layout yields its documents, and invalid ones are named by file and place."""

import argparse
import gzip
import json
import tracemalloc
from dataclasses import replace

import datasets
import numpy as np
import pyarrow
import pyarrow.parquet
import pytest

from fla_train.data.config import DataConfig
from fla_train.data.sources import open_source
from fla_train.utils.errors import Interrupted
from tests.data.conftest import quiet, write_jsonl, write_mirror, write_parquet
from tests.refusal import refusal

LIMIT = 1000


def texts(config):
    return list(open_source(config).texts())


def test_stdlib_is_real_source_text_and_the_same_every_time():
    first, second = open_source(DataConfig(shard_bytes=10**6)), open_source(DataConfig())
    assert first.description == second.description
    assert list(first.texts()) == list(first.texts()) == list(second.texts())
    pieces = list(first.slices(()))
    names = [name for piece in pieces for name in piece.names]
    assert len(pieces) > 10 and names == sorted(names)
    assert "argparse.py" in names and not any("site-packages" in name for name in names)
    with open(argparse.__file__, encoding="utf-8", newline="") as file:
        assert list(first.texts())[names.index("argparse.py")] == file.read()


@pytest.mark.parametrize("layout", ["one.parquet", "folder", "glob", "a.jsonl", "a.jsonl.gz"])
@pytest.mark.parametrize("shard_bytes", [1, 1500, 10**9])
def test_local_layouts_hold_the_same_documents(tmp_path, local, corpus, documents, layout, shard_bytes):
    path = {"folder": corpus, "glob": f"{corpus}/*.parquet"}.get(layout, tmp_path / layout)
    if layout == "one.parquet":
        write_parquet(path, documents)
    elif layout.startswith("a."):
        write_jsonl(path, documents)
    assert texts(replace(local, path=str(path), shard_bytes=shard_bytes)) == [d["text"] for d in documents]


def test_hidden_files_and_folders_are_left_out(tmp_path, local, documents):
    folder = tmp_path / "folder"
    for name in ("a.jsonl", ".b.jsonl", ".hidden/c.jsonl", "inner/d.jsonl", "inner/.e.parquet"):
        write_jsonl(folder / name, documents[:3])
    (folder / "linked").symlink_to(folder / "inner")  # the same folder again
    names = [file["name"] for file in open_source(replace(local, path=str(folder))).description["files"]]
    assert names == ["a.jsonl", "inner/d.jsonl"]


def test_hub_stream_of_a_local_copy(tmp_path, local, documents):
    """The layout of HuggingFaceFW/fineweb: a README that names configurations, and their parquet files."""
    root = tmp_path / "HuggingFaceFW" / "fineweb"
    write_parquet(root / "sample" / "10BT" / "000_00000.parquet", documents[:50])
    write_parquet(root / "sample" / "10BT" / "001_00000.parquet", documents[50:])
    write_parquet(root / "data" / "CC-MAIN-2013-20" / "000_00000.parquet", documents[:3])
    (root / "README.md").write_text(
        "---\nconfigs:\n- config_name: default\n  data_files:\n  - split: train\n    path: data/*/*\n"
        "- config_name: sample-10BT\n  data_files:\n  - split: train\n    path: sample/10BT/*\n---\n"
    )
    hub = replace(local, source="hub", path=str(root), name="sample-10BT")
    assert texts(hub) == [d["text"] for d in documents]
    assert texts(replace(hub, name="default")) == [d["text"] for d in documents[:3]]
    assert "data.name" in refusal(texts, replace(hub, name="no-such"))
    assert "no column 'content'" in refusal(texts, replace(hub, text_column="content"))


@pytest.mark.parametrize("ending", ["zst", "gz"])
def test_hub_stream_of_other_formats(tmp_path, local, documents, ending, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    write_mirror(tmp_path / "copy", documents, ending)
    mirror = replace(local, source="hub", path="~/copy")
    assert texts(mirror) == [document["text"] for document in documents]
    before = open_source(mirror).description
    (tmp_path / "copy" / "README.md").write_text("Another word on the card.")
    (tmp_path / "copy" / "linked").symlink_to(tmp_path / "copy" / "train")
    (tmp_path / "copy" / "train" / "elsewhere").symlink_to(local.path)
    assert texts(mirror) == [document["text"] for document in documents]
    assert open_source(mirror).description == before
    write_mirror(tmp_path / "copy", documents[1:], ending)
    assert open_source(mirror).description != before


def test_errors_of_a_copy_are_final_and_those_of_the_hub_are_not(tmp_path, local, documents, monkeypatch):
    write_mirror(tmp_path / "copy", documents, "zst")
    copy = replace(local, source="hub", path=str(tmp_path / "copy"))
    with pytest.raises(ValueError, match="Bad split: test") as error:
        texts(replace(copy, split="test"))
    assert not isinstance(error.value, Interrupted)
    (tmp_path / "copy" / "train" / "chunk_1.jsonl.zst").write_bytes(b"no zstandard")
    with pytest.raises(ValueError, match=r"dataset .*copy, split train") as error:
        texts(copy)
    assert not isinstance(error.value, Interrupted)
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    with pytest.raises(Interrupted, match="HuggingFaceFW/no-such-set"):
        texts(replace(local, source="hub", path="HuggingFaceFW/no-such-set", name=None))


def test_description_follows_content_not_place(tmp_path, local, corpus, documents):
    moved = tmp_path / "elsewhere"
    corpus.rename(moved)
    before = open_source(replace(local, path=str(moved))).description
    moved.rename(corpus)
    assert open_source(local).description == before
    write_parquet(corpus / "000_00001.parquet", [*documents[70:-1], {**documents[-1], "text": "y" * 3000}])
    assert open_source(local).description != before


def test_links_to_folders_are_followed_and_files_are_read_once(tmp_path, local):
    root = tmp_path / "disks" / "first"
    for name in ("own", "../second"):
        (root / name).mkdir(parents=True)
        (root / name / "a.jsonl").write_text(f'{{"text": "{name}"}}\n')
    for name, target in {"link": "../second", "another": "../second", "up": "..", "b": "own"}.items():
        (root / name).symlink_to(target)
    assert sorted(texts(replace(local, path=str(root)))) == ["../second", "own"]
    assert texts(replace(local, path=f"{root}/own/**/**/*.jsonl")) == ["own"]
    (root / "lost.jsonl").symlink_to("nowhere")
    for path in (root, root / "*.jsonl"):
        with pytest.raises(OSError, match="lost"):
            texts(replace(local, path=str(path)))


@pytest.mark.parametrize("kind", ["string", "large_string", "string_view", "dictionary"])
def test_every_arrow_type_of_text(tmp_path, local, kind):
    kinds = {"dictionary": pyarrow.dictionary(pyarrow.int32(), pyarrow.string())}
    column = pyarrow.array(["é" * (LIMIT // 2), None, "é" * (LIMIT // 2) + "a"])
    table = pyarrow.table({"text": column.cast(kinds.get(kind) or getattr(pyarrow, kind)())})
    pyarrow.parquet.write_table(table, tmp_path / "a.parquet")
    config = replace(local, path=str(tmp_path / "a.parquet"), max_line_bytes=LIMIT + 1)
    assert texts(config) == [value or "" for value in column.to_pylist()]
    # The limit counts bytes, not characters.
    assert "row 3: longer than data.max_line_bytes=1000" in refusal(
        texts, replace(config, max_line_bytes=LIMIT)
    )


def line_of(size: int) -> bytes:
    return json.dumps({"text": "a" * (size - len('{"text": ""}'))}).encode()


@pytest.mark.parametrize("name", ["bomb.jsonl", "bomb.jsonl.gz"])
def test_a_line_beyond_the_limit_is_not_read(tmp_path, local, name):
    """A small archive of one endless line does not fill the memory."""
    content = b"\n".join([line_of(LIMIT), line_of(40), line_of(64 << 20), line_of(40)])
    (tmp_path / name).write_bytes(gzip.compress(content, 1) if name.endswith(".gz") else content)
    del content
    config = replace(local, path=str(tmp_path / name), max_line_bytes=LIMIT)
    read = []
    tracemalloc.start()
    message = refusal(lambda: read.extend(open_source(config).texts()))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert f"{name}, line 3: longer than data.max_line_bytes=1000" in message
    assert peak < 8 << 20
    assert [len(text) for text in read] == [LIMIT - 12, 28]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.parquet", b"PAR1 not parquet", "a.parquet: cannot be read"),
        ("a.jsonl", b'{"text": "a"}\n{"text": "b"\n', "a.jsonl, line 2: not JSON"),
        ("a.jsonl", b'{"body": "a"}\n', "line 1: no column 'text' (it has body); set data.text_column"),
        ("a.jsonl", b'{"text": 3}\n', "a.jsonl, line 1: 'text' is int, not text"),
        ("a.jsonl", b'{"text": "a"}\n{"text": "\\ud800"}\n', "a.jsonl, line 2: not valid Unicode"),
        ("a.jsonl", b'{"text": "a", "x": ' + b"[" * 10**5 + b"]" * 10**5 + b"}", "line 1: not JSON"),
        ("a.jsonl.gz", gzip.compress(b'{"text": "a"}\n' * 999, mtime=0)[:-12], "a.jsonl.gz: cannot be read"),
    ],
)
def test_invalid_files_are_named(tmp_path, local, name, content, message):
    (tmp_path / "bad").mkdir()
    (tmp_path / "bad" / name).write_bytes(content)
    assert message in refusal(texts, replace(local, path=str(tmp_path / "bad"), shard_bytes=10))


def test_invalid_parquet_files_are_named(tmp_path, local, corpus):
    offsets = pyarrow.py_buffer(np.array([0, 5, 7, 12], dtype=np.int32).tobytes())
    column = pyarrow.StringArray.from_buffers(3, offsets, pyarrow.py_buffer(b"hello\xff\xfeworld"))
    pyarrow.parquet.write_table(pyarrow.table({"text": column}), tmp_path / "bytes.parquet")
    path = corpus / "000_00000.parquet"
    raw = bytearray(path.read_bytes())
    for at in range(len(raw) // 3, len(raw) // 3 + 400):  # well before the footer
        raw[at] ^= 0xFF
    (tmp_path / "group.parquet").write_bytes(raw)
    for name, message in (("bytes", "row 1 and following: cannot be read"), ("group", "cannot be read")):
        file = str(tmp_path / f"{name}.parquet")
        line = refusal(quiet, replace(local, path=file))
        assert file in line and message in line
    assert "no column 'body'" in refusal(quiet, replace(local, text_column="body"))
