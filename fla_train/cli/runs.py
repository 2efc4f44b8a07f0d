"""`fla-runs FOLDER...`: list runs with what differs between their configs, and draw their curves.

fla-runs runs/sweep                                            # every run at or below the folder
fla-runs runs/a runs/b --metric validation_loss --png curves.png
fla-runs runs --csv > runs.csv
fla-runs train LIST.yaml                                       # train a list of runs
"""

import argparse
import csv
import json
import math
import os
import re
import shutil
import statistics
import string
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fla_train.cli.app import fail_by, interruptible, leave
from fla_train.cli.train_list import train_list
from fla_train.cli.version import add_version

if TYPE_CHECKING:  # it imports torch, and is not needed for --help
    from fla_train.run import Run

Row = dict[str, Any]
Curve = tuple[Sequence[float], Sequence[float]]  # training tokens, values
MARKS = string.ascii_lowercase + string.ascii_uppercase  # of runs, in the table and the terminal's plot
LONGEST_LABEL = 60  # characters; of longer differences the shortest are shown, and the number of others
HIGHER = re.compile(r"(?!.*loss).*(acc|tokens_per_second|mfu|exact_match|f1|contains)")  # more is better
HEIGHT = 16  # rows of the terminal's plot


def build_parser() -> argparse.ArgumentParser:
    """The command's options."""
    parser = argparse.ArgumentParser(
        prog="fla-runs",
        description="List the runs at or below folders: what differs between their configs, status, losses, "
        "tokens per second; and draw their curves. `fla-runs train --help` is about training many.",
    )
    add_version(parser)
    parser.add_argument("folders", nargs="+", metavar="FOLDER", help="a run, a sweep, or a folder of them")
    parser.add_argument(
        "--metric",
        default="loss",
        help="key of metrics.jsonl to draw and to list with its last and best value (default: loss)",
    )
    parser.add_argument("--png", metavar="FILE", help="draw the curves into this file, too")
    output = parser.add_mutually_exclusive_group()
    output.add_argument("--csv", action="store_true", help="print CSV, with a column for each such setting")
    output.add_argument("--json", action="store_true", help="print JSON")
    return parser


def table(runs: Sequence["Run"], metric: str) -> list[Row]:
    """For each run: where it is, what differs, how far it has come, last and best values, tokens/s."""
    from fla_train.run import differences

    rows = []
    for run, differ in zip(runs, differences(runs), strict=True):
        records = run.records
        row = {"run": str(run.path), "model": run.model_name, "differs": differ, "status": run.status}
        row["step"] = run.step
        row["max_steps"] = run.settings["trainer.max_steps"]
        for key in dict.fromkeys(("loss", "validation_loss", metric)):
            values = [(r[key], r["step"]) for r in records if r.get(key) is not None]
            best, step = (max if HIGHER.match(key) else min)(values, default=(None, None))
            row |= {key: values[-1][0] if values else None, f"best_{key}": best, f"best_{key}_step": step}
        speeds = [r["tokens_per_second"] for r in records if r.get("tokens_per_second")]
        row["tokens_per_second"] = statistics.median(speeds) if speeds else None
        rows.append(row)
    return rows


def difference(row: Row) -> str:
    """What distinguishes a run, as overrides; if these are many, the model, some of them and their number."""
    from fla_train.hub.saved_config import plain

    texts = {key: f"{key}={plain(value)}" for key, value in row["differs"].items()}
    if len(text := ", ".join(texts.values())) <= LONGEST_LABEL:
        return text
    others = [text for key, text in texts.items() if not key.startswith("model.")]
    shown = [] if len(others) == len(texts) else [row["model"]]
    left = len(others)
    for text in sorted(others, key=len):
        if len(", ".join([*shown, text])) <= LONGEST_LABEL:
            shown.append(text)
            left -= 1
    return ", ".join([*shown, *([f"{left} more"] if left else [])])


def labels(rows: Sequence[Row]) -> list[str]:
    """Names for curves: the differences, or folders where those distinguish no run from another."""
    texts = [difference(row) for row in rows]
    return [
        text if text and texts.count(text) == 1 else row["run"] for text, row in zip(texts, rows, strict=True)
    ]


def table_lines(rows: Sequence[Row], metric: str) -> list[str]:
    """The rows for a terminal."""
    keys = ["loss", "validation_loss", "best_validation_loss"]
    keys += [key for key in (metric, f"best_{metric}") if metric != "loss" and key not in keys]
    folders = [os.path.dirname(row["run"]) for row in rows]
    if len({os.path.isabs(folder) for folder in folders}) > 1:
        folders = [os.path.abspath(folder) for folder in folders]
    home = os.path.commonpath(folders)
    cells = [["", "run", "status", "step", *(key.replace("_", " ") for key in keys), "tokens/s", "differs"]]
    for number, row in enumerate(rows):
        name, steps = os.path.relpath(row["run"], home), f"{row['step']:,}/{row['max_steps']:,}"
        values = ["-" if row[key] is None else f"{row[key]:.4f}" for key in keys]
        rate = "-" if row["tokens_per_second"] is None else f"{row['tokens_per_second']:,.0f}"
        cells.append([_mark(number), name, row["status"], steps, *values, rate, difference(row)])
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    texts = (0, 1, 2, len(widths) - 1)  # columns of text; the others are numbers
    lines = [
        "  ".join(
            cell.ljust(width) if i in texts else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in cells
    ]
    return [f"{len(rows)} run(s) in {home or '.'}", *lines]


def plot_lines(curves: Mapping[str, Curve], width: int) -> list[str]:
    """Curves in plain text, each drawn by its letter; the vertical axis is logarithmic above 0.

    Args:
        curves: by letter.
        width: characters of a line.
    """
    values = [value for _, found in curves.values() for value in found]
    scale, inverse = (math.log, math.exp) if min(values) > 0 else (float, float)
    bottom, end = scale(min(values)), max(max(tokens) for tokens, _ in curves.values())
    span = scale(max(values)) - bottom or 1.0
    columns = width - 11
    grid = [[" "] * columns for _ in range(HEIGHT)]
    for mark, (tokens, found) in curves.items():
        inside: dict[int, list[float]] = {}
        for x, y in zip(tokens, found, strict=True):
            inside.setdefault(min(columns - 1, int(x / end * columns)), []).append(y)
        for column, part in inside.items():
            row = round((scale(statistics.fmean(part)) - bottom) / span * (HEIGHT - 1))
            grid[HEIGHT - 1 - row][column] = mark
    ticks = [inverse(bottom + span * (1 - row / (HEIGHT - 1))) for row in range(HEIGHT)]
    lines = [
        f"{f'{tick:.4g}' if row % 5 == 0 else '':>9} |{''.join(grid[row])}".rstrip()
        for row, tick in enumerate(ticks)
    ]
    return [*lines, f"{'':>9} +{'-' * columns}", f"{'':>10}0{f'{end:,.0f} tokens':>{columns}}"]


def _mark(number: int) -> str:
    return MARKS[number % len(MARKS)]


def show(request: argparse.Namespace) -> None:
    """Print and draw what was asked for.

    Raises:
        ValueError: a folder holds no run, or no run has the metric.
    """
    from fla_train.run import find_runs
    from fla_train.training.metrics import curve, draw_losses

    metric, runs = request.metric, find_runs(request.folders)
    rows = table(runs, metric)
    curves = {i: found for i, run in enumerate(runs) if (found := curve(run.records, metric))[0]}
    if not curves and (request.png or metric != "loss"):
        raise ValueError(f"no run has {metric}: docs/metrics.md lists the keys of metrics.jsonl")
    if request.json:
        print(json.dumps(rows, indent=2))
    elif request.csv:
        flat = [{key: row[key] for key in row if key != "differs"} | row["differs"] for row in rows]
        writer = csv.DictWriter(sys.stdout, flat[0])
        writer.writeheader()
        writer.writerows(flat)
    else:
        print(*table_lines(rows, metric), sep="\n")
        if curves:
            width = min(120, shutil.get_terminal_size().columns)
            marked = {_mark(i): found for i, found in curves.items()}
            print("", metric, *plot_lines(marked, width), sep="\n")
    if request.png:
        names = labels(rows)
        figure = draw_losses([runs[i].path for i in curves], [names[i] for i in curves], metric)
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
