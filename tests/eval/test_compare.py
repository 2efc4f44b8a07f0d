"""Differences of evaluations against numbers computed by hand, and the tables and figures of several."""

import math
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from fla_train.cli.eval import compare
from fla_train.eval.compare import long_table
from fla_train.eval.intervals import mean
from fla_train.eval.result import Curve, EvalResult, Score, find_result

LOSSES = {"first": [3.0, 2.0, 4.0, 3.5], "second": [2.6, 1.7, 3.4, 3.3]}
TARGETS = [64, 64, 64, 20]
ENVIRONMENT = {"hardware": "abacus", "dtype": "float32", "packages": {"torch": "2"}, "commit": None}


def result(name: str, losses: list[float] | None = None, **changes: object) -> EvalResult:
    """An evaluation of one set at two lengths, with needles and tasks."""
    losses = losses or LOSSES[name]
    loss, error, *_ = mean(np.array(losses) * TARGETS, np.array(TARGETS))
    found = EvalResult(
        name=name, suite={"name": "all", "tasks": []}, environment=ENVIRONMENT, trained_length=64
    )
    for length in (64, 128):
        common = {"length": length, "documents": 4, "higher_is_better": False, "fingerprint": "f"} | changes
        documents = {"by_document": losses, "weights": TARGETS}
        found.scores += [
            Score("perplexity", "web", "loss", loss, stderr=error, **common, **documents),
            Score("perplexity", "web", "perplexity", math.exp(loss), **common),
        ]
    common = {"documents": 9, "higher_is_better": True}
    found.scores += [
        Score("needle", "niah_single_1/ruler", "accuracy", 0.5, length=64, low=0.3, high=0.7, **common),
        Score("tasks", "piqa", "acc", 0.5 + 0.2 * (name == "second"), stderr=0.01, chance=0.5, **common),
        Score("tasks", "riddles", "score", 1.0 + (name == "second"), stderr=0.01, documents=9),
    ]
    found.curves.append(Curve("web", "perplexity", 128, 4, [0, 64, 128], [9.0, 8.0], [None] * 2, [None] * 2))
    return found


def rows(*results: EvalResult) -> dict[tuple, pd.Series]:
    table = long_table(results)
    table = table[(table.evaluation == "second") & (table.length.fillna(0) != 128)]
    return {(row.data, row.metric): row for row in table.itertuples()}


def test_differences_are_paired_by_document() -> None:
    found = rows(result("first"), result("second"))
    paired = mean(np.subtract(LOSSES["second"], LOSSES["first"]) * TARGETS, np.array(TARGETS))
    loss, ppl = found["web", "loss"], found["web", "perplexity"]
    assert loss.difference == pytest.approx(paired.value)
    assert loss.difference_stderr == pytest.approx(paired.stderr)
    assert loss.difference_stderr < result("first").scores[0].stderr / 2  # unpaired it would be larger
    assert loss.mark == ppl.mark == "▲"
    # The error of the perplexity has the z-score of the loss.
    assert ppl.difference / ppl.difference_stderr == pytest.approx(paired.value / paired.stderr)
    assert found["piqa", "acc"].difference_stderr == pytest.approx(math.hypot(0.01, 0.01))
    assert found["piqa", "acc"].mark == "▲" and found["riddles", "score"].mark == ""  # no direction
    assert rows(result("second"), result("second", LOSSES["first"]))["web", "loss"].mark == "▼"
    assert (loss.difference_low, loss.difference_high) == pytest.approx(paired[2:])


@pytest.mark.parametrize("changes", [{"fingerprint": "g"}, {"length": 32}])
def test_numbers_of_other_data_are_not_compared(changes: dict) -> None:
    found = rows(result("first"), result("second", **changes))
    assert math.isnan(found["web", "loss"].difference)
    assert found["piqa", "acc"].difference == pytest.approx(0.2)


def test_documents_that_do_not_match_are_not_paired() -> None:
    """A prefix token adds a target to each document."""
    second = result("second")
    second.scores[0] = Score(**vars(second.scores[0]) | {"weights": [65, 65, 65, 21]})
    assert math.isnan(rows(result("first"), second)["web", "loss"].difference)


def test_an_infinite_loss_is_worse() -> None:
    found = rows(result("first"), result("second", [math.inf, 2.0, 4.0, 3.5]))["web", "loss"]
    assert found.difference == math.inf and found.mark == "▼"


def test_a_result_is_the_same_after_a_round_trip(tmp_path: Path) -> None:
    first = result("first", [math.inf, 2.0, 4.0, 3.5])
    first.save(tmp_path / "results.json")
    assert EvalResult.load(tmp_path / "results.json") == first
    (tmp_path / "results.json").write_text('{"checkpoint": "x"}')
    with pytest.raises(ValueError, match=r"results\.json"):
        EvalResult.load(tmp_path / "results.json")


def test_the_command_compares_folders_and_runs(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    """Of a run the newest evaluation with scores; equal names are told apart by their places."""
    for place, name in (("a", "first"), ("run/eval/old", "first"), ("run/eval/new", "second")):
        (tmp_path / place).mkdir(parents=True)
        result(name).save(tmp_path / place / "results.json")
    (tmp_path / "run/eval/failed").mkdir()
    EvalResult(name="failed").save(tmp_path / "run/eval/failed/results.json")
    assert find_result(tmp_path / "run").name == "second"
    run = str(tmp_path / "run")
    compare([str(tmp_path / "a"), run, run, f"--output={tmp_path / 'out'}"])
    printed = capsys.readouterr().out
    assert f"second ({run})" in printed and "▲" in printed and "table.csv" in printed
    assert len(pd.read_csv(tmp_path / "out/table.csv")) == 3 * 7
    assert r"\toprule" in (tmp_path / "out/table.tex").read_text()
    names = {path.name for path in (tmp_path / "out").glob("*.png")}
    assert names == {"perplexity.png", "loss_difference.png", "needle.png", "tasks.png"}
    for places, message in (([str(tmp_path / "a")], "at least two"), (["a", "b"], "holds no results")):
        with pytest.raises(ValueError, match=message):
            compare([*places, f"--output={tmp_path / 'other'}"])
