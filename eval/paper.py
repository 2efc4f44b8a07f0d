"""Columns of the papers' result tables and their published rows.

The tables are the DeltaProduct paper's Table 1 and the DeltaNet paper's Table 2.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files

import yaml


@dataclass(frozen=True)
class Column:
    """A column of the table: its head, and the task and metric of lm-eval that fill it."""

    head: str
    task: str
    metric: str

    @property
    def percent(self) -> bool:
        """Whether the papers print it in percent; perplexities are printed as they are."""
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
NOTED = " †"  # behind a score whose data have a note
HEADS = (*(column.head for column in ZERO_SHOT), AVERAGE, *(column.head for column in RECALL))


def paper_row(tasks: dict[str, dict]) -> dict[str, float | None]:
    """The papers' columns, in their order and units, from what `run_tasks` returned.

    The zero-shot columns and the average appear if all their tasks were asked for, the recall columns
    likewise; so the row is empty for other suites. A value is None if its task could not run. The average is
    the papers': the plain mean of the six accuracies from LAMBADA's to ARC-Challenge's.

    Args:
        tasks: by task asked for, `{"scores": {task: {metric: value}}}` or `{"error": line}`.

    Returns:
        By head of the column: a perplexity, or percent.
    """
    row: dict[str, float | None] = {}
    if all(column.task in tasks for column in ZERO_SHOT):
        row |= {column.head: _value(column, tasks) for column in ZERO_SHOT}
        row[AVERAGE] = average([row[column.head] for column in ZERO_SHOT if column.percent])
    if all(column.task in tasks for column in RECALL):
        row |= {column.head: _value(column, tasks) for column in RECALL}
    return row


def average(accuracies: list[float | None]) -> float | None:
    """The mean, or None if a value is missing: a mean over fewer tasks is another quantity."""
    return None if None in accuracies else sum(accuracies) / len(accuracies)


def _value(column: Column, tasks: dict[str, dict]) -> float | None:
    value = tasks[column.task].get("scores", {}).get(column.task, {}).get(column.metric)
    return value * 100 if value is not None and column.percent else value


def paper_cell(head: str, value: float | None) -> str:
    """A value with the papers' number of digits; a dash for None."""
    return "-" if value is None else fixed(value, 2 if "ppl" in head else 1)


def paper_cells(record: dict, heads: Sequence[str]) -> list[str]:
    """The evaluation's values in the columns, `NOTED` behind those whose data have a note."""
    row, tasks = record["paper_row"], record["tasks"]
    cells = []
    for head in heads:
        value = row.get(head)
        noted = value is not None and any("note" in tasks.get(c.task, {}) for c in _columns_of(head))
        cells.append(paper_cell(head, value) + NOTED * noted)
    return cells


def _columns_of(head: str) -> list[Column]:
    """What a column shows: itself, or all that the average is over."""
    if head == AVERAGE:
        return [column for column in ZERO_SHOT if column.percent]
    return [column for column in (*ZERO_SHOT, *RECALL) if column.head == head]


def fixed(value: float, digits: int) -> str:
    """A value with `digits` decimals; in scientific notation from a million on, as perplexities may be."""
    return f"{value:.{digits}{'f' if abs(value) < 1e6 else 'e'}}"


@dataclass(frozen=True)
class PublishedGroup:
    """Rows that a paper prints together.

    Attributes:
        paper: key of `published.yaml`.
        source: title, authors and table.
        title: size and training tokens.
        rows: by model, the values as printed by head of the column.
    """

    paper: str
    source: str
    title: str
    rows: dict[str, dict[str, str]]


@cache
def published() -> tuple[PublishedGroup, ...]:
    """What `published.yaml` holds, in its order."""
    text = (files("fla_train.eval") / "published.yaml").read_text()
    papers = yaml.load(text, Loader=yaml.BaseLoader)  # numbers stay strings: 12.40 is not 12.4
    return tuple(
        PublishedGroup(
            paper,
            content["source"],
            group["title"],
            {row["model"]: dict(zip(HEADS, row["values"], strict=True)) for row in group["rows"]},
        )
        for paper, content in papers.items()
        for group in content["groups"]
    )
