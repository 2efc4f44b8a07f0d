"""The tables of the papers: their runs compose, and finished runs land in the right cells."""

import json
from pathlib import Path

import pytest

from fla_train.cli.app import compose
from fla_train.eval.expressivity_table import percent, read_tables, runs_of, show_averages, write_tables
from fla_train.training.config import register, to_config

TABLES = list(read_tables())
EXPERIMENTS = Path(__file__).resolve().parents[2] / "configs" / "experiment"


def finish(
    folder: Path,
    metric: str,
    value: float,
    seconds: float,
    *,
    last: int = 10,
    cut: bool = False,
    other: float = 0.75,
) -> None:
    folder.mkdir(parents=True)
    records = [
        {"step": 3, metric: value + 0.01},  # a better test before the last one does not count
        {"step": 5, metric: 0.1},
        {"step": last, metric: value, "longer/prefix_accuracy_128": other},
        {"step": last + 1, "loss": 1.0},
    ]
    if not cut:
        (folder / "complete").touch()
    (folder / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    environment = {"hardware": "an abacus", "commit": "c" * 40, "packages": {"torch": "9.8"}}
    day = f"2031-02-0{1 + int(seconds // 60)}T03:04:05+00:00"
    (folder / "environment.json").write_text(
        json.dumps(environment | {"time": day, "command": ["fla-train"]})
    )
    (folder / "config.yaml").write_text("task: {batch_size: 512}\n")
    (folder / "wall_seconds").write_text(f"{seconds}\n")
    name, metric = metric.split("/")
    curve = {"axis": "length", "metric": metric, "x": [40, 41], "y": [value, value], "n": [1, 1]}
    (folder / "accuracy.json").write_text(json.dumps({"step": last, "sets": {name: curve}}))


@pytest.mark.parametrize("table", TABLES)
def test_every_row_has_a_published_entry_for_each_column(table: str) -> None:
    content = read_tables()[table]
    for row, cells in content["rows"].items():
        assert len(cells["published"]) == len(content["columns"]), row
    folders = [run.folder(Path("home")) for run in runs_of(table, [0, 1])]
    assert len(set(folders)) == len(folders)


@pytest.mark.parametrize("table", TABLES)
def test_a_row_changes_fast_recipes_only(table: str) -> None:
    content = read_tables()[table]
    full = {run.name: run for run in runs_of(table, [0], fast=False)}
    for run in runs_of(table, [0]):
        own = content["rows"][run.row].get("fast", {})
        assert own.keys() <= content["columns"].keys()
        assert set(run.overrides) - set(full[run.name].overrides) == {
            run.overrides[0],
            *own.get(run.column, []),
        }


def test_published_numbers_are_those_of_the_paper() -> None:
    """The averages that table 2 of arXiv 2502.10297 prints follow from its other columns."""
    averages = {
        "Transformer": 0.026, "mLSTM": 0.054, "sLSTM": 0.653, "Mamba [0, 1]": 0.062, "Mamba [-1, 1]": 0.459,
        "DeltaNet [0, 1]": 0.274, "DeltaProduct_2 [0, 1]": 0.311, "DeltaProduct_3 [0, 1]": 0.326,
        "DeltaProduct_4 [0, 1]": 0.321, "DeltaNet [-1, 1]": 0.717, "DeltaProduct_2 [-1, 1]": 0.683,
        "DeltaProduct_3 [-1, 1]": 0.687, "DeltaProduct_4 [-1, 1]": 0.778,
    }  # fmt: skip
    rows = read_tables()["formal"]["rows"]
    for row, average in averages.items():
        assert sum(rows[row]["published"]) / 3 == pytest.approx(average, abs=6e-4), row


def test_a_row_with_an_empty_column_has_no_average() -> None:
    ours = ({"best": 1.0}, {"best": 0.5})
    assert show_averages((0.25, None), ours) == ["", "0.750"]
    assert show_averages((0.25, 0.5), (ours[0], None)) == ["0.375", ""]


def test_runs_compose() -> None:
    """Composing takes most of a second: the first run of each table, and one of each other model."""
    register()
    known = {str(path.relative_to(EXPERIMENTS).with_suffix("")) for path in EXPERIMENTS.rglob("*.yaml")}
    seen = set()
    for run in [run for table in TABLES for run in runs_of(table, [0])]:
        name = run.overrides[0].removeprefix("experiment=")
        assert {name, name.removesuffix("_fast")} <= known
        kind = next((text for text in run.overrides if text.startswith("model=")), run.table)
        if kind not in seen:
            seen.add(kind)
            assert to_config(compose("train", run.overrides)).task is not None
    assert len(seen) == len(TABLES) + 7


def test_the_papers_words_are_those_of_its_recipe() -> None:
    """Steps and sequences a step, as the recipe's files and those that they build on say."""
    register()
    for table in read_tables().values():
        for words, experiment in {*zip(table["paper_words"], table["columns"].values(), strict=True)}:
            if experiment in ("state_tracking/s3", "state_tracking/z60", "formal/parity", "mad/memorization"):
                config = compose("train", [f"experiment={experiment}"])
                assert config.trainer.max_steps * config.task.batch_size == words, experiment
    rows = read_tables()["formal"]["rows"]  # arXiv 2411.12537 E.1.1: 100k steps of 1,024, of mLSTM 512
    assert set(rows["Mamba [0, 1]"]["paper_words"]) == {100_000 * 1024}
    assert set(rows["mLSTM"]["paper_words"]) == {100_000 * 512}


def test_finished_runs_fill_the_table(tmp_path: Path) -> None:
    runs = [r for r in runs_of("formal", [0, 1, 2]) if (r.row, r.column) == ("DeltaNet [-1, 1]", "parity")]
    for run, value, seconds in zip(runs, (0.5, 1.0, 0.9), (30, 90, 150), strict=True):
        last = 400 if value == 1.0 else 800
        finish(run.folder(tmp_path), "longer/scaled_accuracy", value, seconds=seconds, last=last)
    other = next(r for r in runs_of("state_tracking", [0]) if r.row == "DeltaProduct_2 [-1, 1]")
    finish(other.folder(tmp_path), "longer/sequence_accuracy", 0.25, seconds=60, last=7, cut=True)
    untested = next(r for r in runs_of("mqar", [0])).folder(tmp_path)
    untested.mkdir(parents=True)
    (untested / "metrics.jsonl").write_text('{"step": 5, "loss": 1.0}\n{"step": 6, "lo')
    text = write_tables(tmp_path).read_text()
    results = json.loads((tmp_path / "tables.json").read_text())
    line = next(line for line in text.splitlines() if line.startswith("| DeltaNet [-1, 1] |"))
    assert line.split(" | ")[1:3] == [
        "0.982",
        "1.000 (0.900; 0.500 to 1.000; seeds 0, 1, 2; 400 to 800 steps; 1 to 2% of the words; 1.5 min)",
    ]
    assert {path.name for path in tmp_path.glob("*.png")} == {"formal-parity.png", "state_tracking-S3.png"}
    assert "![parity](formal-parity.png)" in text
    cell = results["formal"]["rows"]["DeltaNet [-1, 1]"]["parity"]
    assert cell["best_run"] == "formal/DeltaNet_-1_1/parity/seed-1"  # below the folder, wherever that is
    assert cell["values"] == {"seed-0": 0.5, "seed-1": 1.0, "seed-2": 0.9}
    (environment,) = results["formal"]["environments"]
    assert environment["commit"] == "c" * 40 and environment["packages"] == {"torch": "9.8"}
    assert environment["time"] == "2031-02-01 to 2031-02-03" and environment["runs"] == 3
    assert results["mqar"]["environments"] == []
    assert "an abacus" in text and "Multi-query" not in text
    numbers = "0.250 (0.250; 0.250 to 0.250; seeds 0; 7 steps; 0.0018% of the words; 1.0 min; 1 cut; at 128"
    assert f"| yes | {numbers} 0.750; half right to 0) |" in text
    assert "sLSTM was not run: " in text
    assert "| GLA |" not in text and "; GLA; RetNet; RWKV-7." in text  # rows of which there is nothing at all
    assert results["state_tracking"]["rows"]["DeltaProduct_2 [-1, 1]"]["S3"]["steps"] == {"seed-0": 7}
    assert results["mqar"]["rows"]["DeltaNet [0, 1]"]["width 64"] is None


def test_values_beside_the_metric_are_of_all_seeds(tmp_path: Path) -> None:
    runs = [r for r in runs_of("state_tracking", [0, 1, 2]) if (r.row, r.column) == ("GLA", "S5")]
    for run, other in zip(runs, (0.25, 0.75, 0.5), strict=True):
        finish(run.folder(tmp_path), "longer/sequence_accuracy", 0.0, seconds=60, other=other)
    assert "seeds 0, 1, 2" in write_tables(tmp_path).read_text()
    cell = json.loads((tmp_path / "tables.json").read_text())["state_tracking"]["rows"]["GLA"]["S5"]
    assert cell["beside"]["at 128"] == {"seed-0": 0.25, "seed-1": 0.75, "seed-2": 0.5}
    shorter = {"step": 10, "longer/sequence_accuracy": 0.0}  # a test that does not go so far
    (runs[2].folder(tmp_path) / "metrics.jsonl").write_text(json.dumps(shorter) + "\n")
    write_tables(tmp_path)
    cell = json.loads((tmp_path / "tables.json").read_text())["state_tracking"]["rows"]["GLA"]["S5"]
    assert cell["beside"] == {"at 128": {"seed-0": 0.25, "seed-1": 0.75}}


def test_lengths_up_to_which_half_of_the_words_are_right(tmp_path: Path) -> None:
    runs = [r for r in runs_of("state_tracking", [0, 1, 2]) if (r.row, r.column) == ("GLA", "S5")]
    for run, right in zip(runs, ([1, 0.5, 0.25, 0.5], [1, 0.75, 0.5, 0.5], [1, 1, 1, 0]), strict=True):
        finish(run.folder(tmp_path), "longer/sequence_accuracy", 0.0, seconds=60)
        curve = {
            "axis": "length",
            "metric": "sequence_accuracy",
            "x": [2, 4, 8, 1600],
            "y": right,
            "n": [9] * 4,
        }
        (run.folder(tmp_path) / "accuracy.json").write_text(
            json.dumps({"step": 10, "sets": {"longer": curve}})
        )
    assert "half right to 4 to 1,600+)" in write_tables(tmp_path).read_text()
    cell = json.loads((tmp_path / "tables.json").read_text())["state_tracking"]["rows"]["GLA"]["S5"]
    assert cell["half"] == {"seed-0": [4, 1600], "seed-1": [1600, 1600], "seed-2": [8, 1600]}


def test_shares_have_two_digits_and_no_exponent() -> None:
    shares = {1.8e-5: "0.0018", 0.0126: "1.3", 0.5: "50", 1: "100", 12.34: "1200"}
    assert {share: percent(share) for share in shares} == shares


def test_a_run_that_failed_takes_nothing_from_those_that_did_not(tmp_path: Path) -> None:
    done, failed = [r for r in runs_of("layers", [0]) if r.row == "2 layers"][:2]
    finish(done.folder(tmp_path), "longer/sequence_accuracy", 0.5, seconds=60)
    failed.folder(tmp_path).mkdir(parents=True)
    (failed.folder(tmp_path) / "failed").write_text("out of memory\n")
    text = write_tables(tmp_path).read_text()
    assert "2 layers did not run or end (S4 seed-0): out of memory." in text
    assert next(line for line in text.splitlines() if line.startswith("| 2 layers |")).count("0.500") == 4


def test_without_a_tested_run_there_is_no_table(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=str(tmp_path)):
        write_tables(tmp_path)
