"""Effective remembrance against two whole passes of a model, and the suite's table, figure and numbers."""

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from fla_train.eval.config import EvalConfig, PerplexityConfig, SuiteConfig
from fla_train.eval.remembrance import effective_remembrance, part_sizes
from fla_train.eval.run import evaluate
from fla_train.hub.card import CardInfo
from fla_train.hub.export import export_model
from fla_train.utils.keys import find_errors


def total_variation(model: PreTrainedModel, whole: list[int], part: list[int]) -> float:
    with torch.no_grad():
        p, q = (
            model(torch.tensor([ids]), use_cache=False).logits[0, -1].softmax(-1) for ids in (whole, part)
        )
    return torch.clamp(p - q, min=0).sum().item()  # equal to half the summed differences


@pytest.mark.parametrize("prefix", [[], [5]])
def test_it_is_the_distance_of_two_passes(model: PreTrainedModel, prefix: list[int]) -> None:
    documents = np.random.default_rng(0).integers(0, 256, (3, 40))
    sizes = [1, 7, 32, 40]
    found = effective_remembrance(model, documents, sizes, prefix=prefix, chunk=9)
    assert found.shape == (3, 4)
    for row, document in zip(found, documents.tolist(), strict=True):
        expected = [total_variation(model, prefix + document, prefix + document[-size:]) for size in sizes]
        assert row == pytest.approx(expected, abs=1e-4)
    assert found[:, -1] == pytest.approx(np.zeros(3), abs=1e-6) and found[:, 0].min() > 0.05


def test_a_model_that_forgets_at_once_remembers_nothing(build_model: Callable) -> None:
    """Without convolution, and with a decay of zero, a prediction depends on its last token."""
    model = build_model(initializer_range=0.3, use_short_conv=False).eval()
    for block in model.model.layers:
        block.attn.A_log.data.fill_(20.0)
    documents = np.random.default_rng(1).integers(0, 256, (2, 16))
    assert effective_remembrance(model, documents, [1, 4]).max() < 1e-5


def test_sizes_are_below_the_length() -> None:
    assert [part_sizes(n) for n in (1, 2, 8, 9)] == [[], [1], [1, 2, 4], [1, 2, 4, 8]]


def test_the_suite_reports_it(build_model: Callable, tokenizer, tmp_path: Path) -> None:
    model = build_model(initializer_range=0.3)
    checkpoint = export_model(model, tokenizer, tmp_path / "model", CardInfo(seq_len=16))
    texts = [f"document {i}: " + "some words again and again. " * 3 for i in range(6)]
    (tmp_path / "web.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    perplexity = PerplexityConfig(
        sets=[str(tmp_path / "web.jsonl")], lengths=[16, 48], bucket=16, remembrance_documents=3
    )
    config = EvalConfig(
        str(checkpoint), str(tmp_path / "out"), device="cpu", suite=SuiteConfig("perplexity", perplexity)
    )
    folder, _ = evaluate(config, progress=False)
    found = json.loads((folder / "results.json").read_text())["perplexity"]["web"]["remembrance"]
    assert found["length"] == 48 and found["documents"] == 3 and found["sizes"] == [1, 2, 4, 8, 16, 32]
    assert len(found["stderr"]) == 6 and all(0 <= value <= 1 for value in found["distance"])
    assert f"| 32 | {found['distance'][-1]:.4f} |" in (folder / "table.md").read_text()
    assert (folder / "remembrance.png").is_file() and (folder / "remembrance.pdf").is_file()


def test_a_negative_number_is_an_error() -> None:
    suite = SuiteConfig("x", PerplexityConfig(remembrance_documents=-1))
    assert any("remembrance_documents=-1" in line for line in find_errors(suite, "suite."))
