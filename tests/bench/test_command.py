"""`fla-bench` from end to end: its tables, its JSON, wrong requests, training on two ranks."""

import json

import pytest
import torch

from fla_train.bench import precompile
from fla_train.cli.bench import parse, run
from fla_train.run.resolve import resolve

SMALL = ["model=gated_delta_product/tiny", "trainer.seq_len=16", "trainer.micro_batch_size=1"]


@pytest.mark.parametrize(
    ("arguments", "rows"),
    [
        (["kernels", "--batch", "1", "--tokens", "8", "--heads", "2", "--head-dim", "4", "--no-gate"], 3),
        (["generate", "--batch", "1", "2", "--contexts", "4", "--new-tokens", "2", SMALL[0]], 2),
    ],
)
def test_tables_are_printed_and_written(arguments, rows, tmp_path, capsys, monkeypatch) -> None:
    monkeypatch.setattr("fla_train.bench.measure.CPU_SECONDS", 1e-3)
    run([*arguments, "--json", str(tmp_path / "x.json")])
    printed = capsys.readouterr().out
    assert (tmp_path / "x.md").read_text() == printed
    content = json.loads((tmp_path / "x.json").read_text())
    assert len(content["rows"]) == rows and "note" not in content["rows"][0]
    assert content["environment"] and content["settings"]["command"] == arguments[0]


@pytest.mark.long
def test_training_steps_are_timed_in_their_processes(tmp_path) -> None:
    arguments = [*SMALL, "trainer.global_batch_tokens=32", "launch.device=cpu"]
    run(["train", "--steps", "1", *arguments, "--json", str(tmp_path / "x.json")])
    (row,) = json.loads((tmp_path / "x.json").read_text())["rows"]
    assert (row["processes"], row["tokens_per_step"]) == (1, 32)
    assert row["tokens_per_second"] > 0 and row["parameters"] > 1e6


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["kernels", "--heads", "3", "--group", "2"], "multiple of --group"),
        (["train", "task=mqar", "trainer.seq_len=64"], "no task"),
        (["fused_ops", "--hidden", "192"], "--hidden 192 .* --head-dim 128"),
    ],
)
def test_a_wrong_request_is_a_value_error(arguments, message) -> None:
    with pytest.raises(ValueError, match=message):
        run(arguments)


def test_every_length_of_a_run_can_be_timed(monkeypatch) -> None:
    """The recipe of a run in tokens, with a warm-up, is measured like one in steps."""
    measured = []
    monkeypatch.setattr(
        "fla_train.bench.training.on_ranks", lambda *arguments: measured.append(arguments) or {}
    )
    monkeypatch.setattr("fla_train.bench.report.Report.__init__", lambda report, options: None)
    monkeypatch.setattr("fla_train.bench.report.Report.print", lambda report, line: None)
    monkeypatch.setattr("fla_train.bench.report.Report.table", lambda report, name, columns, rows: [*rows])
    lengths = ["trainer.max_tokens=4096", "schedule.warmup_steps=9", "trainer.global_batch_tokens=32"]
    run(["train", *SMALL, *lengths, "launch.device=cpu"])
    assert len(measured) == 1


def test_overrides_stand_anywhere() -> None:
    options = parse(["train", "a.b=1", "--peers", "llama", "fla", "c=2", "--", "d=3"])
    assert (options.peers, options.overrides) == (["llama", "fla"], ["a.b=1", "c=2", "d=3"])
    assert {*vars(options)} == {"command", "steps", "peers", "overrides", "json"}  # which a report records


@pytest.mark.slow
@pytest.mark.parametrize(
    "data",
    [
        ["task=mqar", "trainer.seq_len=64"],
        ["data=fineweb", "data.document_boundaries=true", "data.max_tokens=1000"],
        ["data=mixture", "+data.mixture={a:{weight:1,path:/a}}", "data.contiguous=true"],
        [
            "experiment=paper/deltaproduct_340m",
            "data.contiguous=true",
            "trainer.max_tokens=1000000",
            "schedule.warmup_steps=9",
        ],
    ],
)
def test_precompile_runs_a_short_run_and_leaves_kernels_only(data, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    launched = []
    monkeypatch.setattr(precompile, "launch", launched.append)
    monkeypatch.setenv("TRITON_CACHE_DIR", "")
    monkeypatch.setattr("fla_train.bench.report.Report.__init__", lambda report, options: None)
    monkeypatch.setattr("fla_train.bench.report.Report.print", lambda report, line: None)
    run(["precompile", "--folder", str(tmp_path), SMALL[0], "launch.device=cpu", *data])
    (config,) = launched
    assert config.trainer.max_steps == 2 and not config.hub.repo_id and config.init_from is None
    assert resolve(config).config.trainer.max_steps == 2  # no check rejects it
    if config.task is None:
        assert config.data.document_boundaries or config.data.contiguous  # other kernels than rows of text
    assert not list(tmp_path.iterdir())
