"""Columns of the papers' result tables and the rows that they publish (`published.yaml`)."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any

import pandas as pd
import yaml

from fla_train.eval.result import EvalResult


@dataclass(frozen=True)
class Column:
    """A column of the papers' tables, and the task and metric of lm-eval that fill it."""

    head: str
    task: str
    metric: str

    @property
    def percent(self) -> bool:
        """Return whether the papers print percent; perplexities are printed as they are."""
        return "perplexity" not in self.metric


ZERO_SHOT = (
    Column("Wiki. ppl ↓", "wikitext", "word_perplexity"),
    Column("LMB. ppl ↓", "lambada_openai", "perplexity"),
    Column("LMB. acc ↑", "lambada_openai", "acc"),
    Column("PIQA acc ↑", "piqa", "acc"),
    Column("Hella. acc_n ↑", "hellaswag", "acc_norm"),
    Column("Wino. acc ↑", "winogrande", "acc"),
    Column("ARC-e acc ↑", "arc_easy", "acc"),
    Column("ARC-c acc_n ↑", "arc_challenge", "acc_norm"),
)
AVERAGE = "Avg. ↑"
RECALL = (
    Column("SWDE cont. ↑", "swde", "contains"),
    Column("SQUAD cont. ↑", "squad_completion", "contains"),
    Column("FDA cont. ↑", "fda", "contains"),
)
HEADS = (*(column.head for column in ZERO_SHOT), AVERAGE, *(column.head for column in RECALL))


def paper_row(result: EvalResult) -> dict[str, float | None]:
    """Return the papers' columns in their order and units (perplexity or percent).

    The zero-shot columns and the average appear if the suite asks for all zero-shot tasks, and the recall
    columns if it has all recall tasks. A value is None if its task could not run. The average is the plain
    mean of the six accuracies from LAMBADA to ARC-Challenge, and None if one of them is.
    """
    row: dict[str, float | None] = {}
    for columns in (ZERO_SHOT, RECALL):
        if {column.task for column in columns} <= set(result.suite["tasks"]):
            for column in columns:
                score = result.find("tasks", column.task, column.metric)
                row[column.head] = score and score.value * (100 if column.percent else 1)
        if columns is ZERO_SHOT and row:
            accuracies = [row[column.head] for column in columns if column.percent]
            row[AVERAGE] = None if None in accuracies else sum(accuracies) / len(accuracies)
    return row


def paper_table(results: Sequence[EvalResult]) -> pd.DataFrame | None:
    """Return Table 1 of the DeltaProduct paper and our rows; None if no evaluation has its columns."""
    ours = {result.name: paper_row(result) for result in results}
    heads = [head for head in HEADS if any(head in row for row in ours.values())]
    if not heads:
        return None
    cells = {name: {head: _cell(head, row.get(head)) for head in heads} for name, row in ours.items()}
    rows = published_rows() | cells
    return pd.DataFrame([{"model": name} | {head: row[head] for head in heads} for name, row in rows.items()])


def _cell(head: str, value: float | None) -> str:
    """Format a value with the papers' number of digits."""
    if value is None:
        return "-"
    return f"{value:.2e}" if abs(value) >= 1e6 else f"{value:.{2 if 'ppl' in head else 1}f}"


@cache
def published() -> dict[str, Any]:
    """Return the content of `published.yaml`: the `source` of the rows, and `groups` of rows."""
    text = (files("fla_train.eval") / "published.yaml").read_text()
    return yaml.load(text, Loader=yaml.BaseLoader)  # noqa: S506 (strings only: 12.40 is not 12.4)


def published_rows() -> dict[str, dict[str, str]]:
    """Return the published values as printed, by row (model, size and training tokens) and column."""
    return {
        f"{row['model']} ({group['title']})": dict(zip(HEADS, row["values"], strict=True))
        for group in published()["groups"]
        for row in group["rows"]
    }
