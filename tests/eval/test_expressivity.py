"""The expressivity suite on models that solve their task, because their weights were set by hand."""

from pathlib import Path

import pytest

from fla_train.eval.config import EvalConfig, ExpressivityConfig, SuiteConfig
from fla_train.eval.result import EvalResult
from fla_train.eval.run import evaluate
from fla_train.hub.card import CardInfo
from fla_train.hub.export import export_model
from tests.eval.conftest import value
from tests.tasks.constructions import symmetric

TASK = """\
task:
  kind: group_words
  options: {group: S3}
  train: {length: 16}
  tests: {train_length: {length: 16}}
  train_sequences: null
  test_sequences: 8
  batch_size: 4
  test_batch_size: 4
"""


def test_the_suite_reports_a_solved_task(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Named `.`, from within the export's folder."""
    export = tmp_path / "run" / "hf" / "step-0000001"
    export_model(symmetric(3).float(), None, export, CardInfo(config=TASK))
    settings = ExpressivityConfig(lengths=[100], sequences=12, batch_size=8)
    suite = SuiteConfig(name="expressivity", expressivity=settings)
    monkeypatch.chdir(export)
    folder, result = evaluate(EvalConfig(checkpoint=".", device="cpu", suite=suite), progress=False)
    assert folder.parent == tmp_path / "run/eval"
    assert result == EvalResult.load(folder / "results.json")
    assert value(result, "length_100", "sequence_accuracy") == 1.0
    assert len(result.accuracy["length_100"]["y"]) == 100
    assert "| length_100 | sequence_accuracy | - | 1.0000 |" in (folder / "table.md").read_text()
    assert (folder / "accuracy.png").is_file()


@pytest.mark.parametrize("line", ["  bogus: 1\n", "  stop_at: [a, {b: '${oc.env:HOME}'}]\n  curriculum: 3\n"])
def test_a_task_of_another_version_is_named(line: str, tmp_path: Path) -> None:
    export_model(symmetric(3).float(), None, tmp_path / "export", CardInfo(config=TASK + line))
    suite = SuiteConfig(name="expressivity", expressivity=ExpressivityConfig(sequences=4))
    config = EvalConfig(str(tmp_path / "export"), str(tmp_path / "out"), device="cpu", suite=suite)
    with pytest.raises(ValueError, match=r"training\.json: .*(bogus|curriculum)"):
        evaluate(config, progress=False)
