"""Compare evaluations: rows of numbers, with marks where they differ by more than the standard error.

The first evaluation is the reference. The standard error of a difference on the same data is that of the
paired differences of documents. Where a score is no sum over documents, it is the root of the summed squares.
"""

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from fla_train.eval.intervals import Mean

NO_METRICS = ("examples", "num_fewshot", "higher_is_better", "by_document", "fingerprint", "truncated")
LENGTH_LABELS = {"perplexity": "perplexity, ", "bits_per_byte": "bits per byte, "}  # before `1,024 tokens`
_PARTS = {"name", "perplexity", "tasks", "paper_row"}  # of the record of a suite on text
MARKS = ("▲", "▼")  # better, worse


@dataclass(frozen=True)
class Cell:
    """One number of the comparison.

    Attributes:
        value: None where the evaluation has no such number.
        error: its standard error, if known.
        mark: empty, or how it stands to the reference: ▲ better, ▼ worse, by more than one standard error of
            the difference; doubled from two on.
        noted: whether a note on the data must be read with it.
    """

    value: float | None
    error: float | None = None
    mark: str = ""
    noted: bool = False


@dataclass(frozen=True)
class _Score:
    """A task's metric in one evaluation.

    Attributes:
        higher_is_better: None where the task does not say.
        data: fingerprint of documents and prompts.
        by_document: what each adds to the metric, or to its logarithm; empty where that is not known.
    """

    value: float
    error: float | None
    higher_is_better: bool | None
    data: str | None
    by_document: Sequence[float]
    noted: bool


@dataclass(frozen=True)
class Row:
    """A quantity, and one cell per evaluation."""

    group: str
    label: str
    cells: tuple[Cell, ...]


def load_record(place: str | Path) -> dict:
    """results.json of an evaluation's folder, or of the newest evaluation in a run folder.

    Raises:
        ValueError: there is none, or it cannot be read.
    """
    folder = Path(place).expanduser()
    files = [folder / "results.json"] if (folder / "results.json").is_file() else []
    files = files or sorted(folder.glob("eval/*/results.json"), key=lambda file: -file.stat().st_mtime)
    records = (_read(file) for file in files)
    record = next((record for record in records if _PARTS <= record.keys()), None)
    if record is None:
        raise ValueError(
            f"{place} holds no results.json of a suite on text: give a folder that fla-eval wrote, or a run "
            "that has one in eval/"
        )
    return record


def _read(file: Path) -> dict:
    try:
        record = json.loads(file.read_text())
    except ValueError as failure:
        raise ValueError(f"{file} is damaged ({failure}): run the evaluation again") from failure
    return record if isinstance(record, dict) else {}


def comparison(records: Sequence[dict]) -> list[Row]:
    """Every number that at least one of the evaluations has, the first one being the reference."""
    return [*_perplexity_rows(records), *_task_rows(records)]


def mark(difference: float, error: float | None, lower_is_better: bool) -> str:
    """▲ (better) or ▼ (worse) for a difference of more than one `error`, doubled from two on, else empty."""
    sign = MARKS[(difference > 0) == lower_is_better]
    if math.isinf(difference):
        return sign * 2
    # Nor if one of them is NaN; one document more or less is an error exactly, but for rounding.
    if not error or not abs(difference) > error * (1 + 1e-9):
        return ""
    return sign * (2 if abs(difference) >= 2 * error else 1)


def is_metric(name: str) -> bool:
    """Whether a key of a task's scores is a result, not its error or where it comes from."""
    return name not in NO_METRICS and not name.endswith("_stderr")


def flat_metrics(record: dict) -> dict[str, float]:
    """The results as `eval/<set or task>/<name>`, for metrics.jsonl and wandb."""
    found = {
        f"eval/{name}/{key}_{row['length']}": row[key]
        for name, result in record["perplexity"].items()
        for row in result.get("lengths", [])
        for key in ("loss", "bits_per_byte")
        if row.get(key) is not None
    }
    for result in record["tasks"].values():
        for task, scores in result.get("scores", {}).items():
            found |= {f"eval/{task}/{key}": value for key, value in scores.items() if is_metric(key)}
    return found


def _perplexity_rows(records: Sequence[dict]) -> list[Row]:
    tables = [
        {
            (name, row["length"]): (row, result["data"]["fingerprint"], "note" in result)
            for name, result in record["perplexity"].items()
            for row in result.get("lengths", [])
        }
        for record in records
    ]
    keys = sorted({key for table in tables for key in table})
    rows = [
        Row(
            name,
            f"{label}{length:,} tokens",
            _length_cells([t.get((name, length)) for t in tables], quantity),
        )
        for name, length in keys
        for quantity, label in LENGTH_LABELS.items()
    ]
    return [row for row in rows if any(cell.value is not None for cell in row.cells)]


def _length_cells(entries: Sequence[tuple[dict, str, bool] | None], quantity: str) -> tuple[Cell, ...]:
    cells = []
    for entry in entries:
        if entry is None or entry[0].get(quantity) is None:
            cells.append(Cell(None))
            continue
        row, data, noted = entry
        error = row["stderr"] if quantity == "perplexity" else row["bits_per_byte_stderr"]
        if quantity == "perplexity" and error is not None:
            error *= row["perplexity"]
        sign = ""
        if cells and entries[0] and entries[0][1] == data:  # on other data there is no mark
            reference = entries[0][0]
            # Without a prefix, a document has one target less: those can't be paired.
            if loss_targets(row) == loss_targets(reference):
                # Of the same tokens the bits per byte differ as the losses do.
                sign = _paired_mark(row["losses"], reference["losses"], True, loss_targets(row))
        cells.append(Cell(row[quantity], error, sign, noted))
    return tuple(cells)


def loss_targets(row: dict) -> list[int]:
    """Targets behind each of a row's `losses`; earlier versions kept one per sequence, all of one length."""
    return row.get("targets") or [row["length"]] * len(row["losses"])


def _paired_mark(
    values: Sequence[float],
    reference: Sequence[float],
    lower_is_better: bool,
    weights: Sequence[float] | None = None,
) -> str:
    """How the mean of `values` stands to that of `reference`, document by document."""
    if len(values) != len(reference):
        return ""
    weights = np.ones(len(values)) if weights is None else np.array(weights, float)
    difference = Mean.of(np.subtract(values, reference) * weights, weights)
    return mark(difference.value, difference.stderr, lower_is_better)


def _task_rows(records: Sequence[dict]) -> list[Row]:
    tables = [
        {
            (task, metric): _Score(
                value,
                scores.get(f"{metric}_stderr"),
                scores.get("higher_is_better", {}).get(metric),
                scores.get("fingerprint"),
                scores.get("by_document", {}).get(metric, ()),
                "note" in result,
            )
            for result in record["tasks"].values()
            for task, scores in result.get("scores", {}).items()
            for metric, value in scores.items()
            if is_metric(metric)
        }
        for record in records
    ]
    keys = list(dict.fromkeys(key for table in tables for key in table))
    return [Row(task, metric, _task_cells([t.get((task, metric)) for t in tables])) for task, metric in keys]


def _task_cells(scores: Sequence[_Score | None]) -> tuple[Cell, ...]:
    reference = scores[0]
    cells = []
    for score in scores:
        if score is None:
            cells.append(Cell(None))
            continue
        sign = _task_mark(score, reference) if cells and reference else ""
        cells.append(Cell(score.value, score.error, sign, score.noted))
    return tuple(cells)


def _task_mark(score: _Score, reference: _Score) -> str:
    """Empty if examples or prompts differ, or if the task does not say which direction is better."""
    if score.data != reference.data or score.higher_is_better is None:
        return ""
    lower_is_better = not score.higher_is_better
    if score.by_document and reference.by_document:
        return _paired_mark(score.by_document, reference.by_document, lower_is_better)
    if score.error is None or reference.error is None:
        return ""
    error = math.hypot(score.error, reference.error)
    return mark(score.value - reference.value, error, lower_is_better)
