"""The papers' expressivity tables: lists of runs, and tables of their results.

    python scripts/reproduce/expressivity.py runs --only 'formal/*' > formal.yaml
    fla-runs train formal.yaml --folder runs/expressivity --jobs 4
    python scripts/reproduce/expressivity.py table runs/expressivity      # writes tables.md and tables.json

`expressivity.yaml` in this folder has the tables. Three rows have mixers of docs/examples: add that folder to
PYTHONPATH.
"""

import argparse
import itertools
import json
import re
import statistics
import sys
from collections.abc import Iterator, Mapping, Sequence
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import yaml

from fla_train.utils.records import read_metrics

SEEDS = (0, 1, 2)


def read_tables() -> dict[str, dict[str, Any]]:
    """Return the tables of expressivity.yaml by name, each row with its published values."""
    tables = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text())
    for table in tables.values():
        empty = {"published": [None] * len(table["columns"])}
        table["rows"] = {name: empty | row for name, row in table["rows"].items()}
    return tables


def cell_name(table: str, row: str, column: str) -> str:
    """Return the folder of a cell's seeds, such as `state_tracking/DeltaProduct_2_-1_1/S3`."""
    return "/".join(re.sub(r"[^\w.-]+", "_", text).strip("_") for text in (table, row, column))


def runs(*, paper_steps: bool = False, seeds: Sequence[int] = SEEDS) -> Iterator[tuple[str, list[str]]]:
    """Yield the name and the overrides of every run: those that the papers' claims rest on come first.

    Args:
        paper_steps: train the papers' recipes instead of those with scale=fast.
    """
    rest = []
    for name, table in read_tables().items():
        scale = table.get("scale", "paper") if paper_steps else table.get("fast_scale", "fast")
        for row, content in table["rows"].items():
            for column in () if "skipped" in content else content.get("columns", table["columns"]):
                overrides = [
                    f"experiment={table['columns'][column]}",
                    f"scale={scale}",
                    *table.get("column_overrides", {}).get(column, []),
                    *content["overrides"],
                    *content.get("column_overrides", {}).get(column, []),
                    *([] if paper_steps else content.get("fast", {}).get(column, [])),
                ]
                cell = cell_name(name, row, column)
                of_cell = [(f"{cell}/seed-{seed}", [*overrides, f"seed={seed}"]) for seed in seeds]
                if any(fnmatch(cell, f"*{claim}*") for claim in table["claims"]):
                    yield from of_cell
                else:
                    rest += of_cell
    yield from rest


def newest_test(run: Path, table: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the run's last value of the table's metric, with its step; None if it was never tested."""
    records = [r for r in read_metrics(run / "metrics.jsonl") if table["metric"] in r]
    if not records:
        return None
    curves = json.loads(file.read_text())["sets"] if (file := run / "accuracy.json").is_file() else {}
    curve = curves.get(table.get("half"), {"x": [], "y": []})
    right = itertools.takewhile(lambda point: point[1] >= 0.5, zip(curve["x"], curve["y"], strict=True))
    environment = json.loads((run / "environment.json").read_text())
    return {
        "seed": int(run.name.removeprefix("seed-")),
        "value": records[-1][table["metric"]],
        "steps": records[-1]["step"],
        "half": max((length for length, _ in right), default=0) if "half" in table else None,
        "curve": thinned(curve["x"], curve["y"]),
        "also": {name: records[-1].get(key) for name, key in table.get("beside", {}).items()},
        "hardware": environment["hardware"],
        "commit": environment["commit"],
    }


def thinned(x: Sequence[int], y: Sequence[float]) -> list[list[float]]:
    """Return every length up to 16 of a curve, and about 11 lengths per octave beyond, for the figures."""
    kept: list[tuple[int, float]] = []
    for length, value in zip(x, y, strict=True):
        if not kept or length >= 1.065 * kept[-1][0] or length == x[-1]:
            kept.append((length, round(value, 3)))
    return [list(axis) for axis in zip(*kept, strict=True)]


def results(home: Path) -> dict[str, dict[str, dict[str, list]]]:
    """Return the tested runs below a folder by table, row and column."""
    return {
        name: {
            row: {
                column: [
                    test
                    for run in sorted((home / cell_name(name, row, column)).glob("seed-*"))
                    if (test := newest_test(run, table)) is not None
                ]
                for column in table["columns"]
            }
            for row in table["rows"]
        }
        for name, table in read_tables().items()
    }


def show(tests: Sequence[Mapping[str, Any]]) -> str:
    """Return a cell: best seed (median; worst), and the length up to which half the sequences are right."""
    if not tests:
        return ""
    values = [test["value"] for test in tests]
    half = [f"{test['half']:,}" for test in tests if test["half"] is not None]
    spread = f" ({statistics.median(values):.3f}; {min(values):.3f})" if len(values) > 1 else ""
    return f"{max(values):.3f}{spread}" + (f", 50% to {'/'.join(half)}" if half else "")


def published(value: object) -> str:
    """Return a published entry as text; YAML reads yes and no as booleans."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:.3f}" if isinstance(value, float) else str(value or "")


def means(table: Mapping[str, Any], scores: Mapping[str, Mapping[str, list]]) -> Iterator[str]:
    """Yield for each column the published mean of its rows, and ours of their best seeds if all were run."""
    for value, column in zip(table["mean"], table["columns"], strict=True):
        yield published(value)
        rows = [row for row, content in table["rows"].items() if column in content.get("columns", [column])]
        best = [max((test["value"] for test in scores[row][column]), default=None) for row in rows]
        yield "" if None in best else f"{statistics.mean(best):.3f}"


def markdown(scores: Mapping[str, Mapping[str, Mapping[str, list]]]) -> str:
    """Return one Markdown table for each of the papers' that has a tested run."""
    lines = ["Best of the seeds (median; worst). `yes` and `no`: the paper gives only a figure."]
    for name, table in read_tables().items():
        if not any(tests for cells in scores[name].values() for tests in cells.values()):
            continue
        header = [text for column in table["columns"] for text in (f"{column}: paper", "ours")]
        lines += ["", f"## {table['title']}", "", f"Paper: {table['source']}.", ""]
        lines += [f"| model | {' | '.join(header)} |", "|---" * (1 + len(header)) + "|"]
        for row, content in table["rows"].items():
            cells = [
                text
                for value, tests in zip(content["published"], scores[name][row].values(), strict=True)
                for text in (published(value), show(tests))
            ]
            if any(cells):
                lines.append(f"| {row} | {' | '.join(cells)} |")
        if "mean" in table:
            lines.append(f"| mean | {' | '.join(means(table, scores[name]))} |")
    return "\n".join(lines) + "\n"


def main(arguments: Sequence[str]) -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(dest="command", required=True)
    listing = commands.add_parser("runs", help="print a list for `fla-runs train`")
    listing.add_argument("--only", default="*", help="glob of TABLE/ROW/COLUMN/seed-N")
    listing.add_argument("--paper-steps", action="store_true", help="the papers' recipes, not the fast ones")
    commands.add_parser("table", help="write tables.md and tables.json").add_argument("folder", type=Path)
    request = parser.parse_args(arguments)
    if request.command == "runs":
        chosen = {name: o for name, o in runs(paper_steps=request.paper_steps) if fnmatch(name, request.only)}
        yaml.safe_dump({"runs": chosen}, sys.stdout, sort_keys=False, width=1000)
    else:
        scores = results(request.folder)
        (request.folder / "tables.json").write_text(json.dumps(scores, separators=(",", ":")) + "\n")
        (request.folder / "tables.md").write_text(markdown(scores))


if __name__ == "__main__":
    main(sys.argv[1:])
