"""A whole evaluation: documents, report files, and what is not run twice."""

import errno
import json
import os
import shutil
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from omegaconf import OmegaConf

from fla_train.data.config import DataConfig, TokenizerConfig
from fla_train.data.prepare import prepare
from fla_train.data.tokenizers import encode
from fla_train.eval import documents as documents_module
from fla_train.eval import run as run_module
from fla_train.eval import sweep as sweep_module
from fla_train.eval.config import EvalConfig, PerplexityConfig, SuiteConfig
from fla_train.eval.documents import file_documents, longest, run_data, validation_documents
from fla_train.eval.expressivity import evaluate_expressivity
from fla_train.eval.report import check_checkpoint, check_output, write_comparison
from fla_train.eval.run import _checkpoint_stamp, _name, evaluate, output_folder
from fla_train.eval.tables import markdown
from fla_train.hub.card import CardInfo
from fla_train.hub.export import export_model
from fla_train.hub.load import resolve_checkpoint
from fla_train.utils.keys import find_errors
from tests.eval.conftest import CHOICES, token_losses

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
    prepare(data, log=lambda line: None, progress=False)
    export_model(scholar, tokenizer, folder / "hf/step-0000080", CardInfo(seq_len=64))
    OmegaConf.save(OmegaConf.create({"seed": 0, "data": OmegaConf.structured(data)}), folder / "config.yaml")
    return folder


def perplexity_suite(**settings: object) -> SuiteConfig:
    return SuiteConfig(
        name="perplexity",
        perplexity=PerplexityConfig(**{"lengths": [16, 64, 4096], "bucket": 16, **settings}),
    )


def test_validation_documents_are_the_held_out_texts(run: Path, tokenizer) -> None:
    prepared = run_data(run)
    held_out = [tokenizer.decode(document) for document in validation_documents(prepared)]
    assert (
        set(held_out) < set(TEXTS) and len(held_out) == prepared.manifest["splits"]["validation"]["documents"]
    )
    assert 10 < len(held_out) < 50


def test_file_documents(corpus: Path, tokenizer) -> None:
    found = [document.tolist() for document in file_documents(str(corpus), tokenizer)]
    assert found == encode(tokenizer, TEXTS)


def test_longest() -> None:
    documents = [np.full(n, i) for i, n in enumerate([3, 9, 0, 50, 20, 30])]
    chosen = longest(documents, count=3, length=10, scan=5, progress=False)
    assert [(d[0], len(d)) for d in chosen] == [
        (3, 11),
        (4, 11),
        (1, 9),
    ]  # the last document is beyond the scan


def test_report_of_a_sweep(run: Path) -> None:
    folder, record = evaluate(EvalConfig(checkpoint=str(run), suite=perplexity_suite()), progress=False)
    assert folder.parent == run / "eval" and folder.name.startswith("perplexity-")
    assert record == json.loads((folder / "results.json").read_text())
    result = record["perplexity"]["validation"]
    assert [row["length"] for row in result["lengths"]] == [16, 64] and result["not_reached"] == [4096]
    assert [row["start"] for row in result["positions"]] == [0, 16, 32, 48]
    assert record["trained_length"] == 64
    environment = record["environment"]
    assert {"commit", "hardware", "time", "command", "dtype"} <= environment.keys()
    assert {"torch", "lm-eval", "transformers"} <= environment["packages"].keys()
    markdown = (folder / "table.md").read_text()
    assert "| 64 (trained) |" in markdown and "No document is long enough for 4096" in markdown
    assert f"{result['lengths'][0]['perplexity']:.3f}" in markdown
    assert (folder / "perplexity.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("least", [999, 4])
def test_the_default_reads_the_whole_validation_split(
    run: Path, scholar, tokenizer, tmp_path: Path, monkeypatch, least: int
) -> None:
    """As configs/suite/perplexity.yaml stands: the training length is there, though it is in no list, and
    counts every token also where sequences are longer.
    """
    monkeypatch.setattr(documents_module, "LEAST_SEQUENCES", least)
    file = Path(__file__).resolve().parents[2] / "configs/suite/perplexity.yaml"
    suite = OmegaConf.to_container(OmegaConf.load(file)).get("perplexity")
    config = PerplexityConfig(**(suite | {"lengths": [32, 256, 4096], "bucket": 16}))
    assert config.layout == "packed" and config.documents is None and config.scan is None
    config = EvalConfig(str(run), str(tmp_path / "out"), suite=SuiteConfig("perplexity", config))
    folder, record = evaluate(config, progress=False)
    result = record["perplexity"]["validation"]
    held_out = [document for document in validation_documents(run_data(run)) if len(document)]
    tokens = sum(map(len, held_out)) + len(held_out) - 1
    size = 256 if least == 4 else 64
    assert tokens - size < result["data"]["tokens"] <= tokens  # but for what fills no sequence
    rows = {row["length"]: row for row in result["lengths"]}
    row = rows[record["trained_length"]]
    longest = max(rows)
    assert longest == (256 if least == 4 else 64) and result["not_reached"][-1] == 4096
    assert row["sequences"] == result["data"]["tokens"] // 64 and row["documents"] == len(row["losses"])
    assert sum(row["targets"]) == result["data"]["tokens"]
    assert sum(rows[longest]["targets"]) == result["data"]["tokens"] and sum(rows[32]["targets"]) < tokens
    assert ("own_sequences" in row) == (longest > 64) and "own_sequences" not in rows[32]

    stream = [t for document in held_out for t in (tokenizer.eos_token_id, *document.tolist())]
    starts = range(1, result["data"]["tokens"] + 1, 64)
    total = sum(token_losses(scholar, [tokenizer.eos_token_id, *stream[i : i + 64]]).sum() for i in starts)
    assert row["loss"] == pytest.approx(total / result["data"]["tokens"], abs=1e-4)
    size = sum(token != tokenizer.eos_token_id for token in stream[1 : result["data"]["tokens"] + 1])
    assert row["bits_per_byte"] == pytest.approx(total / np.log(2) / size, abs=1e-4)  # a token is a byte
    text = (folder / "table.md").read_text()
    assert f"| {row['bits_per_byte']:.4f} |" in text and "bits per byte" in text
    assert "The documents fill too few sequences of" in text and "4096 tokens." in text
    assert record["metrics"]["eval/validation/bits_per_byte_64"] == row["bits_per_byte"]


def test_several_sets_of_files(run: Path, corpus: Path, tmp_path: Path) -> None:
    suite = perplexity_suite(sets=[str(corpus), f"{corpus.parent}/*.jsonl"], documents=5)
    _, record = evaluate(EvalConfig(str(run), str(tmp_path / "out"), suite=suite), progress=False)
    file, pattern = record["perplexity"]["documents"], record["perplexity"][corpus.parent.name]
    assert file == pattern and file["lengths"][0]["documents"] == 5


def test_each_panel_has_all_documents_that_reach_it(
    run: Path, tokenizer, scholar, tmp_path: Path, monkeypatch
) -> None:
    """Against the means of one pass over each document; a panel between two lengths, and one beyond."""
    documents = [np.random.default_rng(n).integers(3, 259, n) for n in (20, 39, 40, 63, 64, 70, 90)]
    monkeypatch.setattr(sweep_module, "file_documents", lambda *arguments: (d for d in documents))
    suite = perplexity_suite(sets=["w.jsonl"], lengths=[16, 64, 96], panels=[16, 40, 64, 999], bucket=16)
    _, record = evaluate(EvalConfig(str(run), str(tmp_path / "out"), suite=suite), progress=False)
    result = record["perplexity"]["w"]
    losses = [token_losses(scholar, [tokenizer.eos_token_id, *document]) for document in documents]
    for panel, end in (("16", 16), ("40", 40), ("64", 64), ("999", 64)):
        reaching = [row for row in losses if len(row) >= end]
        points = result["panels"][panel]
        assert points[-1]["end"] == end and {p["documents"] for p in points} == {len(reaching)}
        for point in points:
            mean = np.mean([row[point["start"] : point["end"]].mean() for row in reaching])
            assert point["loss"] == pytest.approx(mean, abs=1e-4)
    assert [points[0]["documents"] for points in result["panels"].values()] == [7, 5, 3, 3]
    assert result["positions"] == result["panels"]["64"] and result["not_reached"] == [96]


def test_what_was_read_ahead_is_let_go(run: Path, tmp_path: Path, monkeypatch) -> None:
    stream = (np.full(90, 5) for _ in range(9))
    monkeypatch.setattr(sweep_module, "file_documents", lambda *arguments: stream)
    held = []
    monkeypatch.setattr(sweep_module, "fingerprint", lambda documents: held.append(stream.gi_frame) or "f")
    suite = perplexity_suite(sets=["w.jsonl"], lengths=[64], layout="packed", documents=1)
    evaluate(EvalConfig(str(run), str(tmp_path / "out"), suite=suite), progress=False)
    assert held == [None]


def test_finished_parts_are_not_run_again(run: Path, corpus: Path, tmp_path: Path, monkeypatch) -> None:
    calls = []
    real = sweep_module.loss_table
    monkeypatch.setattr(sweep_module, "loss_table", lambda *a, **k: calls.append(1) or real(*a, **k))
    sets = [str(corpus), str(tmp_path / "absent.jsonl")]
    config = EvalConfig(str(run), str(tmp_path / "out"), suite=perplexity_suite(sets=sets))
    _, partial = evaluate(config, progress=False)
    assert "absent.jsonl" in partial["perplexity"]["absent"]["error"] and len(calls) == 1
    del config.suite.perplexity.sets[1]
    _, first = evaluate(config, progress=False)
    assert len(calls) == 1  # kept from the call that failed
    config.suite.perplexity.bucket = 8
    _, second = evaluate(config, progress=False)
    assert len(calls) == 2  # another question
    part = tmp_path / "out/parts/perplexity-documents.json"
    part.write_text(part.read_text()[:30])
    evaluate(config, progress=False)
    assert len(calls) == 3  # what a crash cut short is run again
    pairs = zip(
        first["perplexity"]["documents"]["lengths"], second["perplexity"]["documents"]["lengths"], strict=True
    )
    assert all(a["loss"] == pytest.approx(b["loss"]) for a, b in pairs)


@pytest.mark.parametrize("name", ["model.safetensors", "pytorch_model.bin", "tokenizer_config.json"])
def test_new_weights_or_another_tokenizer_are_another_checkpoint(
    name: str, build_model, tmp_path: Path
) -> None:
    (tmp_path / name).write_bytes(b"12")
    first = _checkpoint_stamp(tmp_path, build_model())
    (tmp_path / name).write_bytes(b"123")
    assert first and _checkpoint_stamp(tmp_path, build_model()) != first


def test_results_of_another_checkpoint_are_not_written_over(tmp_path: Path) -> None:
    def identity(name: str, stamp: int) -> dict:
        return {"checkpoint": name, "files": [["model.safetensors", 12, stamp]]}

    first, other = identity("runs/a/hf/step-0000100", 1), identity("runs/b/hf/step-0000100", 2)
    check_checkpoint(tmp_path, first, Path("runs/a"))
    (tmp_path / "results.json").write_text(json.dumps(first))
    check_checkpoint(tmp_path, identity("runs/a/hf/step-0000200", 3), Path("runs/a"))  # trained on
    check_checkpoint(tmp_path, identity(str(Path("runs/a/hf/step-0000100").absolute()), 1), None)
    with pytest.raises(ValueError, match="holds results of runs/a/hf/step-0000100, not of runs/b"):
        check_checkpoint(tmp_path, other, Path("runs/b"))
    (tmp_path / "results.json").write_text('{"check')
    check_checkpoint(tmp_path, other, Path("runs/b"))


@pytest.mark.parametrize("place", [".", "hf/step-0000080", "checkpoints/step-0000080"])
def test_nothing_is_written_among_the_files_of_a_run(place: str, run: Path, tmp_path: Path) -> None:
    """Refused before the checkpoint, which does not exist, is looked for. Folders in a run are fine."""
    copy = tmp_path / "run"
    shutil.copytree(run, copy)
    (copy / "checkpoints/step-0000080").mkdir(parents=True)
    (copy / "checkpoints/step-0000080/manifest.json").touch()
    before = sorted(copy.rglob("*"))
    suite = perplexity_suite(sets=["absent.jsonl"])
    for command in (evaluate, evaluate_expressivity):
        with pytest.raises(ValueError, match="output"):
            command(EvalConfig(str(tmp_path / "absent"), str(copy / place), suite=suite))
    with pytest.raises(ValueError, match="output"):
        write_comparison(copy / place, ["a", "b"])
    assert sorted(copy.rglob("*")) == before
    for inside in ("eval/mine", "eval"):
        check_output(copy / inside)


def test_a_new_commit_on_the_hub_is_another_checkpoint(build_model) -> None:
    model = build_model()
    model.config._commit_hash = "abc"
    assert _checkpoint_stamp("user/model", model) == ["abc"]


def test_models_are_named_from_within_their_folders(run: Path, tmp_path: Path, monkeypatch) -> None:
    alone = tmp_path / "alone"
    alone.mkdir()
    (alone / "config.json").touch()
    for folder, name in ((run, "first/step-0000080"), (run / "hf/step-0000080", "first/step-0000080"),
                         (alone, "alone")):  # fmt: skip
        monkeypatch.chdir(folder)
        assert _name(resolve_checkpoint(".")) == name
    unnamed = SimpleNamespace(output=None, suite=SimpleNamespace(name="recall"))
    assert output_folder(unnamed, Path(".")).parent == Path("evaluations/alone")
    assert _name("user/model") == "user/model"


def test_tasks_and_a_task_that_fails(run: Path, write_task, quiz, tmp_path: Path) -> None:
    for name in ("quiz", "lost"):
        folder = write_task(name, quiz, **CHOICES)
    (folder / "lost.jsonl").rename(folder / "found.jsonl")
    suite = SuiteConfig(name="tasks", tasks=["quiz", "lost"], include_path=str(folder), limit=8)
    config = EvalConfig(str(run), str(tmp_path / "out"), suite=suite)
    _, record = evaluate(config, progress=False)
    assert record["tasks"]["quiz"]["scores"]["quiz"]["acc"] == 1.0 and "error" in record["tasks"]["lost"]
    text = markdown([record])
    assert "| quiz | acc | 1.0000 | 0.0000 | 0.250 | 8 | 0 |" in text and "| lost | could not run" in text
    assert "Only the first 8 examples" in text
    assert record["window"] == record["trained_length"]  # what `suite.max_length` means where it is not given
    (folder / "found.jsonl").rename(folder / "lost.jsonl")
    _, record = evaluate(config, progress=False)
    assert record["tasks"]["lost"]["scores"]["lost"]["acc"] == 1.0


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (EvalConfig(), "give checkpoint=RUN"),
        (EvalConfig("absent"), "absent does not exist"),
        (EvalConfig("RUN", dtype="int4"), "dtype=int4 must be one of"),
        (EvalConfig("RUN", suite=SuiteConfig(name="tasks")), "suite.tasks is empty"),
        (EvalConfig("RUN", f"{__file__}/out", suite=perplexity_suite()), "test_evaluate.py is no folder"),
    ],
)
def test_requests_that_cannot_work(run: Path, config: EvalConfig, message: str) -> None:
    if config.checkpoint:
        config.checkpoint = config.checkpoint.replace("RUN", str(run))
    if not config.suite.tasks and config.suite.perplexity is None and message.startswith(("dtype", "absent")):
        config.suite = perplexity_suite()
    with pytest.raises(ValueError, match=message):
        evaluate(config, progress=False)


def test_faults_are_reported_together() -> None:
    suite = perplexity_suite(bucket=0, chunk=0, sets=["a/web.jsonl", "b/web.parquet"])
    suite.batch_size, suite.limit, suite.num_fewshot = "many", 0, -1
    errors = find_errors(suite, "suite.")
    assert [error.split("=")[0] for error in errors] == [
        "suite.num_fewshot",
        "suite.limit",
        "suite.perplexity.bucket",
        "suite.perplexity.chunk",
    ]
    sets = perplexity_suite(sets=["a/web.jsonl", "b/web.parquet"])
    assert "named web: rename a file" in find_errors(sets, "suite.")[0]


def test_a_full_disk_is_named(run: Path, corpus: Path, tmp_path: Path, monkeypatch) -> None:
    def full(*arguments: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(run_module, "write_report", full)
    config = EvalConfig(str(run), str(tmp_path / "out"), suite=perplexity_suite(sets=[str(corpus)]))
    with pytest.raises(OSError) as failure:
        evaluate(config, progress=False)
    assert failure.value.filename == str(tmp_path / "out")
    assert (tmp_path / "out/parts/perplexity-documents.json").is_file()
