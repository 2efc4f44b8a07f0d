"""Tables of evaluations: table.md to read, table.csv with every number, table.tex for a paper."""

from collections.abc import Iterable, Sequence
from pathlib import Path

import pandas as pd

from fla_train.eval.compare import long_table
from fla_train.eval.paper import paper_table, published
from fla_train.eval.result import EvalResult, unique

SECTIONS = {"perplexity": "Perplexity", "needle": "Needle in a haystack", "tasks": "Tasks"}
SECTIONS |= {"expressivity": "Accuracy on the task of the training"}
# Signs that pdfLaTeX does not know.
LATEX = {
    "±": r"$\pm$",
    "▲": r"$\bigtriangleup$",
    "▼": r"$\bigtriangledown$",
    "↑": r"$\uparrow$",
    "↓": r"$\downarrow$",
}
ERRORS = "± is the standard error."
MARKS = "▲ better, ▼ worse than the first by more than two standard errors of the difference. "
MARKS += "Numbers of different data or tokens have no difference."


def write_tables(folder: Path, results: Sequence[EvalResult]) -> None:
    """Write table.md, table.csv and table.tex of one evaluation, or of several side by side."""
    table = long_table(results)
    paper = paper_table(results)
    shown = section_tables(table)
    table.to_csv(folder / "table.csv", index=False)
    (folder / "table.md").write_text(_markdown(results, shown, paper), encoding="utf-8")
    frames = [frame for frame in (paper, *shown.values()) if frame is not None]
    latex = [frame.to_latex(index=False, escape=True) for frame in frames]
    text = "\n".join(["% Needs \\usepackage{booktabs}.", *latex])
    for sign, command in LATEX.items():
        text = text.replace(sign, command)
    (folder / "table.tex").write_text(text, encoding="utf-8")


def section_tables(table: pd.DataFrame) -> dict[str, pd.DataFrame]:
    """Return a table of strings for each section: a row for each number, a column for each evaluation.

    One evaluation has its intervals and numbers of documents as well, several have their differences from the
    first.
    """
    names = unique(table.evaluation)
    shown = {}
    for section, title in SECTIONS.items():
        rows = []
        keys = ["data", "length", "metric"]
        groups = table[table.section == section].groupby(keys, sort=False, dropna=False)
        for (data, length, metric), group in groups:
            cells = {"data": data, "length": "-" if pd.isna(length) else f"{length:,}", "metric": metric}
            cells["chance"] = number(group.chance.max())
            cells |= dict.fromkeys([*names, *(f"{name}: difference" for name in names[1:])], "-")
            for score in group.itertuples():
                cells[score.evaluation] = with_error(score.value, score.stderr)
                if not pd.isna(score.difference):
                    text = with_error(score.difference, score.difference_stderr, "+.4f")
                    cells[f"{score.evaluation}: difference"] = f"{text} {score.mark}".strip()
            if len(names) == 1:
                score = group.iloc[-1]  # the only one
                known = not pd.isna(score.low)
                cells["95% interval"] = f"{number(score.low)} to {number(score.high)}" if known else "-"
                cells["documents"] = str(score.documents)
            rows.append(cells)
        if rows:
            shown[title] = pd.DataFrame(rows)
    return shown


def number(value: float | None, form: str = ".4f") -> str:
    """Format a number with four decimals, from a million on in scientific notation; `-` for None and NaN."""
    if pd.isna(value):
        return "-"
    return f"{value:{form if abs(value) < 1e6 else '.4e'}}"


def with_error(value: float, error: float | None, form: str = ".4f") -> str:
    """Format a number with its standard error, if that is known."""
    return number(value, form) + ("" if pd.isna(error) else f" ± {number(error)}")


def _markdown(
    results: Sequence[EvalResult], shown: dict[str, pd.DataFrame], paper: pd.DataFrame | None
) -> str:
    names = ", ".join(result.name for result in results)
    lines = [f"# {results[0].suite['name']}: {names}" if len(results) == 1 else f"# {names}", ""]
    if paper is not None:
        source = f"Rows above ours: {published()['source']}."
        lines += ["## The papers' columns", "", *markdown_table(paper), "", source, ""]
    for title, frame in shown.items():
        lines += [f"## {title}", "", *markdown_table(frame), ""]
    if shown:
        lines += [f"{ERRORS} {MARKS}" if len(results) > 1 else ERRORS, ""]
    for note in unique(note for result in results for note in result.notes):
        owners = [result.name for result in results if note in result.notes]
        lines.append(f"- {note}" if len(owners) == len(results) else f"- {', '.join(owners)}: {note}")
    for result in results:
        lines += [f"- {result.name}: {name} could not run: {error}" for name, error in result.errors.items()]
        lines.append(f"- {_provenance(result)}")
    return "\n".join([*lines, ""])


def markdown_table(frame: pd.DataFrame) -> Iterable[str]:
    """Return the lines of a table of strings, without columns that are empty throughout."""
    frame = frame.loc[:, (frame != "-").any()]
    rows = [list(frame.columns), ["---"] * len(frame.columns), *frame.to_numpy().tolist()]
    return ["| " + " | ".join(str(cell).replace("|", "/") for cell in row) + " |" for row in rows]


def _provenance(result: EvalResult) -> str:
    environment = result.environment
    length = f"trained on {result.trained_length:,} tokens, " if result.trained_length else ""
    return (
        f"{result.name}: {length}{environment['hardware']}, {environment['dtype']}, "
        f"torch {environment['packages']['torch']}, commit {environment['commit'] or 'unknown'}."
    )
