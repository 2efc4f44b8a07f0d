"""`fla-runs FOLDER...`: list runs, the best first, with what differs between their configs; draw curves.

fla-runs runs/sweep                                            # every run at or below the folder
fla-runs runs/a runs/b --metric validation_loss --png curves.png
fla-runs runs --csv > runs.csv
fla-runs train LIST.yaml                                       # train a list of runs
fla-runs compare FILE.yaml                                     # compare models fairly
"""

import argparse
import json
import os
import re
import statistics
import sys
from collections.abc import Mapping, Sequence
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fla_train.cli import comparison_config
from fla_train.cli.app import leave, plain_errors
from fla_train.cli.train_list import train_list
from fla_train.cli.version import add_version
from fla_train.training.metrics import plot_losses
from fla_train.utils.overrides import plain

if TYPE_CHECKING:  # imports torch, which --help does not need
    from fla_train.run.results import Run

Row = dict[str, Any]
LONGEST_LABEL = 60  # characters of a run's differences in a figure's legend
# Keys of metrics. They contain the names of corpora and tasks, and any score of an evaluation task counts as
# better if higher unless it is one of the losses listed here.
HIGHER_IS_BETTER = re.compile(
    r"(?!.*(loss|perplexity|bits_per_byte|brier|/ter$))(eval/|.*(acc|tokens_per_second|mfu|f1))"
)


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of the command's options."""
    parser = argparse.ArgumentParser(
        prog="fla-runs",
        description="List the runs at or below folders, the best first: size, status, losses, tokens per "
        "second and what differs between their configs; and draw their curves. `fla-runs train --help` is "
        "about training many, `fla-runs compare --help` about comparing models.",
    )
    add_version(parser)
    parser.add_argument("folders", nargs="+", metavar="FOLDER", help="a run, a sweep, or a folder of them")
    parser.add_argument(
        "--metric", help="key of metrics.jsonl to sort by, list and draw (default: validation_loss, and loss)"
    )
    parser.add_argument("--png", metavar="FILE", help="draw the curves into this file")
    output = parser.add_mutually_exclusive_group()
    output.add_argument("--csv", action="store_true", help="print CSV, with a column for each such setting")
    output.add_argument("--json", action="store_true", help="print JSON")
    return parser


def table(runs: Sequence["Run"], metric: str) -> list[Row]:
    """Return a row for each run, sorted by the best value of `metric`; runs without a value come last."""
    from fla_train.run.results import differences

    rows = []
    for run, differ in zip(runs, differences(runs), strict=True):
        records = run.records
        row = {"run": str(run.path), "model": run.model_name, "parameters": run.parameters}
        row |= {"differs": differ, "status": run.status, "step": run.step}
        row["max_steps"] = run.settings["trainer.max_steps"]
        for key in dict.fromkeys(("loss", "validation_loss", metric)):
            values = [(r[key], r["step"]) for r in records if r.get(key) is not None]
            choose = max if HIGHER_IS_BETTER.match(key) else min
            best, step = choose(values, key=itemgetter(0), default=(None, None))
            row |= {key: values[-1][0] if values else None, f"best_{key}": best, f"best_{key}_step": step}
        speeds = [r["tokens_per_second"] for r in records if r.get("tokens_per_second")]
        row["tokens_per_second"] = statistics.median(speeds) if speeds else None
        rows.append(row)
    key, sign = f"best_{metric}", -1 if HIGHER_IS_BETTER.match(metric) else 1
    return sorted(rows, key=lambda row: (row[key] is None, sign * (row[key] or 0)))


def as_overrides(settings: Mapping[str, Any]) -> str:
    """Return settings as the overrides that a user would write, separated by commas."""
    return ", ".join(f"{key}={plain(value)}" for key, value in settings.items())


def relative_paths(rows: Sequence[Row]) -> tuple[str, list[str]]:
    """Return the folder that holds all runs, and the path of each run below it."""
    folders = [os.path.dirname(os.path.abspath(row["run"])) for row in rows]
    home = os.path.commonpath(folders)
    return os.path.relpath(home), [os.path.relpath(row["run"], home) for row in rows]


def legend_labels(rows: Sequence[Row]) -> list[str]:
    """Return each run's name in a figure: its differences if they are short and unique, else its path."""
    texts = [as_overrides(row["differs"]) for row in rows]
    fit = all(0 < len(text) <= LONGEST_LABEL and texts.count(text) == 1 for text in texts)
    return texts if fit else relative_paths(rows)[1]


def table_text(rows: Sequence[Row], metric: str) -> str:
    """Return the rows as text, with the means of finished runs that differ in the seed only below them.

    A seed counts once, although a sweep that was extended may have trained it again.
    """
    from pandas import DataFrame

    home, paths = relative_paths(rows)
    keys = [*dict.fromkeys(("loss", "validation_loss", metric)), f"best_{metric}"]
    frame = DataFrame(rows)
    frame["run"] = paths
    frame["step"] = [f"{row['step']:,}/{row['max_steps']:,}" for row in rows]
    frame["parameters"] = ["-" if row["parameters"] is None else f"{row['parameters']:,}" for row in rows]
    frame["tokens/s"] = [f"{row['tokens_per_second'] or 0:,.0f}" for row in rows]
    frame["differs"] = [as_overrides(row["differs"]) for row in rows]
    shown = frame[["run", "model", "parameters", "status", "step", *keys, "tokens/s", "differs"]]
    style = {"na_rep": "-", "float_format": "{:.4f}".format}
    lines = [f"{len(rows)} run(s) in {home}, the best {metric.replace('_', ' ')} first"]
    lines.append(shown.rename(columns=lambda name: name.replace("_", " ")).to_string(index=False, **style))
    settings = [{"model": row["model"]} | row["differs"] for row in rows]
    frame["runs"] = [as_overrides({k: v for k, v in values.items() if k != "seed"}) for values in settings]
    frame["seed"] = [row["differs"].get("seed") for row in rows]
    finished = frame[frame.status == "finished"].drop_duplicates(["runs", "seed"])
    groups = finished.groupby("runs", sort=False)
    several = groups["seed"].nunique() > 1
    if several.any():
        means = groups[keys].agg(["count", "mean", "std"])[several]
        lines += ["", "Mean and standard deviation of finished runs that differ in the seed only:"]
        lines.append(means.to_string(**style))
    return "\n".join(lines)


def show(request: argparse.Namespace) -> None:
    """Print and draw the runs.

    Raises:
        ValueError: a folder holds no run, or no run has the metric.
    """
    from pandas import DataFrame

    from fla_train.run.results import find_runs

    runs = find_runs(request.folders)
    validated = any("validation_loss" in record for run in runs for record in run.records)
    metric = request.metric or ("validation_loss" if validated else "loss")
    rows = table(runs, metric)
    if request.metric and all(row[metric] is None for row in rows):
        raise ValueError(f"no run has {metric}: docs/metrics.md lists the keys of metrics.jsonl")
    if request.json:
        print(json.dumps(rows, indent=2))
    elif request.csv:
        frame = DataFrame([{**row, **row["differs"]} for row in rows], dtype=object)
        print(frame.drop(columns="differs").to_csv(index=False), end="")
    else:
        print(table_text(rows, metric))
    if request.png:
        folders = [Path(row["run"]) for row in rows]
        plot_losses(folders, Path(request.png), legend_labels(rows), request.metric or "loss")


@plain_errors()
def main() -> None:
    """Run the console command."""
    if sys.argv[1:2] == ["train"]:
        leave(train_list(sys.argv[2:]))
    if sys.argv[1:2] == ["compare"]:
        request = comparison_config.build_parser().parse_intermixed_args(sys.argv[2:])
        from fla_train.cli.comparison import compare  # imports torch, which --help does not need

        leave(compare(request))
    show(build_parser().parse_args())


if __name__ == "__main__":
    main()
