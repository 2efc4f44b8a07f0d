"""A whole evaluation: documents, report files, and resumption."""

import json
import math
import shutil
from pathlib import Path

import numpy as np
import pytest
from omegaconf import OmegaConf

from fla_train.data.config import DataConfig, TokenizerConfig
from fla_train.data.prepare import prepare
from fla_train.data.tokenize import is_held_out
from fla_train.eval import documents as documents_module
from fla_train.eval import perplexity_sweep as sweep_module
from fla_train.eval.config import EvalConfig, PerplexityConfig, SuiteConfig
from fla_train.eval.documents import run_data, validation_documents
from fla_train.eval.result import EvalResult
from fla_train.eval.run import check_output, evaluate, output_lock, write_comparison
from fla_train.hub.card import CardInfo
from fla_train.hub.export import export_model
from tests.eval.conftest import CHOICES, token_losses, value

TEXTS = [f"document {i}: " + "all work and no play " * (i % 7) for i in range(60)] + ["", "x"]


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("corpus") / "documents.jsonl"
    file.write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    return file


@pytest.fixture(scope="module")
def run(corpus: Path, scholar, tokenizer, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run folder as training leaves it."""
    folder = tmp_path_factory.mktemp("runs") / "first"
    cache = str(tmp_path_factory.mktemp("cache"))
    data = DataConfig(
        source="local",
        path=str(corpus),
        validation_fraction=0.5,
        tokenizer=TokenizerConfig(name="bytes"),
        cache_dir=cache,
    )
    prepare(data, log=lambda line: None)
    export_model(scholar, tokenizer, folder / "hf/step-0000080", CardInfo(seq_len=64))
    OmegaConf.save(OmegaConf.create({"seed": 0, "data": OmegaConf.structured(data)}), folder / "config.yaml")
    return folder


def perplexity_suite(**settings: object) -> SuiteConfig:
    return SuiteConfig(
        name="perplexity",
        perplexity=PerplexityConfig(**{"lengths": [16, 64, 4096], "bucket": 16, **settings}),
    )


def test_report_of_a_sweep(run: Path) -> None:
    folder, result = evaluate(EvalConfig(checkpoint=str(run), suite=perplexity_suite()), progress=False)
    assert folder.parent == run / "eval" and folder.name.startswith("perplexity-")
    assert result.name == "first/step-0000080" and result.trained_length == 64
    assert result == EvalResult.load(folder / "results.json")
    lengths = [score.length for score in result.scores if score.metric == "perplexity"]
    assert lengths == [16, 64] and "validation was not read over 4,096 tokens" in " ".join(result.notes)
    assert [list(c.edges) for c in result.curves if c.metric == "perplexity"] == [[0, 16, 32, 48, 64]]
    table = (folder / "table.md").read_text()
    assert all(f"| {s.length} | {s.metric} | {s.value:.4f} ± " in table for s in result.scores)
    assert json.loads((folder / "results.json").read_text())["metrics"] == result.metrics()
    assert result.metrics().keys() == {
        f"eval/validation/{metric}_{n}" for metric in ("loss", "bits_per_byte") for n in (16, 64)
    }


@pytest.mark.parametrize("least", [999, 4])
def test_the_default_reads_the_whole_validation_split(run, scholar, tokenizer, tmp_path, monkeypatch, least):
    """With configs/suite/perplexity.yaml: the training length, which is in no list, counts every token.

    So it does where sequences are longer.
    """
    monkeypatch.setattr(documents_module, "LEAST_SEQUENCES", least)
    file = Path(__file__).resolve().parents[2] / "configs/suite/perplexity.yaml"
    suite = OmegaConf.to_container(OmegaConf.load(file)).get("perplexity")
    config = PerplexityConfig(**(suite | {"lengths": [32, 256, 4096], "bucket": 16}))
    assert config.layout == "packed" and config.documents is None and config.scan is None
    config = EvalConfig(str(run), str(tmp_path / "out"), suite=SuiteConfig("perplexity", config))
    _, result = evaluate(config, progress=False)
    held_out = [document for document in validation_documents(run_data(run, tokenizer)) if len(document)]
    tokens = sum(map(len, held_out)) + len(held_out) - 1
    losses = {score.length: score for score in result.scores if score.metric == "loss"}
    size = max(losses)
    assert size == (256 if least == 4 else 64)
    read = losses[64].sequences * 64
    assert tokens - size < read <= tokens  # without the end, which does not fill a sequence
    assert sum(losses[64].weights) == sum(losses[size].weights) == read and sum(losses[32].weights) < tokens

    stream = [t for document in held_out for t in (tokenizer.eos_token_id, *document.tolist())]
    starts = range(1, read + 1, 64)
    total = sum(token_losses(scholar, [tokenizer.eos_token_id, *stream[i : i + 64]]).sum() for i in starts)
    assert losses[64].value == pytest.approx(total / read, abs=1e-4)
    count = sum(token != tokenizer.eos_token_id for token in stream[1 : read + 1])  # a token is a byte
    bits = value(result, "validation", "bits_per_byte", 64)
    assert bits == pytest.approx(total / math.log(2) / count, abs=1e-4)


def test_text_that_is_added_after_the_training_changes_no_validation_split(tmp_path: Path) -> None:
    corpus, run = tmp_path / "documents.jsonl", tmp_path / "run"
    corpus.write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    bpe = TokenizerConfig(name="bpe", vocab_size=300)
    paths = {"path": str(corpus), "cache_dir": str(tmp_path / "cache")}
    data = DataConfig(source="local", validation_fraction=0.5, tokenizer=bpe, **paths)
    prepared = prepare(data, log=lambda line: None)
    run.mkdir()
    OmegaConf.save(OmegaConf.create({"data": OmegaConf.structured(data)}), run / "config.yaml")
    (run / "plan.json").write_text(json.dumps({"data_folder": str(prepared.folder)}))
    tokenizer = prepared.tokenizer()
    held_out = [text for text in TEXTS if text and is_held_out(text.encode(), 0.5)]
    expected = [tokenizer.encode(text, add_special_tokens=False) for text in held_out]
    with corpus.open("a") as file:
        file.writelines(json.dumps({"text": f"zebra quartz {i} " * 9}) + "\n" for i in range(60))
    found = validation_documents(run_data(run, tokenizer))
    assert [document.tolist() for document in found] == expected
    shutil.rmtree(prepared.folder)
    with pytest.raises(ValueError, match="tokenizer"):
        run_data(run, tokenizer)
    (run / "config.yaml").write_text("seed: 0\n")  # of another program
    with pytest.raises(ValueError, match=r"suite\.perplexity\.sets"):
        run_data(run, tokenizer)


def test_a_lost_corpus_of_a_stream_is_prepared_again(corpus: Path, tokenizer, tmp_path: Path) -> None:
    paths = {"path": str(corpus), "cache_dir": str(tmp_path / "cache")}
    bytewise = TokenizerConfig(name="bytes")
    data = DataConfig(source="local", validation_fraction=0.5, stream=True, tokenizer=bytewise, **paths)
    stream = prepare(data, log=lambda line: None)
    expected = [document.tolist() for document in validation_documents(stream)]
    OmegaConf.save(OmegaConf.create({"data": OmegaConf.structured(data)}), tmp_path / "config.yaml")
    (tmp_path / "plan.json").write_text(json.dumps({"data_folder": str(stream.folder)}))
    for head in stream.corpora().values():
        shutil.rmtree(head.folder)
    found = validation_documents(run_data(tmp_path, tokenizer))
    assert [document.tolist() for document in found] == expected


def test_each_panel_has_all_documents_that_reach_it(run, tokenizer, scholar, tmp_path, monkeypatch):
    """Against the means of one pass over each document; a panel between two lengths, none beyond."""
    documents = [np.random.default_rng(n).integers(3, 259, n) for n in (20, 39, 40, 63, 64, 70, 90)]
    monkeypatch.setattr(sweep_module, "file_documents", lambda *arguments: (d for d in documents))
    suite = perplexity_suite(sets=["w.jsonl"], lengths=[16, 64, 96], panels=[16, 40, 80, 999], bucket=16)
    _, result = evaluate(EvalConfig(str(run), str(tmp_path / "out"), suite=suite), progress=False)
    losses = [token_losses(scholar, [tokenizer.eos_token_id, *document]) for document in documents]
    curves = {curve.length: curve for curve in result.curves if curve.metric == "perplexity"}
    assert [curve.sequences for curve in curves.values()] == [7, 5, 3, 1]
    for length, curve in curves.items():
        reaching = [row for row in losses if len(row) >= length]
        assert curve.edges[-1] == length and curve.sequences == len(reaching)
        for a, b, found in zip(curve.edges, curve.edges[1:], curve.value, strict=False):
            mean = np.mean([row[a:b].mean() for row in reaching])
            assert math.log(found) == pytest.approx(mean, abs=1e-4)


def test_a_set_that_cannot_be_read_costs_only_itself_and_others_are_not_read_again(
    run: Path, corpus: Path, tmp_path: Path, monkeypatch
) -> None:
    """Missing, empty, too short, or without the column."""
    calls = []
    real = sweep_module.loss_table
    monkeypatch.setattr(sweep_module, "loss_table", lambda *a, **k: calls.append(1) or real(*a, **k))
    rows = {"empty": "", "short": '{"text": "x"}\n', "other": '{"body": "x"}\n'}
    for name, text in rows.items():
        (tmp_path / f"{name}.jsonl").write_text(text)
    lost = [str(tmp_path / f"{name}.jsonl") for name in (*rows, "absent")]
    config = EvalConfig(str(run), str(tmp_path / "out"), suite=perplexity_suite(sets=[*lost, str(corpus)]))
    folder, first = evaluate(config, progress=False)
    assert first.errors.keys() == {*rows, "absent"} and {s.data for s in first.scores} == {"documents"}
    assert "no document of short" in first.errors["short"]
    assert "no column 'text' (it has body)" in first.errors["other"]
    assert f"suite.perplexity.sets={lost[-1]}: no such file" in first.errors["absent"]
    assert "absent could not run" in (folder / "table.md").read_text()
    count = len(calls)
    config.suite.perplexity.sets = [str(corpus)]
    _, again = evaluate(config, progress=False)
    assert again.scores == first.scores and len(calls) == count  # kept from the call that failed
    config.suite.perplexity.bucket = 8
    evaluate(config, progress=False)
    assert len(calls) == count + 1  # another request
    part = tmp_path / "out/parts/perplexity-documents.json"
    part.write_text(part.read_text()[:30])
    evaluate(config, progress=False)
    assert len(calls) == count + 2  # a file that a crash cut short


def test_results_of_another_model_are_not_written_over(run: Path, corpus: Path, tmp_path: Path) -> None:
    """New weights of the same run, or a tokenizer, are another checkpoint, whose results replace the old."""
    first, other = tmp_path / "a", tmp_path / "b"
    shutil.copytree(run, first)
    shutil.copytree(run, other)
    config = EvalConfig(str(first), str(tmp_path / "out"), suite=perplexity_suite(sets=[str(corpus)]))
    _, before = evaluate(config, progress=False)
    (first / "hf/step-0000080/tokenizer_config.json").touch()
    _, after = evaluate(config, progress=False)
    assert after.files != before.files
    (other / "hf/step-0000080/tokenizer_config.json").touch()
    config.checkpoint = str(other)
    with pytest.raises(ValueError, match=rf"{first}/hf/step-0000080.*{other}"):
        evaluate(config, progress=False)


@pytest.mark.parametrize("place", [".", "hf/step-0000080"])
def test_nothing_is_written_among_the_files_of_a_run(place: str, run: Path, tmp_path: Path) -> None:
    """The output is checked before the checkpoint. Folders in a run are fine."""
    copy = tmp_path / "run"
    shutil.copytree(run, copy)
    before = sorted(copy.rglob("*"))
    suite = perplexity_suite(sets=["absent.jsonl"])
    with pytest.raises(ValueError, match="holds a run"):
        evaluate(EvalConfig(str(tmp_path / "absent"), str(copy / place), suite=suite))
    with pytest.raises(ValueError, match="holds a run"):
        write_comparison(copy / place, ["a", "b"])
    assert sorted(copy.rglob("*")) == before
    check_output(copy / "eval/mine")


def test_an_output_folder_belongs_to_one_evaluation(run: Path, corpus: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    config = EvalConfig(str(run), str(out), suite=perplexity_suite(sets=[str(corpus)]))
    with output_lock(out), pytest.raises(ValueError, match=str(out)):
        evaluate(config, progress=False)
    assert not (out / "results.json").exists()


def test_tasks_and_a_task_that_fails(run: Path, write_task, quiz, tmp_path: Path) -> None:
    for name in ("quiz", "lost"):
        folder = write_task(name, quiz, **CHOICES)
    (folder / "lost.jsonl").rename(folder / "found.jsonl")
    suite = SuiteConfig(name="tasks", tasks=["quiz", "lost"], include_path=str(folder), limit=8)
    config = EvalConfig(str(run), str(tmp_path / "out"), suite=suite)
    _, result = evaluate(config, progress=False)
    assert value(result, "quiz", "acc") == 1.0 and result.errors.keys() == {"lost"}
    assert result.window == result.trained_length  # what `suite.max_length=null` means
    text = (tmp_path / "out/table.md").read_text()
    assert "| quiz | acc | 0.2500 | 1.0000 ± 0.0000 | 8 |" in text and "lost could not run" in text
    assert (tmp_path / "out/tasks.png").is_file() and "suite.limit=8" in text
    (folder / "found.jsonl").rename(folder / "lost.jsonl")
    _, result = evaluate(config, progress=False)
    assert value(result, "lost", "acc") == 1.0 and not result.errors
