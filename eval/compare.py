"""Compare evaluations: rows of numbers, their differences, and marks beyond two standard errors.

The first evaluation is the reference. The standard error of a difference on the same data is that of the
paired differences of documents. Where a score is no sum over documents, it is the root of the summed squares.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from fla_train.eval.intervals import Mean
from fla_train.utils.safe_files import read_json

NO_METRICS = "examples num_fewshot higher_is_better by_document fingerprint truncated chance".split()
LENGTH_LABELS = {"perplexity": "perplexity, ", "bits_per_byte": "bits per byte, "}  # before `1,024 tokens`
_PARTS = {"name", "perplexity", "tasks", "paper_row"}  # of the record of a suite on text
MARKS = ("▲", "▼")  # better, worse


@dataclass(frozen=True)
class Cell:
    """One number of the comparison.

    Attributes:
        value: None where the evaluation has no such number.
        error: its standard error, if known.
        difference: the value minus the reference's; None on other data, and for the reference.
        difference_error: standard error of the difference, if known.
        mark: ▲ (better) or ▼ (worse than the reference) if the difference is above two standard errors.
        noted: whether a note on the data must be read with it.
    """

    value: float | None
    error: float | None = None
    difference: float | None = None
    difference_error: float | None = None
    mark: str = ""
    noted: bool = False


@dataclass(frozen=True)
class _Number:
    """A quantity in one evaluation.

    Attributes:
        higher_is_better: None where that is not known.
        data: fingerprint of what it was measured on.
        by_document: what each document adds to it, or to its logarithm; empty where that is not known.
        weights: of the documents; None: equal ones.
        chance: the value of a model that guesses, if known.
    """

    value: float
    error: float | None
    higher_is_better: bool | None
    data: str | None
    by_document: Sequence[float]
    weights: Sequence[float] | None
    noted: bool
    chance: float | None = None


@dataclass(frozen=True)
class Row:
    """A quantity with one cell per evaluation, and the value at chance if known."""

    group: str
    label: str
    cells: tuple[Cell, ...]
    chance: float | None = None


def load_record(place: str | Path) -> dict:
    """results.json of an evaluation's folder, or of the newest evaluation with results in a run folder.

    Raises:
        ValueError: there is none, or it cannot be read.
    """
    folder = Path(place).expanduser()
    if not folder.is_dir():
        raise ValueError(f"{place}: there is no such folder; give one that fla-eval wrote, or a run folder")
    files = [folder / "results.json"] if (folder / "results.json").is_file() else []
    files = files or sorted(folder.glob("eval/*/results.json"), key=lambda file: -file.stat().st_mtime)
    record = None
    for found in map(read_json, files):
        if _PARTS <= found.keys():
            record = record or found
            if flat_metrics(found):
                return found
    if record is None:
        raise ValueError(
            f"{place} holds no results.json of a suite on text: give a folder that fla-eval wrote, or a run "
            "that has one in eval/"
        )
    return record


def comparison(records: Sequence[dict]) -> list[Row]:
    """Every number that at least one of the evaluations has, the first one being the reference."""
    tables = [{key: number for _, key, number in _numbers(record)} for record in records]
    places = {key: place for record in records for place, key, _ in _numbers(record)}
    return [_row(key, [table.get(key) for table in tables]) for key in sorted(places, key=places.get)]


def mark(difference: float, error: float | None, lower_is_better: bool) -> str:
    """Return ▲ (better) or ▼ (worse) for a difference of more than two standard errors, else nothing."""
    if math.isinf(difference) or (error and abs(difference) > 2 * error):
        return MARKS[(difference > 0) == lower_is_better]
    return ""


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
    for task, prompt, row in needle_rows(record):
        found[f"eval/{task}/{prompt}_{row['length']}"] = row["accuracy"]
    for result in record["tasks"].values():
        for task, scores in result.get("scores", {}).items():
            found |= {f"eval/{task}/{key}": value for key, value in scores.items() if is_metric(key)}
    return found


def needle_rows(record: dict) -> Iterator[tuple[str, str, dict]]:
    """Task, prompt and row of each length of the needles that an evaluation asked for."""
    for task, result in record.get("needle", {}).items():
        for prompt, rows in result.items():
            if prompt != "error":
                yield from ((task, prompt, row) for row in rows)


def _numbers(record: dict) -> Iterator[tuple[tuple, tuple[str, str], _Number]]:
    """Where each quantity of an evaluation stands among the rows, its group and label, and the number."""
    for name, result in record["perplexity"].items():
        for row in result.get("lengths", []):
            errors = {"perplexity": row["stderr"] and row["stderr"] * row["perplexity"]}
            errors["bits_per_byte"] = row.get("bits_per_byte_stderr")
            for i, (quantity, label) in enumerate(LENGTH_LABELS.items()):
                if row.get(quantity) is None:
                    continue
                # Of the same tokens the bits per byte differ as the losses do.
                data, losses, targets = result["data"]["fingerprint"], row["losses"], loss_targets(row)
                number = _Number(
                    *(row[quantity], errors[quantity], False, data, losses, targets, "note" in result)
                )
                yield (0, name, row["length"], i), (name, f"{label}{row['length']:,} tokens"), number
    for task, prompt, row in needle_rows(record):
        number = _Number(
            *(row["accuracy"], row["stderr"], True, row["fingerprint"], row["correct"], None, False)
        )
        label = f"accuracy, {row['length']:,} tokens"
        yield (1, task, prompt, row["length"]), (f"{task}, {prompt}", label), number
    for result in record["tasks"].values():
        for task, scores in result.get("scores", {}).items():
            for metric in filter(is_metric, scores):
                direction = scores.get("higher_is_better", {}).get(metric)
                by_document = scores.get("by_document", {}).get(metric, ())
                number = _Number(
                    *(scores[metric], scores.get(f"{metric}_stderr"), direction, scores.get("fingerprint")),
                    *(by_document, None, "note" in result, scores.get("chance", {}).get(metric)),
                )
                yield (2,), (task, metric), number


def _row(key: tuple[str, str], numbers: Sequence[_Number | None]) -> Row:
    reference = numbers[0]
    cells = (Cell(None) if n is None else _cell(n, None if n is reference else reference) for n in numbers)
    return Row(*key, tuple(cells), next((n.chance for n in numbers if n and n.chance is not None), None))


def _cell(number: _Number, reference: _Number | None) -> Cell:
    """A number and its difference to the reference's; no mark where nobody says which way is better."""
    cell = Cell(number.value, number.error, noted=number.noted)
    if reference is None or number.data != reference.data:
        return cell
    difference, error, sign = number.value - reference.value, None, ""
    if number.by_document and reference.by_document:
        paired = _paired(number.by_document, reference.by_document, number.weights, reference.weights)
        if paired is None:
            return cell
        tested, error = paired.value, paired.stderr
    else:
        tested = difference
        if number.error is not None and reference.error is not None:
            error = math.hypot(number.error, reference.error)
    if number.higher_is_better is not None:
        sign = mark(tested, error, not number.higher_is_better)
    # Documents may add to the logarithm, or in another unit: then the error is that of the same z-score.
    if error and tested and not math.isclose(tested, difference, abs_tol=1e-9):
        error *= abs(difference / tested)
    return replace(cell, difference=difference, difference_error=error, mark=sign)


def _paired(
    ours: Sequence[float],
    theirs: Sequence[float],
    weights: Sequence[float] | None,
    their_weights: Sequence[float] | None,
) -> Mean | None:
    """Mean difference of documents; None where they can't be paired (a prefix makes one more target)."""
    if len(ours) != len(theirs) or weights != their_weights:
        return None
    weights = np.ones(len(ours)) if weights is None else np.array(weights, float)
    return Mean.of(np.subtract(ours, theirs) * weights, weights)


def loss_differences(record: dict, reference: dict, name: str) -> list[dict]:
    """Loss of the set `name` minus `reference`'s, nats per target, paired by document, at lengths of both.

    Returns:
        `length`, `value`, `low` and `high` (a 95% interval; None of one document), `sequences` and
        `documents` of each. Empty where the two did not read the same tokens.
    """
    ours, theirs = (found["perplexity"].get(name, {"error": ""}) for found in (record, reference))
    if "error" in ours or "error" in theirs or ours["data"]["fingerprint"] != theirs["data"]["fingerprint"]:
        return []
    others = {row["length"]: row for row in theirs["lengths"]}
    found = []
    for row in ours["lengths"]:
        if (other := others.get(row["length"])) is None:
            continue
        difference = _paired(row["losses"], other["losses"], loss_targets(row), loss_targets(other))
        if difference is not None:
            low, high = difference.interval or (None, None)
            found.append(row | {"value": difference.value, "low": low, "high": high})
    return found


def loss_targets(row: dict) -> list[int]:
    """Targets behind each of a row's `losses`; earlier versions kept one per sequence, all of one length."""
    return row.get("targets") or [row["length"]] * len(row["losses"])
