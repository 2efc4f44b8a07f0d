"""Documents, tokenizers and interruptions that an evaluation meets sooner or later."""

import json
import math
from pathlib import Path

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from fla_train.eval import harness
from fla_train.eval.config import EvalConfig, PerplexityConfig, SuiteConfig
from fla_train.eval.harness import FlaTrainLM, run_tasks
from fla_train.eval.run import evaluate
from fla_train.hub.card import CardInfo
from fla_train.hub.export import export_model
from tests.eval.conftest import CHOICES, ROLLING, token_losses

WORDS = ["<unk>", "<end>", "the", "sun", "is", "up", "."]


def words(**special: str) -> PreTrainedTokenizerFast:
    """A tokenizer that knows five words and has the special tokens named, no others."""
    backend = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="<unk>", **special)


@pytest.fixture
def sweep(build_model, tmp_path: Path):
    """`sweep(texts, tokenizer, lengths)`: the perplexity part of the results for a file of texts."""

    def run(texts: list[str], tokenizer: PreTrainedTokenizerFast, lengths: list[int]) -> tuple[dict, object]:
        model = build_model(initializer_range=0.3).eval()
        checkpoint = export_model(model, tokenizer, tmp_path / "model", CardInfo(seq_len=8))
        file = tmp_path / "texts.jsonl"
        file.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
        perplexity = PerplexityConfig(sets=[str(file)], lengths=lengths, bucket=2, documents=9)
        config = EvalConfig(str(checkpoint), str(tmp_path / "out"), suite=SuiteConfig("odd", perplexity))
        return evaluate(config, progress=False)[1]["perplexity"]["texts"], model

    return run


def test_empty_single_and_unknown_documents(sweep) -> None:
    texts = ["", "sun", "qua vadis domine", "the sun is up"]
    result, model = sweep(texts, words(eos_token="<end>"), [1, 3, 4, 100])
    documents = [[3], [0, 0, 0], [2, 3, 4, 5]]
    one, three, four = result["lengths"]
    assert (one["documents"], three["documents"], four["documents"]) == (3, 2, 1)
    expected = sum(token_losses(model, [1, ids[0]]).mean() for ids in documents) / 3
    assert one["loss"] == pytest.approx(expected, abs=1e-5)
    expected = sum(token_losses(model, [1, *ids[:3]]).mean() for ids in documents[1:]) / 2
    assert three["loss"] == pytest.approx(expected, abs=1e-5)
    assert four["stderr"] is None and four["low"] is None
    assert result["not_reached"] == [100]  # a context longer than any document


@pytest.mark.parametrize("texts", [[""], ["", "  "]])
def test_nothing_to_read(sweep, texts: list[str]) -> None:
    result, _ = sweep(texts, words(eos_token="<end>"), [1])
    assert "suite.perplexity.lengths" in result["error"] and not result["missing"]


def test_a_set_that_cannot_be_read_costs_only_itself(build_model, tmp_path: Path) -> None:
    """Too short, not there, without the column: a line each, and the set after them is measured."""
    checkpoint = export_model(
        build_model().eval(), words(eos_token="<end>"), tmp_path / "m", CardInfo(seq_len=8)
    )
    rows = {"short": {"text": "sun"}, "other": {"body": "the sun"}, "good": {"text": "the sun is up ."}}
    for name, row in rows.items():
        (tmp_path / f"{name}.jsonl").write_text(json.dumps(row) + "\n")
    sets = [str(tmp_path / f"{name}.jsonl") for name in ("short", "other", "absent", "good")]
    perplexity = PerplexityConfig(sets=sets, lengths=[4], bucket=2)
    config = EvalConfig(str(checkpoint), str(tmp_path / "out"), suite=SuiteConfig("odd", perplexity))
    folder, record = evaluate(config, progress=False)
    found = record["perplexity"]
    errors = {name: result["error"] for name, result in found.items() if "error" in result}
    assert errors.keys() == {"short", "other", "absent"} and not any("\n" in line for line in errors.values())
    assert "no document of short has 4 tokens" in errors["short"]
    assert errors["other"].endswith("no column 'text' (it has body); set suite.perplexity.text_column")
    assert errors["absent"].startswith(f"suite.perplexity.sets={tmp_path / 'absent.jsonl'}: no such file")
    assert found["good"]["lengths"][0]["documents"] == 1
    text = (folder / "table.md").read_text()
    assert all(f"Could not run: {line}" in text for line in errors.values())


def test_a_tokenizer_without_special_tokens(sweep) -> None:
    """Nothing can stand before a document: its first token is context only."""
    result, model = sweep(["the sun is up .", "sun"], words(), [4])
    assert result["lengths"][0]["documents"] == 1
    assert result["lengths"][0]["loss"] == pytest.approx(
        token_losses(model, [2, 3, 4, 5, 6]).mean(), abs=1e-5
    )


def test_tasks_with_a_tokenizer_without_bos(build_model, write_task) -> None:
    model = build_model(initializer_range=0.3).eval()
    texts = [{"text": "the sun is up"}, {"text": "nihil novi sub sole"}]
    folder = write_task("texts", texts, **ROLLING)
    lm = FlaTrainLM(model, words(eos_token="<end>"), batch_size=2)
    scores = run_tasks(lm, ["texts"], include_path=folder)["texts"]["scores"]["texts"]
    expected = sum(token_losses(model, ids).mean() for ids in ([1, 2, 3, 4, 5], [1, 0, 0, 0, 0])) / 2
    assert scores["word_perplexity"] == pytest.approx(math.exp(expected), rel=1e-4)


@pytest.mark.parametrize("share_contexts", [True, False])
def test_tasks_with_neither_bos_nor_eos(build_model, write_task, tmp_path, share_contexts: bool) -> None:
    """Only what begins with nothing is lost, until the tokenizer's settings name a token for it."""
    model = build_model(initializer_range=0.3).eval()
    rows = [{"text": "the sun is up", "head": "the sun", "choices": ["is up .", "up is"], "answer": 0}]
    write_task("texts", rows, **ROLLING)
    write_task("empty", rows, **CHOICES | {"doc_to_text": ""})
    folder = write_task("choice", rows, **CHOICES | {"doc_to_text": "{{head}}"})

    tokenizer = words(pad_token=".")
    lm = FlaTrainLM(model, tokenizer, batch_size=2, share_contexts=share_contexts)
    results = run_tasks(lm, ["texts", "empty", "choice"], include_path=folder)
    right, wrong = (token_losses(model, ids)[1:].sum() for ids in ([2, 3, 4, 5, 6], [2, 3, 5, 4]))
    assert results["choice"]["scores"]["choice"]["acc"] == float(right < wrong)
    for name in ("texts", "empty"):
        assert "neither BOS nor EOS" in results[name]["error"] and "\n" not in results[name]["error"]

    assert "eos_token in the checkpoint's tokenizer_config.json" in results["texts"]["error"]
    checkpoint = export_model(model, tokenizer, tmp_path / "model", CardInfo(seq_len=8))
    settings = checkpoint / "tokenizer_config.json"
    settings.write_text(json.dumps(json.loads(settings.read_text()) | {"eos_token": "<end>"}))
    repaired = FlaTrainLM(checkpoint, batch_size=2, device="cpu", share_contexts=share_contexts)
    scores = run_tasks(repaired, ["texts", "empty"], include_path=folder)
    perplexity = scores["texts"]["scores"]["texts"]["word_perplexity"]
    assert perplexity == pytest.approx(math.exp(token_losses(model, [1, 2, 3, 4, 5]).mean()), rel=1e-4)
    assert "scores" in scores["empty"]


def test_a_task_whose_data_are_empty(build_model, write_task, tokenizer) -> None:
    folder = write_task("texts", [], **ROLLING)
    (folder / "texts.jsonl").write_text("")
    lm = FlaTrainLM(build_model().eval(), tokenizer)
    result = run_tasks(lm, ["texts"], include_path=folder)["texts"]
    assert set(result) == {"error", "missing"} and "\n" not in result["error"]


def test_an_interrupted_evaluation_goes_on(
    scholar, tokenizer, write_task, quiz, tmp_path, monkeypatch
) -> None:
    for name in ("first", "second", "third"):
        folder = write_task(name, quiz[:4], **CHOICES)
    checkpoint = export_model(scholar, tokenizer, tmp_path / "model", CardInfo(seq_len=64))
    suite = SuiteConfig(name="tasks", tasks=["first", "second", "third"], include_path=str(folder))
    config = EvalConfig(str(checkpoint), str(tmp_path / "out"), suite=suite)
    run, real = [], harness.simple_evaluate

    def interrupted(*args: object, tasks: list[str], **options: object) -> dict:
        run.append(tasks[0])
        if run == ["first", "second"]:
            raise KeyboardInterrupt
        return real(*args, tasks=tasks, **options)

    monkeypatch.setattr(harness, "simple_evaluate", interrupted)
    with pytest.raises(KeyboardInterrupt) as stop:
        evaluate(config, progress=False)
    assert stop.value.args == (str(tmp_path / "out"),)
    assert not (tmp_path / "out/results.json").exists()
    _, record = evaluate(config, progress=False)
    assert run == ["first", "second", "second", "third"]
    assert [record["tasks"][name]["scores"][name]["acc"] for name in suite.tasks] == [1.0] * 3
