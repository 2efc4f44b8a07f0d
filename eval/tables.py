"""Tables of evaluations: table.md to read, table.csv with every number, table.tex for a paper."""

from collections.abc import Iterable, Sequence
from pathlib import Path

import pandas as pd

from fla_train.eval.compare import long_table
from fla_train.eval.paper import paper_table, published
from fla_train.eval.result import EvalResult, unique

SECTIONS = {"perplexity": "Perplexity", "needle": "Needle in a haystack", "tasks": "Tasks"}
# Signs that pdfLaTeX does not know.
LATEX = {
    "±": r"$\pm$",
    "▲": r"$\bigtriangleup$",
    "▼": r"$\bigtriangledown$",
    "↑": r"$\uparrow$",
    "↓": r"$\downarrow$",
}
MARKS = "▲ better, ▼ worse than the first by more than two standard errors of the difference."


def write_tables(folder: Path, results: Sequence[EvalResult]) -> None:
    """Write table.md, table.csv and table.tex of one evaluation, or of several side by side."""
    table = long_table(results)
    paper = paper_table(results)
    shown = side_by_side(table) if len(results) > 1 else single(table)
    table.to_csv(folder / "table.csv", index=False)
    (folder / "table.md").write_text(_markdown(results, shown, paper), encoding="utf-8")
    frames = [frame for frame in (paper, *shown.values()) if frame is not None]
    latex = [frame.to_latex(index=False, escape=True) for frame in frames]
    text = "\n".join(["% Needs \\usepackage{booktabs}.", *latex])
    for sign, command in LATEX.items():
        text = text.replace(sign, command)
    (folder / "table.tex").write_text(text, encoding="utf-8")


def single(table: pd.DataFrame) -> dict[str, pd.DataFrame]:
    """Return a table of strings for each section of one evaluation."""
    return {
        title: pd.DataFrame(
            {
                "data": row.data,
                "length": _length(row.length),
                "metric": row.metric,
                "value": number(row.value),
                "standard error": number(row.stderr),
                "95% interval": "-" if pd.isna(row.low) else f"{number(row.low)} to {number(row.high)}",
                "chance": number(row.chance),
                "documents": str(row.documents),
            }
            for row in rows.itertuples()
        )
        for section, title in SECTIONS.items()
        if len(rows := table[table.section == section])
    }


def side_by_side(table: pd.DataFrame) -> dict[str, pd.DataFrame]:
    """Return a table of strings for each section: a row for each number, a column for each evaluation.

    Columns of differences from the first evaluation follow.
    """
    names = unique(table.evaluation)
    shown = {}
    for section, title in SECTIONS.items():
        rows = []
        for key, group in table[table.section == section].groupby(
            ["data", "length", "metric"], sort=False, dropna=False
        ):
            by_name = {row.evaluation: row for row in group.itertuples()}
            cells = dict(zip(("data", "length", "metric"), (key[0], _length(key[1]), key[2]), strict=True))
            cells["chance"] = number(group.chance.dropna().iloc[0] if group.chance.notna().any() else None)
            for name in names:
                row = by_name.get(name)
                cells[name] = "-" if row is None else with_error(row.value, row.stderr)
            for name in names[1:]:
                row = by_name.get(name)
                if row is None or pd.isna(row.difference):
                    cells[f"{name}: difference"] = "-"
                else:
                    text = with_error(row.difference, row.difference_stderr, "+.4f")
                    cells[f"{name}: difference"] = f"{text} {row.mark}".strip()
            rows.append(cells)
        if rows:
            shown[title] = pd.DataFrame(rows)
    return shown


def _length(length: object) -> str:
    return "-" if pd.isna(length) else f"{length:,}"


def number(value: float | None, form: str = ".4f") -> str:
    """Format a number with four decimals, from a million on in scientific notation; `-` for None and NaN."""
    if value is None or pd.isna(value):
        return "-"
    return f"{value:{form if abs(value) < 1e6 else '.4e'}}"


def with_error(value: float, error: float | None, form: str = ".4f") -> str:
    """Format a number with its standard error, if that is known."""
    known = error is not None and not pd.isna(error)
    return number(value, form) + (f" ± {number(error)}" if known else "")


def _markdown(
    results: Sequence[EvalResult], shown: dict[str, pd.DataFrame], paper: pd.DataFrame | None
) -> str:
    names = ", ".join(result.name for result in results)
    lines = [f"# {results[0].suite['name']}: {names}" if len(results) == 1 else f"# {names}", ""]
    if paper is not None:
        source = f"Rows above ours: {published()[0].source}."
        lines += ["## The papers' columns", "", *markdown_table(paper), "", source, ""]
    for title, frame in shown.items():
        lines += [f"## {title}", "", *markdown_table(frame), ""]
    if len(results) > 1:
        lines += [MARKS, ""]
    for note, owners in _by_note(results).items():
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


def _by_note(results: Sequence[EvalResult]) -> dict[str, list[str]]:
    notes: dict[str, list[str]] = {}
    for result in results:
        for note in result.notes:
            notes.setdefault(note, []).append(result.name)
    return notes


def _provenance(result: EvalResult) -> str:
    environment = result.environment
    length = f"trained on {result.trained_length:,} tokens, " if result.trained_length else ""
    return (
        f"{result.name}: {length}{environment['hardware']}, {environment['dtype']}, "
        f"torch {environment['packages']['torch']}, commit {environment['commit'] or 'unknown'}."
    )
