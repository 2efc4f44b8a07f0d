"""scripts/reproduce: the runs compose, and finished runs land in the right cells of the papers' tables."""

import json
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType

import pytest

from fla_train.cli.app import compose
from fla_train.cli.overrides import options, repository
from fla_train.cli.train_list import read_list
from fla_train.models.build import build_on_meta
from fla_train.training.config import register, to_config

SCRIPTS = Path(__file__).parents[1] / "scripts" / "reproduce"


def load(name: str) -> ModuleType:
    """Return a script as a module."""
    spec = spec_from_file_location(name, SCRIPTS / f"{name}.py")
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


expressivity = load("expressivity")


def test_published_numbers_are_those_of_the_paper() -> None:
    """The averages that table 2 of arXiv 2502.10297 prints follow from its other columns."""
    averages = {
        "Transformer": 0.026, "mLSTM": 0.054, "sLSTM": 0.653, "Mamba [0, 1]": 0.062, "Mamba [-1, 1]": 0.459,
        "DeltaNet [0, 1]": 0.274, "DeltaProduct_2 [0, 1]": 0.311, "DeltaProduct_3 [0, 1]": 0.326,
        "DeltaProduct_4 [0, 1]": 0.321, "DeltaNet [-1, 1]": 0.717, "DeltaProduct_2 [-1, 1]": 0.683,
        "DeltaProduct_3 [-1, 1]": 0.687, "DeltaProduct_4 [-1, 1]": 0.778,
    }  # fmt: skip
    rows = expressivity.read_tables()["formal"]["rows"]
    for row, average in averages.items():
        assert sum(rows[row]["published"]) / 3 == pytest.approx(average, abs=6e-4), row


def test_runs_compose() -> None:
    """Every option exists; composing takes most of a second, so only one run of each table is composed."""
    register()
    repo = repository()
    known = {group: {"null", *options(repo, group)} for group in ("experiment", "model", "scale")}
    tables = set()
    for name, overrides in [*expressivity.runs(seeds=[0]), *expressivity.runs(seeds=[0], paper_steps=True)]:
        for text in overrides:
            group, _, option = text.partition("=")
            assert option in known.get(group, {option}), f"{name}: {text}"
        if (table := name.split("/")[0]) not in tables:
            tables.add(table)
            assert to_config(compose("train", overrides)).task is not None


def test_language_models_have_equal_sizes() -> None:
    register()
    counts = {}
    for name, overrides in read_list(SCRIPTS / "language_models.yaml").items():
        config = to_config(compose("train", [*overrides, "model.vocab_size=32000"]))
        if config.model.get("source") != "fla":  # flash-linear-attention may be missing
            counts[name] = sum(parameter.numel() for parameter in build_on_meta(config.model).parameters())
    assert len(counts) > 6 and max(counts.values()) < 1.06 * min(counts.values()), counts


def finish(run: Path, metric: str, value: float) -> None:
    """Write the files of a run whose last test gave `value`."""
    run.mkdir(parents=True)
    records = [{"step": 5, metric: 0.1}, {"step": 9, metric: value}]
    (run / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    (run / "environment.json").write_text('{"hardware": "an abacus", "commit": null}')


def test_finished_runs_fill_the_table(tmp_path: Path) -> None:
    for seed, value in enumerate((0.5, 1.0, 0.9)):
        run = tmp_path / "state_tracking" / "DeltaProduct_2_-1_1" / "S3" / f"seed-{seed}"
        finish(run, "longer/sequence_accuracy", value)
        curve = {"x": [2, 4, 8], "y": [1, value, 0.25]}
        (run / "accuracy.json").write_text(json.dumps({"step": 9, "sets": {"longer": curve}}))
    expressivity.main(["table", str(tmp_path)])
    lines = (tmp_path / "tables.md").read_text().splitlines()
    (row,) = (line for line in lines if line.startswith("| DeltaProduct_2 [-1, 1] |"))
    assert row.split(" | ")[2] == "1.000 (0.900; 0.500), 50% to 4/4/4"
    assert len([line for line in lines if line.startswith("## ")]) == 1
    cell = json.loads((tmp_path / "tables.json").read_text())["state_tracking"]["DeltaProduct_2 [-1, 1]"][
        "S3"
    ]
    assert [test["value"] for test in cell] == [0.5, 1.0, 0.9]


def test_the_mean_of_a_column_is_over_the_rows_it_has(tmp_path: Path) -> None:
    runs = [name for name, _ in expressivity.runs(seeds=[0]) if name.startswith("mad_sizes/")]
    memorization = [name for name in runs if "/memorization/" in name]
    for number, name in enumerate([*memorization, next(name for name in runs if "/compression/" in name)]):
        finish(tmp_path / name, "test/accuracy", number / 10)
    expressivity.main(["table", str(tmp_path)])
    (row,) = (
        line for line in (tmp_path / "tables.md").read_text().splitlines() if line.startswith("| mean |")
    )
    assert len(memorization) == 6 and "| 0.422 |  |" in row and "| 0.528 | 0.250 |" in row, row


@pytest.mark.long
def test_figures_are_drawn_from_the_reports(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One figure of each form. Drawing it again gives the same file; docs/ has every figure."""
    module = load("figures")
    assert all((module.FIGURES / f"{name}.svg").is_file() for name in module.DRAWINGS)
    files = []
    for folder in (tmp_path / "first", tmp_path / "second"):
        folder.mkdir()
        monkeypatch.setattr(module, "FIGURES", folder)
        module.main(["decoding", "operator", "z60", "perplexity-50m", "formal", "eigenvalues"])
        files.append({file.name: file.read_bytes() for file in folder.iterdir()})
    assert files[0] == files[1] and len(files[0]) == 6
