"""`fla-eval compare`: which evaluations it takes, and requests and records that cannot be used."""

import json
import os
from pathlib import Path

import pytest
from test_report import record

from fla_train.cli.eval import compare
from fla_train.eval.compare import load_record
from fla_train.eval.report import write_report


def test_compare_command(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    write_report(tmp_path / "run/eval/all-1", record("ours", [2.0, 3.0, 4.0]))
    write_report(tmp_path / "b", record("ours", [1.5, 2.4, 3.5]))
    out = tmp_path / "out"
    assert compare([str(tmp_path / "run"), str(tmp_path / "b"), f"output={out}"]) == 0
    printed = capsys.readouterr().out
    names = [f"ours ({tmp_path / 'run'})", f"ours ({tmp_path / 'b'})"]  # equal names are told apart
    assert printed.startswith(f"# {', '.join(names)}\n") and f"{out}/index.html" in printed
    assert "| web | perplexity, 64 tokens | - | 20.086 ± 10.043 | 11.783 ± 5.892 | -8.3024 ± " in printed
    assert " ▲ |" in printed
    assert {"length_extrapolation.png", "perplexity.pdf", "states.png", "table.tex"} <= {
        f.name for f in out.iterdir()
    }
    assert names[1] in (out / "index.html").read_text()


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["--help"], 0, "usage: fla-eval compare"),
        (["--bold", "a", "b"], 2, "usage: fla-eval compare"),
        (["one"], 2, "at least two"),
        (["absent", "absent"], 2, "absent: there is no such folder"),
        (["absent", "absent", f"output={__file__}/x"], 2, "test_compare_command.py is no folder"),
    ],
)
def test_compare_requests_that_cannot_work(arguments, code, message, capsys, tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert compare(arguments) == code
    printed = capsys.readouterr()
    assert message in printed.out + printed.err and not list(tmp_path.iterdir())


def test_a_damaged_record(tmp_path: Path) -> None:
    (tmp_path / "results.json").write_text("{")
    with pytest.raises(ValueError, match=r"results\.json is damaged"):
        load_record(tmp_path)
    (tmp_path / "results.json").write_text('{"paper_row": {}}')
    with pytest.raises(ValueError, match=r"holds no results\.json of a suite on text"):
        load_record(tmp_path)


def test_the_newest_evaluation_on_text_counts(tmp_path: Path) -> None:
    contents = [
        record("old", [1.0]),
        record("new", [1.0]),
        {"accuracy": 1.0},
    ]  # the last is of a synthetic task
    for i, content in enumerate(contents):
        file = tmp_path / f"eval/{i}/results.json"
        file.parent.mkdir(parents=True)
        file.write_text(json.dumps(content))
        os.utime(file, (i, i))
    assert load_record(tmp_path)["name"] == "new" and load_record(tmp_path / "eval/0")["name"] == "old"


def test_an_evaluation_without_results_does_not_count(tmp_path: Path) -> None:
    failed = {"name": "failed", "perplexity": {}, "tasks": {"piqa": {"error": "no network"}}, "paper_row": {}}
    for age, content in enumerate([failed, record("good", [1.0])]):
        file = tmp_path / f"eval/suite-{age}/results.json"
        file.parent.mkdir(parents=True)
        file.write_text(json.dumps(content))
        os.utime(file, (1000 - age, 1000 - age))
    assert load_record(tmp_path)["name"] == "good"
    assert load_record(tmp_path / "eval/suite-0")["name"] == "failed"  # what is asked for is taken
