"""Tables of reports, in Markdown and LaTeX."""

import math
from collections.abc import Iterable, Sequence

from fla_train.eval.compare import comparison, is_metric, needle_rows
from fla_train.eval.paper import HEADS, NOTED, PublishedGroup, fixed, paper_cells, published

FEW = 30  # documents: below, a note warns
COMPARED = "▲ better, ▼ worse than the first by more than two standard errors of the difference."
ROWS = "Rows are of different text: compare models in one row, and lengths by the curves along the positions."
COUNTS = "Perplexity against context length. n counts documents or sequences: compare points of equal n only."
LATEX_SPECIAL = {sign: f"\\{sign}" for sign in "_%&#${}"} | {
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "\\": r"\textbackslash{}",
    "↓": r"$\downarrow$",
    "↑": r"$\uparrow$",
    "†": r"$\dagger$",
    "±": r"$\pm$",
    "▲": r"$\bigtriangleup$",
    "▼": r"$\bigtriangledown$",
}


def markdown(records: Sequence[dict]) -> str:
    """The whole report of one evaluation, or of several side by side."""
    if len(records) == 1:
        (record,) = records
        parts = [f"# {record['suite']['name']}: {record['name']}\n"]
        for name, result in record["perplexity"].items():
            head = name + (NOTED if "note" in result else "")
            parts += [f"## Perplexity, {head}\n", _perplexity_table(result, record)]
        if record.get("needle"):
            parts += ["## Needle in a haystack\n", _needle_table(record)]
    else:
        parts = ["# " + ", ".join(record["name"] for record in records) + "\n"]
        if comparison(records):
            parts += ["## Side by side\n", comparison_markdown(records)]
        parts += [f"{line}\n" for line in _lost(records)]
    parts += [f"{note}\n" for note in notes(records)]
    if heads := paper_heads(records):
        parts += ["## The papers' columns\n", paper_markdown(records, heads)]
    if len(records) == 1 and records[0]["tasks"]:
        parts += ["## Tasks\n", _task_table(records[0]["tasks"])]
    parts += [f"{note}\n" for note in data_notes(records)]
    parts += [_footnote(record) for record in records]
    return "\n".join(parts)


def notes(records: Sequence[dict]) -> list[str]:
    """What a reader must know: lengths that a model cannot read, sets of which models read other tokens,
    lengths that fewer documents have, numbers of few documents.
    """
    lines = []
    for record in records:
        limit, suite = record["model"].get("positions"), record["suite"]
        parts = [part for part in (suite["perplexity"], suite.get("needle")) if part and limit]
        if beyond := sorted({n for part in parts for n in part["lengths"] if n > limit}):
            lines.append(
                f"{record['name']} has positions for {limit:,} tokens only: not read over "
                f"{', '.join(map(str, beyond))}."
            )
    for name in dict.fromkeys(name for record in records for name in record["perplexity"]):
        results = [record["perplexity"].get(name, {}) for record in records]
        if len({result["data"]["fingerprint"] for result in results if "data" in result}) > 1:
            lines.append(
                f"{name}: not all models read the same tokens (other tokenizers or documents), so their "
                "losses and perplexities per token cannot be compared; bits per byte can, as far as the "
                "texts are the same."
            )
    if any(varied(result.get("lengths", [])) for r in records for result in r["perplexity"].values()):
        lines.append(COUNTS)
    sets = [item for record in records for item in record["perplexity"].items()]
    counts = [(name, row["documents"]) for name, result in sets for row in result.get("lengths", [])]
    tasks = [result.get("scores", {}) for record in records for result in record["tasks"].values()]
    counts += [(name, scores["examples"]) for found in tasks for name, scores in found.items()]
    if few := dict.fromkeys(name for name, count in counts if count < FEW):
        lines.append(f"Fewer than {FEW} documents: {', '.join(few)}. Their standard errors are rough.")
    return lines


def varied(rows: Sequence[dict]) -> bool:
    """Whether a curve's points are not all of the same number of documents, so not of the same documents."""
    return len(set(map(sequences, rows))) > 1


def sequences(row: dict) -> int:
    """How many sequences stand behind a point; earlier versions called them documents."""
    return row.get("sequences", row["documents"])


def data_notes(records: Sequence[dict]) -> list[str]:
    """What must be read with the scores: what `NOTED` refers to, the notes that came with data, each once,
    and the `restrictions`.
    """
    results = [item for r in records for item in (*r["perplexity"].items(), *r["tasks"].items())]
    lines = [f"{NOTED.strip()} {name}: {result['note']}." for name, result in results if "note" in result]
    return [*dict.fromkeys(lines), *restrictions(records)]


def restrictions(records: Sequence[dict]) -> list[str]:
    """Whose tasks were not run on all documents, with examples in the prompts, or with prompts cut short."""
    found: dict[str, list[str]] = {}
    for record in records:
        if not record["tasks"]:
            continue
        suite = record["suite"]
        if limit := suite["limit"]:
            some = f"{limit:.0f}" if limit >= 1 else f"{100 * limit:g}% of the"
            line = f"Only the first {some} examples of each task (suite.limit)"
            found.setdefault(line, []).append(record["name"])
        if shots := suite.get("num_fewshot"):
            found.setdefault(f"{shots}-shot (suite.num_fewshot)", []).append(record["name"])
        if counts := _truncated(record):
            line = f"Prompts longer than the window of {record.get('window')} tokens lost their beginning"
            found.setdefault(f"{line} in {', '.join(counts)} (suite.max_length)", []).append(record["name"])
    return [f"{line}: {', '.join(names)}." for line, names in found.items()]


def _truncated(record: dict) -> list[str]:
    """`<n> of <examples> of <task>` for each task asked for with truncated prompts."""
    return [
        f"{scores['truncated']} of {scores['examples']} of {task}"
        for name, result in record["tasks"].items()
        for task, scores in result.get("scores", {}).items()
        if scores.get("truncated") and (task == name or name not in result["scores"])
    ]


def paper_heads(records: Sequence[dict]) -> list[str]:
    """The papers' columns that any of the evaluations has, in the papers' order."""
    return [head for head in HEADS if any(head in record["paper_row"] for record in records)]


def table_1() -> list[PublishedGroup]:
    """The rows of the DeltaProduct paper, which stand beside ours; the page shows the other papers' too."""
    return [group for group in published() if group.paper == "delta_product"]


def paper_markdown(records: Sequence[dict], heads: Sequence[str]) -> str:
    """Published rows of Table 1 of the DeltaProduct paper, then ours."""
    lines = [_line(["model", *heads]), _line(["---", *["---:"] * len(heads)])]
    groups = table_1()
    for group in groups:
        for model, values in group.rows.items():
            lines.append(_line([f"{model} ({group.title})", *(values[head] for head in heads)]))
    for record in records:
        lines.append(_line(f"**{cell}**" for cell in (record["name"], *paper_cells(record, heads))))
    return "\n".join([*lines, "", f"Published rows: {groups[0].source}.", ""])


def comparison_markdown(records: Sequence[dict]) -> str:
    """One row per number; per evaluation its value, and its difference to the first one."""
    header, rows = comparison_table(records)
    rule = ["---", "---", *["---:"] * (len(header) - 2)]
    return "\n".join([*map(_line, (header, rule, *rows)), "", COMPARED, ""])


def comparison_table(records: Sequence[dict]) -> tuple[list[str], list[list[str]]]:
    """Header and rows of the comparison as text."""
    first, *others = (record["name"] for record in records)
    header = ["", "", "chance", first, *(text for name in others for text in (name, "difference"))]
    lines = []
    for row in comparison(records):
        cells = []
        for cell in row.cells:
            sign = "+" * ((cell.difference or 0) > 0)
            cells.append(_number(cell.value, cell.error) + NOTED * cell.noted)
            cells.append(f"{sign}{_number(cell.difference, cell.difference_error, 4)} {cell.mark}".rstrip())
        del cells[1]  # the first one's difference to itself
        lines.append([row.group, row.label, _number(row.chance), *cells])
    return header, lines


def _number(value: float | None, error: float | None = None, digits: int = 3) -> str:
    if value is None:
        return "-"
    return fixed(value, digits) + ("" if error is None else f" ± {fixed(error, digits)}")


def latex(records: Sequence[dict]) -> str:
    """For booktabs: the papers' table if an evaluation has its columns, and every number."""
    parts = ["% Needs \\usepackage{booktabs}.\n"]
    if heads := paper_heads(records):
        parts.append(_paper_latex(records, heads))
    header, rows = comparison_table(records)
    if rows:
        parts.append(_tabular("ll" + "r" * (len(header) - 2), header, [(None, rows)]))
    parts += [rf"\par{{\footnotesize {_escape(note)}\par}}" + "\n" for note in data_notes(records)]
    return "\n".join(parts)


def _paper_latex(records: Sequence[dict], heads: Sequence[str]) -> str:
    groups = [
        (group.title, [[model, *(values[head] for head in heads)] for model, values in group.rows.items()])
        for group in table_1()
    ]
    ours = [[record["name"], *paper_cells(record, heads)] for record in records]
    return _tabular("l" + "r" * len(heads), ["model", *heads], [*groups, ("measured here", ours)])


def _tabular(
    columns: str, header: Sequence[str], groups: Iterable[tuple[str | None, list[list[str]]]]
) -> str:
    lines = [rf"\begin{{tabular}}{{{columns}}}", r"\toprule", _latex_line(header)]
    for title, rows in groups:
        lines.append(r"\midrule")
        if title:
            lines.append(rf"\multicolumn{{{len(header)}}}{{l}}{{\textit{{{_escape(title)}}}}} \\")
        lines += map(_latex_line, rows)
    return "\n".join([*lines, r"\bottomrule", r"\end{tabular}", ""])


def _latex_line(cells: Sequence[str]) -> str:
    return " & ".join(map(_escape, cells)) + r" \\"


def _escape(text: str) -> str:
    return "".join(LATEX_SPECIAL.get(sign, sign) for sign in text)


def _line(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _perplexity_table(result: dict, record: dict) -> str:
    if "error" in result:
        return f"Could not run: {result['error']}\n"
    columns = ["context", "perplexity", "95% interval", "bits per byte", "loss", "text", "documents"]
    lines = [_line(columns), "|---:|---:|:---:|---:|---:|---|---:|"]
    longest = max((row["length"] for row in result["lengths"]), default=0)
    for row in result["lengths"]:
        interval = f"none: {row.get('no_interval', 'one document')}"
        if row["low"] is not None:
            interval = f"{fixed(row['low'], 3)} to {fixed(row['high'], 3)}"
        mark = " (trained)" if row["length"] == record["trained_length"] else ""
        bits = row.get("bits_per_byte")
        cells = (f"{row['length']:,}{mark}", fixed(row["perplexity"], 3), interval)
        cells += ("-" if bits is None else fixed(bits, 4), f"{row['loss']:.4f}")
        whole = row["length"] == longest or row.get("own_sequences")
        text = f"{sequences(row)} sequences" + (f", first {row['length']:,} tokens" * (not whole))
        lines.append(_line([*cells, text, str(row["documents"])]))
    if longest and len(result["lengths"]) > 1:
        lines += ["", ROWS]
    limit = record["model"].get("positions") or math.inf
    if lacking := [n for n in result["not_reached"] if n <= limit]:
        packed = result["data"]["layout"] == "packed"
        what = "The documents fill too few sequences of" if packed else "No document is long enough for"
        lines += ["", f"{what} {', '.join(map(str, lacking))}{' tokens' * packed}."]
    if remembrance := result.get("remembrance"):
        errors = remembrance["stderr"] or [None] * len(remembrance["sizes"])
        lines += [
            "",
            "Effective remembrance: total variation between the predictions after "
            f"{remembrance['length']:,} tokens and after the last part of them, mean of "
            f"{remembrance['documents']} sequences.",
            "",
            _line(["last part", "effective remembrance", "standard error"]),
            "|---:|---:|---:|",
        ]
        for size, value, error in zip(remembrance["sizes"], remembrance["distance"], errors, strict=True):
            lines.append(_line([f"{size:,}", fixed(value, 4), "-" if error is None else fixed(error, 4)]))
    return "\n".join([*lines, ""])


def _needle_table(record: dict) -> str:
    """A row per task and prompt, a column per length; a line per task that could not run."""
    found = {(task, prompt, row["length"]): row for task, prompt, row in needle_rows(record)}
    lines = []
    if found:
        lengths = sorted({length for *_, length in found})
        heads = [f"{n:,}{' (trained)' if n == record['trained_length'] else ''}" for n in lengths]
        lines += [_line(["task", "prompt", *heads]), _line(["---", "---", *["---:"] * len(lengths)])]
        for task, prompt in dict.fromkeys((task, prompt) for task, prompt, _ in found):
            cells = [_percent(row) if (row := found.get((task, prompt, n))) else "-" for n in lengths]
            lines.append(_line([task, prompt, *cells]))
        samples = " or ".join(map(str, sorted({row["samples"] for row in found.values()})))
        lines += ["", f"Answers that contain the value, percent of {samples} samples (95% interval).", ""]
    errors = {task: result["error"] for task, result in record["needle"].items() if "error" in result}
    lines += [f"{task}: could not run: {error}\n" for task, error in errors.items()]
    return "\n".join(lines)


def _percent(row: dict) -> str:
    value, low, high = (f"{100 * row[key]:.1f}" for key in ("accuracy", "low", "high"))
    return f"{value} ({low} to {high})"


def _task_table(tasks: dict[str, dict]) -> str:
    columns = ["task", "metric", "value", "standard error", "chance", "examples", "truncated", "shots"]
    lines = [_line(columns), "|---|---|---:|---:|---:|---:|---:|---:|"]
    for name, result in tasks.items():
        if "error" in result:
            lines.append(f"| {name} | could not run: {result['error'].replace('|', '/')} | | | | | | |")
            continue
        for task, scores in result["scores"].items():
            for metric, value in scores.items():
                if not is_metric(metric):
                    continue
                error = scores.get(f"{metric}_stderr")
                shown = fixed(value, 4) + (NOTED if "note" in result else "")
                cells = (task, metric, shown, "" if error is None else fixed(error, 4))
                cells += (_number(scores.get("chance", {}).get(metric)),)
                counts = (scores["examples"], scores.get("truncated", "-"), scores["num_fewshot"])
                lines.append(_line([*cells, *map(str, counts)]))
    return "\n".join([*lines, ""])


def _lost(records: Sequence[dict]) -> list[str]:
    """A line for each set and task that could not run."""
    return [
        f"{record['name']}, {name}: could not run: {result['error']}"
        for record in records
        for part in ("perplexity", "needle", "tasks")
        for name, result in record.get(part, {}).items()
        if "error" in result
    ]


def _footnote(record: dict) -> str:
    environment = record["environment"]
    return (
        f"{record['name']}: {environment['hardware']}, {environment['dtype']}, "
        f"torch {environment['packages']['torch']}, commit {environment['commit'] or 'unknown'}.\n"
    )
