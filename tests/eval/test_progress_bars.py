"""A bar for each long piece of work on stderr, and none when none is wanted."""

import json
import re
import time
from pathlib import Path

import pytest
from tqdm import tqdm

from fla_train.eval.config import EvalConfig, PerplexityConfig, SuiteConfig
from fla_train.eval.run import evaluate, progress_bars
from fla_train.hub.card import CardInfo
from fla_train.hub.export import export_model
from tests.eval.conftest import CHOICES, RECITE


@pytest.mark.parametrize("progress", [True, False])
def test_bars(
    progress: bool, monkeypatch, scholar, tokenizer, write_task, quiz, tmp_path: Path, capfd
) -> None:
    folder = write_task("quiz", quiz, **CHOICES)
    write_task("recite", quiz[:3], **RECITE)
    file = tmp_path / "texts.jsonl"
    file.write_text(json.dumps({"text": "red and blue " * 9}))
    checkpoint = export_model(scholar, tokenizer, tmp_path / "model", CardInfo(seq_len=64))
    perplexity = PerplexityConfig(sets=[str(file)], lengths=[16, 64], bucket=16)
    suite = SuiteConfig("both", perplexity, tasks=["quiz", "recite"], include_path=str(folder))
    capfd.readouterr()
    monkeypatch.setattr("fla_train.eval.run.LOG_SECONDS", 0)  # show short bars without a terminal, too
    evaluate(EvalConfig(str(checkpoint), str(tmp_path / "out"), suite=suite), progress=progress)
    shown = capfd.readouterr()
    bars = ("reading documents: 1", "loss: 100%", "log-likelihoods: 100%", "generate_until requests: 100%")
    if progress:
        assert all(bar in shown.err for bar in bars), shown.err
    else:  # neither ours nor those of lm-eval and `datasets`
        assert not re.search(r"%\||it/s|examples/s|document/s", shown.err), shown.err
    assert not shown.out


def test_a_log_does_not_fill_with_bars(capfd) -> None:
    with progress_bars(True):
        for _ in tqdm(range(20)):
            time.sleep(0.02)  # 0.4 s: tqdm writes a bar each 0.1 s
    assert not capfd.readouterr().err
