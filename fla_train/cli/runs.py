"""`fla-runs FOLDER...`: list runs, the best first, with what differs between their configs; draw curves.

fla-runs runs/sweep                                            # every run at or below the folder
fla-runs runs/a runs/b --metric validation_loss --png curves.png
fla-runs runs --csv > runs.csv
fla-runs train LIST.yaml                                       # train a list of runs
"""

import argparse
import csv
import json
import os
import re
import shutil
import statistics
import sys
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fla_train.cli.app import fail_by, interruptible, leave
from fla_train.cli.train_list import train_list
from fla_train.cli.version import add_version

if TYPE_CHECKING:  # it imports torch, and is not needed for --help
    from fla_train.run import Run

Row = dict[str, Any]
LONGEST_LABEL = 60  # characters of differences that still fit into the table and a figure's legend
HIGHER = re.compile(r"(?!.*loss).*(acc|tokens_per_second|mfu|exact_match|f1|contains)")  # more is better


def build_parser() -> argparse.ArgumentParser:
    """Build the parser of the command's options."""
    parser = argparse.ArgumentParser(
        prog="fla-runs",
        description="List the runs at or below folders, the best first: size, status, losses, tokens per "
        "second and what differs between their configs; and draw their curves. `fla-runs train --help` is "
        "about training many.",
    )
    add_version(parser)
    parser.add_argument("folders", nargs="+", metavar="FOLDER", help="a run, a sweep, or a folder of them")
    parser.add_argument(
        "--metric",
        help="key of metrics.jsonl to sort by, list and draw (default: validation_loss, and loss)",
    )
    parser.add_argument("--png", metavar="FILE", help="draw the curves into this file")
    output = parser.add_mutually_exclusive_group()
    output.add_argument("--csv", action="store_true", help="print CSV, with a column for each such setting")
    output.add_argument("--json", action="store_true", help="print JSON")
    return parser


def table(runs: Sequence["Run"], metric: str) -> list[Row]:
    """Return a row for each run, sorted by the best value of `metric`; runs without a value come last."""
    from fla_train.run import differences

    rows = []
    for run, differ in zip(runs, differences(runs), strict=True):
        records = run.records
        row = {"run": str(run.path), "model": run.model_name, "parameters": run.parameters}
        row |= {"differs": differ, "status": run.status, "step": run.step}
        row["max_steps"] = run.settings["trainer.max_steps"]
        for key in dict.fromkeys(("loss", "validation_loss", metric)):
            values = [(r[key], r["step"]) for r in records if r.get(key) is not None]
            best, step = (max if HIGHER.match(key) else min)(values, default=(None, None))
            row |= {key: values[-1][0] if values else None, f"best_{key}": best, f"best_{key}_step": step}
        speeds = [r["tokens_per_second"] for r in records if r.get("tokens_per_second")]
        row["tokens_per_second"] = statistics.median(speeds) if speeds else None
        rows.append(row)
    key, sign = f"best_{metric}", -1 if HIGHER.match(metric) else 1
    return sorted(rows, key=lambda row: (row[key] is None, sign * (row[key] or 0)))


def difference(settings: Mapping[str, Any]) -> str:
    """Return settings as overrides."""
    from fla_train.hub.saved_config import plain

    return ", ".join(f"{key}={plain(value)}" for key, value in settings.items())


def names(rows: Sequence[Row]) -> tuple[str, list[str]]:
    """Return the folder that holds all runs, and the path of each run below it."""
    folders = [os.path.dirname(row["run"]) for row in rows]
    if len({os.path.isabs(folder) for folder in folders}) > 1:
        folders = [os.path.abspath(folder) for folder in folders]
    home = os.path.commonpath(folders)
    return home or ".", [os.path.relpath(row["run"], home) for row in rows]


def labels(rows: Sequence[Row]) -> list[str]:
    """Return the name of each run in a figure: what differs if that is short and unique, else its path."""
    texts = [difference(row["differs"]) for row in rows]
    fit = all(0 < len(text) <= LONGEST_LABEL and texts.count(text) == 1 for text in texts)
    return texts if fit else names(rows)[1]


def over_seeds(rows: Sequence[Row], keys: Sequence[str]) -> list[list[str]]:
    """Return lines of mean ± standard deviation for the runs that differ in nothing but `seed`."""
    groups: dict[str, list[Row]] = {}
    for row in rows:
        others = {key: value for key, value in row["differs"].items() if key != "seed"}
        groups.setdefault(difference(others) or row["model"], []).append(row)
    lines = []
    for label, members in groups.items():
        cells = []
        for key in keys:
            values = [row[key] for row in members if row[key] is not None]
            whole = len(values) == len(members) > 1
            cells.append(f"{statistics.mean(values):.4f} ± {statistics.stdev(values):.4f}" if whole else "-")
        if len(members) > 1:
            lines.append([str(len(members)), *cells, label])
    return lines


def table_lines(rows: Sequence[Row], metric: str, width: int) -> list[str]:
    """Return the rows as text, the mean over seeds below them, and long differences wrapped to `width`."""
    home, paths = names(rows)
    keys = [*dict.fromkeys(("loss", "validation_loss", metric)), f"best_{metric}"]
    heads = [key.replace("_", " ") for key in keys]
    texts = [difference(row["differs"]) for row in rows]
    fit = all(len(text) <= LONGEST_LABEL for text in texts)
    cells = [["", "run", "model", "parameters", "status", "step", *heads, "tokens/s", "differs" * fit]]
    for row, path, text in zip(rows, paths, texts, strict=True):
        first = "*" * (row is rows[0] and row[keys[-1]] is not None)
        size = "-" if row["parameters"] is None else f"{row['parameters']:,}"
        steps = f"{row['step']:,}/{row['max_steps']:,}"
        values = ["-" if row[key] is None else f"{row[key]:.4f}" for key in keys]
        rate = "-" if row["tokens_per_second"] is None else f"{row['tokens_per_second']:,.0f}"
        cells.append([first, path, row["model"], size, row["status"], steps, *values, rate, text * fit])
    lines = [f"{len(rows)} run(s) in {home}, * has the best {metric.replace('_', ' ')}"]
    lines += _aligned(cells, (0, 1, 2, 4, len(cells[0]) - 1))
    if not fit:
        for path, text in zip(paths, texts, strict=True):
            lines += ["", *textwrap.wrap(f"{path}: {text}", width, subsequent_indent="    ")]
    if seeds := over_seeds(rows, keys):
        lines += ["", "Mean ± standard deviation of runs that differ in the seed only:"]
        lines += _aligned([["runs", *heads, "of"], *seeds], (len(keys) + 1,))
    return lines


def _aligned(cells: Sequence[Sequence[str]], left: Sequence[int]) -> list[str]:
    """Return lines of columns: those in `left` aligned to the left, the others to the right."""
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return [
        "  ".join(
            cell.ljust(width) if i in left else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in cells
    ]


def show(request: argparse.Namespace) -> None:
    """Print and draw the runs.

    Raises:
        ValueError: a folder holds no run, or no run has the metric.
    """
    from fla_train.run import find_runs
    from fla_train.training.metrics import draw_losses

    runs = find_runs(request.folders)
    validated = any("validation_loss" in record for run in runs for record in run.records)
    metric = request.metric or ("validation_loss" if validated else "loss")
    rows = table(runs, metric)
    if request.metric and all(row[metric] is None for row in rows):
        raise ValueError(f"no run has {metric}: docs/metrics.md lists the keys of metrics.jsonl")
    if request.json:
        print(json.dumps(rows, indent=2))
    elif request.csv:
        flat = [{key: row[key] for key in row if key != "differs"} | row["differs"] for row in rows]
        writer = csv.DictWriter(sys.stdout, dict.fromkeys(key for row in flat for key in row))
        writer.writeheader()
        writer.writerows(flat)
    else:
        print(*table_lines(rows, metric, shutil.get_terminal_size((120, 24)).columns), sep="\n")
    if request.png:
        folders = [Path(row["run"]) for row in rows]
        figure = draw_losses(folders, labels(rows), request.metric or "loss")
        Path(request.png).parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(request.png, dpi=120)


@interruptible()
def main() -> None:
    """Console command."""
    try:
        if sys.argv[1:2] == ["train"]:
            leave(train_list(sys.argv[2:]))
        show(build_parser().parse_args())
    except BrokenPipeError:  # `fla-runs runs | head` has read enough
        leave(0)
    except (ValueError, OSError) as error:
        sys.exit(fail_by(error))


if __name__ == "__main__":
    main()
