"""`dry_run=true` checks one's own data, and plans for machines that are not here."""

import json
import re
from pathlib import Path

import pytest

import fla_train
from fla_train.data.config import TokenizerConfig
from fla_train.data.tokenizers import load_tokenizer


@pytest.fixture
def corpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("FLA_TRAIN_CACHE", str(tmp_path / "cache"))
    file = tmp_path / "corpus.jsonl"
    file.write_text("".join(json.dumps({"content": f"text {n} " * 40}) + "\n" for n in range(100)))
    return file


def plan(capsys: pytest.CaptureFixture, *overrides: str) -> str:
    fla_train.train(fla_train.compose(*overrides, "logger=none", "dry_run=true"))
    return capsys.readouterr().out


def test_the_first_document_and_the_tokenizer_are_read(corpus: Path, capsys, monkeypatch):
    load_tokenizer(TokenizerConfig("bytes")).save_pretrained(corpus.parent / "saved")
    tokenizer = (corpus.parent / "saved/tokenizer.json").rename(corpus.parent / "own.json")
    monkeypatch.chdir(corpus.parent)
    own = ["data=local", "data.path=corpus.jsonl", "data.tokenizer.name=own.json"]
    with pytest.raises(ValueError, match=r"corpus\.jsonl, line 1: .*'text'"):
        plan(capsys, *own)
    column = "data.text_column=content"
    with pytest.raises(ValueError, match=r"data\.tokenizer\.eos_token"):
        plan(capsys, *own, column)
    given = [*own, column, "data.tokenizer.eos_token=<eos>"]
    assert "not on this machine" not in plan(capsys, *given)
    tokenizer.unlink()
    with pytest.raises(ValueError, match=r"own\.json"):
        plan(capsys, *given)


def test_machines_that_are_not_here(capsys, monkeypatch):
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    words = ["model=gated_delta_product/1.3b", "data=fineweb", "data.max_tokens=100000000000"]
    words += ["launch.num_machines=2", "launch.num_processes=16", "trainer.global_batch_tokens=524288"]
    hours = []
    for more in ([], ["launch.peak_tflops=1978.8"]):
        text = plan(capsys, *words, *more, "trainer.max_steps=190735")
        assert "data.name=sample-10BT" in text and "tokenizer fla-hub" in text
        assert "cuda, bf16" in text and "prepared tokens 200.00 GB" in text and "fits 80 GB: yes" in text
        assert "(at least 1.00 epochs)" in text  # of the tokens to prepare
        hours.append(float(re.search(r"= ([\d.]+) hours on 16 GPU", text)[1]))
    assert hours[0] == pytest.approx(2 * hours[1], abs=0.11)
