"""The papers' expressivity tables: list the runs to train, then write our numbers beside the published ones.

python -m fla_train.eval.expressivity_table plan formal,mqar runs/expressivity 0,1,2    one command a line
python -m fla_train.eval.expressivity_table write runs/expressivity                tables.md and tables.json
"""

import json
import re
import statistics
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

import yaml

from fla_train.tasks.plots import plot_accuracy
from fla_train.utils.records import read_metrics

SCAN_WEIGHT = 8  # Mamba loops over tokens: a layer takes as long as about 8 of ours
# Written into a run folder by scripts/reproduce_expressivity.sh: how long it took; why it did not end.
WALL, SKIPPED = "wall_seconds", "skipped"
USAGE = "usage: expressivity_table plan TABLE[,TABLE...] FOLDER SEEDS [full] | write FOLDER"


@dataclass(frozen=True)
class Run:
    """One training run of a table."""

    table: str
    row: str
    column: str
    seed: int
    overrides: tuple[str, ...]

    @property
    def weight(self) -> int:
        """How long it takes, roughly: Householder steps x layers."""
        values = dict(text.split("=", 1) for text in self.overrides)
        scan = SCAN_WEIGHT if values.get("model", "").startswith("mamba") else 1
        return (
            scan * int(values.get("model.num_householder", 1)) * int(values.get("model.num_hidden_layers", 1))
        )

    def folder(self, home: Path) -> Path:
        return home.joinpath(*map(slug, (self.table, self.row, self.column)), f"seed-{self.seed}")


def read_tables() -> dict[str, dict[str, Any]]:
    """The tables by name, as expressivity_tables.yaml has them."""
    return yaml.safe_load((files("fla_train.eval") / "expressivity_tables.yaml").read_text())


def runs_of(name: str, seeds: Sequence[int], *, fast: bool = True) -> Iterator[Run]:
    """Every run of a table: the papers' recipes, or their fast variants.

    Raises:
        ValueError: there is no such table.
    """
    tables = read_tables()
    if name not in tables:
        raise ValueError(f"unknown table '{name}'; choose one of {', '.join(tables)}")
    table = tables[name]
    for row, content in table["rows"].items():
        if content["overrides"] is None:
            continue
        for column, experiment in table["columns"].items():
            for seed in seeds:
                yield Run(
                    *(name, row, column, seed),
                    overrides=(
                        f"experiment={experiment}{'_fast' if fast else ''}",
                        *table.get("column_overrides", {}).get(column, []),
                        *content["overrides"],
                        f"seed={seed}",
                    ),
                )


def plan(names: Sequence[str], home: Path, seeds: Sequence[int], *, fast: bool = True) -> list[str]:
    """The arguments of `fla-train` for the runs of tables `names`, one run a line, run.dir first.

    Long runs come first, so that several at once end at about the same time.
    """
    runs = [run for name in names for run in runs_of(name, seeds, fast=fast)]
    runs.sort(key=lambda run: -run.weight)
    return [" ".join((f"run.dir={run.folder(home)}", *run.overrides)) for run in runs]


def slug(text: str) -> str:
    """The name of a row, a column or a table in paths."""
    return re.sub(r"[^\w.-]+", "_", text).strip("_")


def write_tables(home: Path) -> Path:
    """tables.md, tables.json and the columns' figures in `home`, of the runs below it: their newest tests.

    A cell without runs stays empty. A figure holds the accuracy curves of each row's best run.

    Raises:
        ValueError: no run has been tested.
    """
    tables = read_tables()
    results = {name: _results(name, table, home) for name, table in tables.items()}
    skipped = {name: _skipped(name, table, home) for name, table in tables.items()}
    found = [cell for rows in results.values() for row in rows.values() for cell in row.values() if cell]
    if not found and not any(skipped.values()):
        raise ValueError(f"no run with a test below {home}: run scripts/reproduce_expressivity.sh first")
    (home / "tables.json").write_text(json.dumps(results, indent=2) + "\n")
    hardware = sorted({device for cell in found for device in cell["hardware"]})
    lines = [
        "Ours: best (mean; lowest to highest; runs; steps; minutes of one run; the best run at another "
        "length). `cut` counts runs that were stopped before their end, with their newest test. A figure of "
        "the papers has no numbers: there `yes` and `no` say whether its text calls the problem learnt.",
        "",
        f"Hardware: {'; '.join(hardware) or 'no run has been tested'}.",
    ]
    for name, table in tables.items():
        if skipped[name] or any(cell for row in results[name].values() for cell in row.values()):
            rows = _markdown(table, results[name], skipped[name])
            lines += ["", *rows, "", *_figures(name, table, results[name], home)]
    out = home / "tables.md"
    out.write_text("\n".join(lines) + "\n")
    return out


def _results(name: str, table: Mapping[str, Any], home: Path) -> dict[str, dict[str, dict | None]]:
    rows: dict[str, dict[str, dict | None]] = {row: {} for row in table["rows"]}
    for row in rows:
        for column in table["columns"]:
            place = Run(name, row, column, 0, ()).folder(home).parent
            beside = table.get("beside", {})
            tested = [
                r for run in sorted(place.glob("seed-*")) if (r := _newest(run, table["metric"], beside))
            ]
            rows[row][column] = _statistics(tested) if tested else None
    return rows


def _newest(run: Path, metric: str, beside: Mapping[str, str]) -> dict[str, Any] | None:
    """The newest value of `metric`, and of those `beside` it by the names they are shown under.

    The run has ended by itself if it left an export of that step.
    """
    records = [record for record in read_metrics(run / "metrics.jsonl") if metric in record]
    if not records:
        return None
    step = records[-1]["step"]
    environment = json.loads((run / "environment.json").read_text())
    wall = run / WALL
    return {
        "run": str(run),
        "value": records[-1][metric],
        "beside": {name: records[-1][other] for name, other in beside.items()},
        "steps": step,
        "cut": not (run / "hf" / f"step-{step:07d}").is_dir(),
        "seconds": float(wall.read_text()) if wall.is_file() else None,
        "hardware": environment["hardware"],
    }


def _statistics(runs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    values = [run["value"] for run in runs]
    seconds = [run["seconds"] for run in runs if run["seconds"] is not None]
    best = max(runs, key=lambda run: run["value"])
    return {
        "best_run": best["run"],
        "best": best["value"],
        "beside": best["beside"],
        "mean": statistics.fmean(values),
        "lowest": min(values),
        "runs": len(values),
        "cut": sum(run["cut"] for run in runs),
        "steps": {Path(run["run"]).name: run["steps"] for run in runs},
        "minutes": statistics.fmean(seconds) / 60 if seconds else None,
        "hardware": sorted({run["hardware"] for run in runs}),
    }


def _markdown(
    table: Mapping[str, Any], results: Mapping[str, Mapping[str, dict | None]], skipped: Sequence[str]
) -> list[str]:
    """The lines of a table, and below it why rows or runs are missing."""
    columns = list(table["columns"])
    header = [part for column in columns for part in (f"{column}: paper", "ours")]
    lines = [
        f"## {table['title']}",
        "",
        f"Paper: {table['source']}.",
        "",
        f"| model | {' | '.join(header)} |",
        "|---" * (1 + len(header)) + "|",
    ]
    for row, content in table["rows"].items():
        cells = []
        for published, column in zip(content["published"], columns, strict=True):
            cells += [_published(published), _ours(results[row][column])]
        lines.append(f"| {row} | {' | '.join(cells)} |")
    missing = [
        f"{row} was not run: {content['skipped']}."
        for row, content in table["rows"].items()
        if "skipped" in content
    ]
    missing += skipped
    return [*lines, "", *missing] if missing else lines


def _skipped(name: str, table: Mapping[str, Any], home: Path) -> list[str]:
    """A line for each reason why runs of a row did not start or did not finish."""
    lines = []
    for row in table["rows"]:
        failed: dict[str, list[str]] = {}
        for column in table["columns"]:
            place = Run(name, row, column, 0, ()).folder(home).parent
            for note in sorted(place.glob(f"seed-*/{SKIPPED}")):
                reason = note.read_text().strip().removeprefix("error: ").removesuffix(".")
                failed.setdefault(reason, []).append(f"{column} {note.parent.name}")
        lines += [f"{row} did not run or end ({', '.join(runs)}): {r}." for r, runs in failed.items()]
    return lines


def _figures(
    name: str, table: Mapping[str, Any], results: Mapping[str, Mapping[str, dict | None]], home: Path
) -> list[str]:
    """Draw each column that has runs; the lines that show the figures."""
    test_set = table["metric"].split("/")[0]
    lines = []
    for column in table["columns"]:
        curves = {}
        for row, cells in results.items():
            file = Path(cells[column]["best_run"]) / "accuracy.json" if cells[column] else None
            if file is not None and file.is_file():
                curves[row] = json.loads(file.read_text())["sets"][test_set]
        if curves:
            out = home / f"{slug(name)}-{slug(column)}.png"
            plot_accuracy(curves, f"{table['title'].split(',')[0]}: {column}", out)
            lines.append(f"![{column}]({out.name})")
    return lines


def _published(value: float | bool | None) -> str:
    if value is None:
        return ""
    if isinstance(value, bool):  # YAML reads yes and no so
        return "yes" if value else "no"
    return f"{value:.3f}"


def _ours(cell: Mapping[str, Any] | None) -> str:
    if cell is None:
        return ""
    steps = sorted(set(cell["steps"].values()))
    span = f"; {' to '.join(f'{n:,}' for n in dict.fromkeys((steps[0], steps[-1])))} steps"
    minutes = "" if cell["minutes"] is None else f"; {cell['minutes']:.1f} min"
    cut = f"; {cell['cut']} cut" if cell["cut"] else ""
    beside = "".join(f"; {name} {value:.3f}" for name, value in cell["beside"].items())
    return (
        f"{cell['best']:.3f} ({cell['mean']:.3f}; {cell['lowest']:.3f} to {cell['best']:.3f}; "
        f"{cell['runs']}{span}{minutes}{cut}{beside})"
    )


def main(arguments: Sequence[str]) -> int:
    """The command line; returns the exit code."""
    match list(arguments):
        case ["plan", name, home, seeds, *rest] if rest in ([], ["full"]):
            if not re.fullmatch(r"\d+(,\d+)*", seeds):
                raise ValueError(f"seeds are numbers and commas, as in 0,1,2: got '{seeds}'")
            numbers = [int(seed) for seed in seeds.split(",")]
            print(*plan(name.split(","), Path(home), numbers, fast=not rest), sep="\n")
        case ["write", home]:
            print(write_tables(Path(home)).read_text())
        case _:
            print(USAGE, file=sys.stderr)
            return 2
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except ValueError as error:
        sys.exit(f"error: {error}")
