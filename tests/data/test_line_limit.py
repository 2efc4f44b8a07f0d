"""A small archive of one endless line does not fill the memory."""

import gzip
import json
import tracemalloc
from dataclasses import replace

import pyarrow
import pyarrow.parquet
import pytest

from fla_train.data.prepare import prepare
from fla_train.data.sources import open_source
from fla_train.eval.documents import file_documents

LIMIT = 1000


def line_of(size: int) -> bytes:
    return json.dumps({"text": "a" * (size - len('{"text": ""}'))}).encode()


@pytest.mark.parametrize("name", ["bomb.jsonl", "bomb.jsonl.gz"])
def test_a_line_beyond_the_limit_is_refused_unread(tmp_path, local, name):
    content = b"\n".join([line_of(LIMIT), line_of(40), line_of(64 << 20), line_of(40)])
    (tmp_path / name).write_bytes(gzip.compress(content, 1) if name.endswith(".gz") else content)
    del content
    config = replace(local, path=str(tmp_path / name), max_line_bytes=LIMIT)
    texts = []
    tracemalloc.start()
    with pytest.raises(ValueError, match=rf"{name}, line 3: longer than 1,000 bytes.*data\.max_line_bytes"):
        texts.extend(document["text"] for document in open_source(config).documents())
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 8 << 20
    assert [len(text) for text in texts] == [LIMIT - 12, 28]


@pytest.mark.parametrize("end", [b"", b"\n"])
def test_a_line_of_just_the_limit_is_read(tmp_path, local, end):
    (tmp_path / "a.jsonl").write_bytes(line_of(LIMIT) + b"\n" + line_of(LIMIT) + end)
    config = replace(local, path=str(tmp_path / "a.jsonl"), max_line_bytes=LIMIT)
    assert len(list(open_source(config).documents())) == 2
    with pytest.raises(ValueError, match="line 1: longer than 999 bytes"):
        list(open_source(replace(config, max_line_bytes=LIMIT - 1)).documents())


@pytest.mark.parametrize("kind", ["string", "large_string", "string_view", "dictionary"])
def test_a_text_of_a_parquet_file_has_the_limit_too(tmp_path, local, kind):
    """In bytes, not characters."""
    kinds = {"dictionary": pyarrow.dictionary(pyarrow.int32(), pyarrow.string())}
    column = pyarrow.array(["é" * (LIMIT // 2), None, "é" * (LIMIT // 2) + "a"])
    table = pyarrow.table({"text": column.cast(kinds.get(kind) or getattr(pyarrow, kind)())})
    pyarrow.parquet.write_table(table, tmp_path / "a.parquet")
    config = replace(local, path=str(tmp_path / "a.parquet"), max_line_bytes=LIMIT)
    with pytest.raises(ValueError, match=r"a\.parquet, row 3: longer than 1,000 bytes.*data\.max_line_bytes"):
        list(open_source(config).documents())
    assert len(list(open_source(replace(config, max_line_bytes=LIMIT + 1)).documents())) == 3


def test_the_limit_is_no_part_of_what_is_prepared(local):
    assert prepare(local).folder == prepare(replace(local, max_line_bytes=LIMIT * 100)).folder


def test_documents_of_an_evaluation_have_the_limit_too(tmp_path):
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(line_of(17_000_000), 1))
    with pytest.raises(ValueError, match=r"line 1: longer than 16,000,000 bytes; split or remove it"):
        next(file_documents(str(tmp_path / "a.jsonl.gz"), tokenizer=None))
