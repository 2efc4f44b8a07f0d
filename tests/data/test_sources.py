import gzip
import os
from dataclasses import replace

import datasets
import numpy as np
import pyarrow
import pyarrow.parquet
import pytest

from fla_train.data import files
from fla_train.data.config import DataConfig
from fla_train.data.prepare import prepare
from fla_train.data.sources import open_source
from fla_train.utils.errors import Interrupted
from tests.data.conftest import write_jsonl, write_mirror, write_parquet


def texts(config):
    return [d["text"] for d in open_source(config).documents()]


def test_stdlib_is_real_source_text_and_the_same_every_time():
    first, second = open_source(DataConfig()), open_source(DataConfig())
    assert first.description == second.description
    documents = list(first.documents())
    assert documents == list(first.documents()) == list(second.documents())
    names = [d["id"] for d in documents]
    assert names == sorted(names)
    assert "argparse.py" in names
    assert not any("site-packages" in name for name in names)
    import argparse

    with open(argparse.__file__, encoding="utf-8", newline="") as file:
        assert documents[names.index("argparse.py")]["text"] == file.read()


@pytest.mark.parametrize("layout", ["one parquet", "folder", "glob", "jsonl", "jsonl.gz"])
def test_local_layouts_hold_the_same_documents(tmp_path, local, corpus, documents, layout):
    path = {
        "one parquet": tmp_path / "one.parquet",
        "folder": corpus,
        "glob": f"{corpus}/*.parquet",
        "jsonl": tmp_path / "a.jsonl",
        "jsonl.gz": tmp_path / "a.jsonl.gz",
    }[layout]
    if layout == "one parquet":
        write_parquet(path, documents)
    elif layout.startswith("jsonl"):
        write_jsonl(path, documents)
    found = list(open_source(replace(local, path=str(path))).documents())
    assert found == [{"text": d["text"], "id": d["id"]} for d in documents]


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
    (chunk,) = open_source(hub, "a commit of the Hub").chunks(None)
    assert chunk.after["commit"] is None  # a run that was begun on the Hub may go on from a copy
    with pytest.raises(ValueError, match=r"fineweb \(no-such\).*data.name"):
        texts(replace(hub, name="no-such"))
    with pytest.raises(ValueError, match=r"no column 'content'.*data.text_column"):
        texts(replace(hub, text_column="content"))


@pytest.mark.parametrize("layout", ["SlimPajama", "c4"])
def test_hub_stream_of_copies_that_are_no_parquet(tmp_path, local, documents, layout, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    name = write_mirror(tmp_path / "copy", documents, layout)
    mirror = replace(local, source="hub", path="~/copy", name=name)
    assert texts(mirror) == [document["text"] for document in documents]
    before = open_source(mirror).description
    (tmp_path / "copy" / "README.md").write_text("Another word on the card.")
    assert open_source(mirror).description == before
    write_mirror(tmp_path / "copy", documents[1:], layout)
    assert open_source(mirror).description != before
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match=r"data\.path=.*empty: no file; give"):
        open_source(replace(mirror, path="~/empty"))


def test_an_error_in_a_local_copy_is_final(tmp_path, local, documents):
    """A connection may come back; what the copy lacks does not."""
    write_mirror(tmp_path / "copy", documents, "SlimPajama")
    copy = replace(local, source="hub", path=str(tmp_path / "copy"))
    with pytest.raises(ValueError, match="Bad split: test") as error:
        texts(replace(copy, split="test"))
    assert not isinstance(error.value, Interrupted)
    (tmp_path / "copy" / "train" / "chunk_1.jsonl.zst").write_bytes(b"no zstandard")
    with pytest.raises(ValueError, match=r"dataset .*copy, split train: cannot be read") as error:
        texts(copy)
    assert not isinstance(error.value, Interrupted)


def test_hub_offline_says_what_to_do(local, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    with pytest.raises(Interrupted, match=r"HuggingFaceFW/no-such-set.*local copy"):
        texts(replace(local, source="hub", path="HuggingFaceFW/no-such-set", name=None))


def test_description_follows_content_not_place(tmp_path, local, corpus, documents):
    moved = tmp_path / "elsewhere"
    corpus.rename(moved)
    before = open_source(replace(local, path=str(moved))).description
    moved.rename(corpus)
    assert open_source(local).description == before
    write_parquet(corpus / "000_00001.parquet", [*documents[70:-1], {**documents[-1], "text": "y" * 3000}])
    assert open_source(local).description != before


def test_hidden_files_are_no_text(tmp_path, local, documents):
    folder = tmp_path / ".dataset"  # above what was asked for, a dot hides nothing
    write_parquet(folder / "a.parquet", documents[:5])
    for name in (".ipynb_checkpoints/a.parquet", "b/.cache/a.parquet", ".a.parquet.tmp.parquet"):
        write_parquet(folder / name, documents[5:])
    hidden = replace(local, path=str(folder))
    assert texts(hidden) == [document["text"] for document in documents[:5]]
    assert [file["name"] for file in open_source(hidden).description["files"]] == ["a.parquet"]
    given = replace(local, path=str(folder / ".a.parquet.tmp.parquet"))
    assert texts(given) == [document["text"] for document in documents[5:]]
    (folder / "a.parquet").unlink()
    with pytest.raises(ValueError, match=r"no file ending in \.parquet"):
        open_source(hidden)


def test_links_to_folders_are_followed_and_a_folder_is_read_once(tmp_path, local):
    root = tmp_path / "disks" / "first"
    for name in ("own", "../second"):
        (root / name).mkdir(parents=True)
        (root / name / "a.jsonl").write_text(f'{{"text": "{name}"}}\n')
    (root / "a").mkdir()  # read before `own`, which its link leads to
    links = {"link": "../second", "another": "../second", "up": "..", "a/link": "../own", "b": "own"}
    for name, target in links.items():
        (root / name).symlink_to(target)
    source = open_source(replace(local, path=str(root)))
    assert sorted(d["text"] for d in source.documents()) == ["../second", "own"]
    assert "own/a.jsonl" in str(source.description)


@pytest.mark.skipif(os.geteuid() == 0, reason="root reads every folder")
def test_a_folder_that_cannot_be_read_is_named(tmp_path, local):
    (tmp_path / "corpus" / "closed").mkdir(parents=True, mode=0)
    (tmp_path / "corpus" / "a.jsonl").write_text('{"text": "one"}\n')
    with pytest.raises(ValueError, match=r"closed can't be read"):
        open_source(replace(local, path=str(tmp_path / "corpus")))


def test_a_file_that_a_glob_finds_in_several_ways_is_read_once(tmp_path, local):
    (tmp_path / "p" / "q").mkdir(parents=True)
    (tmp_path / "p" / "q" / "a.jsonl").write_text('{"text": "one"}\n')
    assert texts(replace(local, path=f"{tmp_path}/**/**/*.jsonl")) == ["one"]


def test_an_empty_file_that_is_not_packed_has_no_documents(tmp_path, local):
    (tmp_path / "a.jsonl").touch()
    write_jsonl(tmp_path / "b.jsonl", [{"text": "b"}])
    assert texts(replace(local, path=str(tmp_path / "*.jsonl"))) == ["b"]


@pytest.mark.parametrize("kind", ["string", "large_string", "string_view", "dictionary"])
def test_every_arrow_type_of_text(tmp_path, local, documents, kind, monkeypatch):
    monkeypatch.setattr(files, "CHUNK_BYTES", 1500)
    kinds = {"dictionary": pyarrow.dictionary(pyarrow.int32(), pyarrow.string())}
    column = pyarrow.array([document["text"] for document in documents])
    table = pyarrow.table({"text": column.cast(kinds.get(kind) or getattr(pyarrow, kind)())})
    pyarrow.parquet.write_table(table, tmp_path / "a.parquet")
    source = open_source(replace(local, path=str(tmp_path / "a.parquet")))
    chunks = list(source.chunks(None))
    found = [document["text"] for chunk in chunks for document in chunk.documents()]
    assert found == [document["text"] for document in documents]
    assert len(chunks) > 5 and sum(len(chunk.stream) for chunk in chunks) < 3 * column.nbytes


def test_missing_id_and_null_text(tmp_path, local):
    write_parquet(tmp_path / "a.parquet", [{"text": "a"}, {"text": None}])
    found = list(open_source(replace(local, path=str(tmp_path / "a.parquet"))).documents())
    where = tmp_path / "a.parquet"
    assert found == [{"text": "a", "id": f"{where}, row 1"}, {"text": "", "id": f"{where}, row 2"}]


def test_text_that_is_not_unicode_is_named_by_path_and_place(tmp_path, local):
    for folder in ("a", "b"):
        write_jsonl(tmp_path / folder / "data.jsonl", [{"text": "a"}, {"text": "\ud800" * (folder == "b")}])
    with pytest.raises(ValueError, match=r"b/data\.jsonl, line 2: not valid Unicode"):
        prepare(replace(local, path=f"{tmp_path}/*/data.jsonl"))
    offsets = pyarrow.py_buffer(np.array([0, 5, 7, 12], dtype=np.int32).tobytes())
    column = pyarrow.StringArray.from_buffers(3, offsets, pyarrow.py_buffer(b"hello\xff\xfeworld"))
    pyarrow.parquet.write_table(pyarrow.table({"text": column}), tmp_path / "bad.parquet")
    with pytest.raises(ValueError, match=rf"{tmp_path}/bad\.parquet, row 2: cannot be read .*utf-8.*repair"):
        prepare(replace(local, path=f"{tmp_path}/bad.parquet"))


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.parquet", b"PAR1 not parquet", r"a\.parquet: not a readable parquet file.*fetch it again"),
        ("a.jsonl", b'{"text": "a"}\n{"text": "b"\n', r"a\.jsonl, line 2: not JSON.*repair"),
        ("a.jsonl", b'{"text": "a"}\n[1]\n', r"a\.jsonl, line 2: not a JSON object"),
        (
            "a.jsonl",
            b'{"body": "a"}\n',
            r"a\.jsonl, line 1: no column 'text' \(it has body\); set data.text_column",
        ),
        ("a.jsonl", b'{"text": 3}\n', r"a\.jsonl, line 1: 'text' is int, not text"),
        ("a.jsonl", b'{"text": "\xff"}\n', r"a\.jsonl, line 1: not JSON"),
        ("a.jsonl", b'{"text": "a", "x": ' + b"[" * 10**5 + b"]" * 10**5 + b"}", r"line 1: not JSON.*repair"),
        ("a.jsonl.gz", b"", r"a\.jsonl\.gz: cannot be read \(it has no bytes.*fetch the file again"),
        (
            "a.jsonl.gz",
            gzip.compress(b'{"text": "a"}\n' * 999, mtime=0)[:-12],
            r"a\.jsonl\.gz: cannot be read.*fetch",
        ),
        ("a.txt", b"text", r"no file ending in \.parquet"),
    ],
)
def test_invalid_files_are_named_with_the_remedy(tmp_path, local, name, content, message):
    (tmp_path / "bad").mkdir()
    (tmp_path / "bad" / name).write_bytes(content)
    with pytest.raises(ValueError, match=message):
        texts(replace(local, path=str(tmp_path / "bad")))


def test_two_columns_of_the_same_name_are_refused(tmp_path, local):
    table = pyarrow.Table.from_arrays([pyarrow.array(["a"]), pyarrow.array(["b"])], names=["text", "text"])
    pyarrow.parquet.write_table(table, tmp_path / "twice.parquet")
    with pytest.raises(ValueError, match=r"twice\.parquet: several columns"):
        texts(replace(local, path=str(tmp_path / "twice.parquet")))


def test_an_id_column_that_is_there_twice_is_not_read(tmp_path, local):
    table = pyarrow.Table.from_arrays([pyarrow.array([name]) for name in "abc"], names=["text", "id", "id"])
    pyarrow.parquet.write_table(table, tmp_path / "a.parquet")
    (found,) = open_source(replace(local, path=str(tmp_path / "a.parquet"))).documents()
    assert found == {"text": "a", "id": f"{tmp_path / 'a.parquet'}, row 1"}


def test_corrupt_row_group_is_named(local, corpus):
    path = corpus / "000_00000.parquet"
    raw = bytearray(path.read_bytes())
    for at in range(len(raw) // 3, len(raw) // 3 + 400):  # well before the footer
        raw[at] ^= 0xFF
    path.write_bytes(raw)
    with pytest.raises(ValueError, match=r"000_00000\.parquet, row group \d+: cannot be read"):
        texts(local)


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz"])
def test_a_file_that_has_gone_is_named_with_the_remedy(tmp_path, local, name):
    write_jsonl(tmp_path / name, [{"text": "a"}])
    source = open_source(replace(local, path=str(tmp_path)))
    (tmp_path / name).unlink()
    with pytest.raises(
        ValueError, match=rf"{name}: cannot be read \(.*No such file.*\); fetch the file again"
    ):
        list(source.documents())


def test_missing_path_and_wrong_column_type(tmp_path, local):
    with pytest.raises(ValueError, match="no such file or folder"):
        open_source(replace(local, path=str(tmp_path / "nope")))
    write_parquet(tmp_path / "n.parquet", [{"text": ["a"]}])
    with pytest.raises(ValueError, match=r"holds list.*not text"):
        texts(replace(local, path=str(tmp_path / "n.parquet")))
