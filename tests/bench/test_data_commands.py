"""`fla-bench prepare` and `loader`: what they print of little data."""

import json
import re

import pytest

from fla_train.cli import bench
from fla_train.data.config import DataConfig, TokenizerConfig
from fla_train.data.prepare import prepare


def test_text_is_prepared_beside_raw_tokenizers_and_read(tmp_path, capsys) -> None:
    file = tmp_path / "texts.jsonl"
    file.write_text("".join(json.dumps({"text": f"text {i} " * 20}) + "\n" for i in range(300)))
    bench.run(["prepare", str(file), "bytes", "--documents", "200", "--rounds", "1", "--workers", "1"])
    first, speed, wall, _ = capsys.readouterr().out.splitlines()
    assert first.startswith("200 documents")
    raw, prepared = (int(n.replace(",", "")) for n in re.findall(r"(?:raw|prepared) ([\d,]+)", speed))
    share = float(re.search(r"at ([\d.]+)% of raw", wall)[1])
    assert share == pytest.approx(100 * prepared / raw, abs=0.06 + 100 / raw)
    data = DataConfig(source="local", path=str(file), tokenizer=TokenizerConfig(name="bytes"))
    data.cache_dir = str(tmp_path / "cache")
    folder = prepare(data, log=lambda line: None, progress=False).folder
    bench.run(["loader", str(folder), "--seq-len", "16", "--micro-batch", "2", "--seconds", "0.05"])
    lines = capsys.readouterr().out.splitlines()
    names = ["first read, blocks compared", "read again", "plain", "documents"]
    assert [line.split(":")[0] for line in lines] == names
