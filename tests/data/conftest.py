import gzip
import json
import random

import pyarrow
import pyarrow.parquet
import pytest
import zstandard

from fla_train.data.config import DataConfig, TokenizerConfig
from fla_train.data.prepare import prepare

WORDS = ["state", "delta", "gate", "é", "日本", "\n\n", "  ", "\t", "😀"]
WORDS += ["</s>", "<eos>", "return x", "'s", "0.5"]


@pytest.fixture(scope="session")
def documents():
    """120 documents with FineWeb's columns; one empty, one twice, some with `</s>` in the text."""
    rng = random.Random(0)
    texts = [" ".join(rng.choices(WORDS, k=rng.randrange(1, 120))) for _ in range(117)]
    texts += ["", texts[0], "x" * 3000]
    return [
        {
            "text": text,
            "id": f"<urn:uuid:{i}>",
            "dump": "CC-MAIN-2013-20",
            "url": f"http://example.org/{i}",
            "language": "en",
            "language_score": 0.9,
            "token_count": len(text.split()),
        }
        for i, text in enumerate(texts)
    ]


def quiet(config, log=lambda line: None, **given):
    """`prepare` without log lines."""
    return prepare(config, log=log, **given)


def write_parquet(path, rows, row_group_size=16):
    path.parent.mkdir(parents=True, exist_ok=True)
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path, row_group_size=row_group_size)


def write_jsonl(path, rows):
    path.parent.mkdir(parents=True, exist_ok=True)
    opened = (
        gzip.open(path, "wt", encoding="utf-8") if path.suffix == ".gz" else path.open("w", encoding="utf-8")
    )
    with opened as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)


def write_mirror(folder, rows, ending):
    """A copy of a dataset of the Hub, packed as SlimPajama (zst) or as C4 (gz)."""
    pack, half = {"zst": zstandard.compress, "gz": gzip.compress}[ending], len(rows) // 2
    (folder / "train").mkdir(parents=True, exist_ok=True)
    for number, part in enumerate((rows[:half], rows[half:])):
        lines = "".join(json.dumps({"text": row["text"]}) + "\n" for row in part).encode()
        (folder / "train" / f"chunk_{number}.jsonl.{ending}").write_bytes(pack(lines))


@pytest.fixture
def corpus(tmp_path, documents):
    """A folder of two parquet files."""
    folder = tmp_path / "corpus"
    write_parquet(folder / "000_00000.parquet", documents[:70])
    write_parquet(folder / "000_00001.parquet", documents[70:])
    return folder


@pytest.fixture
def local(tmp_path, corpus):
    """Settings that read `corpus` as bytes, in several small shards."""
    return DataConfig(
        source="local",
        path=str(corpus),
        validation_fraction=0.2,
        shard_bytes=5000,
        cache_dir=str(tmp_path / "cache"),
        num_workers=0,
        tokenizer=TokenizerConfig(name="bytes"),
    )


@pytest.fixture
def prepared(local):
    return quiet(local)
