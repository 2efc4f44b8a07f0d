"""The papers' expressivity tables: the runs that fill them, and our numbers beside the published ones.

`fla-runs queue` (fla_train.cli.run_queue) trains the runs and writes the tables of those that were tested.
"""

import itertools
import json
import re
import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from importlib.resources import files
from pathlib import Path
from typing import Any

import yaml

from fla_train.tasks.plots import plot_accuracy
from fla_train.utils.records import read_metrics
from fla_train.utils.safe_files import read_json, read_yaml

SCANS = ("hf/mamba2/", "hf/xlstm/")  # models that loop over tokens or chunks
SCAN_WEIGHT = 8  # such a layer takes as long as about 8 of ours
# Written into a run folder by the queue: how long it took; why it failed; that it has ended by itself.
WALL, FAILED, COMPLETE = "wall_seconds", "failed", "complete"


@dataclass(frozen=True)
class Run:
    """One training run of a table.

    Attributes:
        overrides: arguments of `fla-train`, without `run.dir`.
        claimed: a claim of the papers rests on it.
    """

    table: str
    row: str
    column: str
    seed: int
    overrides: tuple[str, ...] = ()
    claimed: bool = False

    @property
    def name(self) -> str:
        """Table, row, column and seed, as in `state_tracking/DeltaProduct_2_-1_1/S3/seed-0`."""
        return "/".join([*map(slug, (self.table, self.row, self.column)), f"seed-{self.seed}"])

    @property
    def weight(self) -> int:
        """How long it takes, roughly: Householder steps x layers."""
        values = dict(text.split("=", 1) for text in self.overrides)
        scan = SCAN_WEIGHT if values.get("model", "").startswith(SCANS) else 1
        return (
            scan * int(values.get("model.num_householder", 1)) * int(values.get("model.num_hidden_layers", 1))
        )

    def folder(self, home: Path) -> Path:
        return home / self.name

    def matches(self, pattern: str) -> bool:
        """Whether a glob fits the name or a part of it between slashes; capitals do not matter."""
        parts = self.name.lower().split("/")
        spans = ["/".join(parts[i:j]) for i in range(4) for j in range(i + 1, 5)]
        return any(fnmatchcase(span, pattern.lower()) for span in spans)


def read_tables() -> dict[str, dict[str, Any]]:
    """The tables by name, as expressivity_tables.yaml has them."""
    tables = yaml.safe_load((files("fla_train.eval") / "expressivity_tables.yaml").read_text())
    for table in tables.values():
        count = len(table["columns"])
        if isinstance(table["paper_words"], int):
            table["paper_words"] = [table["paper_words"]] * count
        # New mappings: YAML's anchors let several tables share a row.
        defaults = {"published": [None] * count, "paper_words": table["paper_words"]}
        table["rows"] = {row: defaults | cells for row, cells in table["rows"].items()}
    return tables


def runs_of(name: str, seeds: Sequence[int], *, fast: bool = True) -> Iterator[Run]:
    """Every run of a table: the papers' recipes, or their fast variants."""
    table = read_tables()[name]
    for row, content in table["rows"].items():
        if content["overrides"] is None:
            continue
        for column, experiment in table["columns"].items():
            for seed in seeds:
                overrides = (
                    f"experiment={experiment}{'_fast' if fast else ''}",
                    *table.get("column_overrides", {}).get(column, []),
                    *content["overrides"],
                    *content.get("column_overrides", {}).get(column, []),
                    *(content.get("fast", {}).get(column, []) if fast else []),
                    f"seed={seed}",
                )
                run = Run(name, row, column, seed, overrides)
                yield replace(run, claimed=any(map(run.matches, table["claims"])))


def slug(text: str) -> str:
    """The name of a row, a column or a table in paths."""
    return re.sub(r"[^\w.-]+", "_", text).strip("_")


def write_tables(home: Path) -> Path:
    """tables.md, tables.json and the columns' figures in `home`, of the runs below it: their newest tests.

    A cell without runs stays empty. A figure holds the accuracy curves of each row's best run. tables.json
    has `environments` and `rows` of each table: `scripts/docs_results.py` makes the docs' tables from it.

    Raises:
        ValueError: no run has been tested.
    """
    tables = read_tables()
    results = {name: _results(name, table, home) for name, table in tables.items()}
    failed = {name: _failed(name, table, home) for name, table in tables.items()}
    environments = [environment for table in results.values() for environment in table["environments"]]
    if not environments and not any(failed.values()):
        raise ValueError(f"no run below {home} has been tested yet: train some with fla-runs queue")
    (home / "tables.json").write_text(json.dumps(results, indent=1) + "\n")
    hardware = sorted({environment["hardware"] for environment in environments})
    lines = [
        "Ours: best (median; lowest to highest; seeds; steps; these runs' words as a share of the paper's; "
        "minutes of one run; values at other lengths; the length up to which half are right, + if it was "
        "the longest tested). `cut` counts runs that were stopped before "
        "their end, with their newest test. A figure of the papers has no numbers: there `yes` and `no` say "
        "whether its text calls the problem learnt.",
        "",
        f"Hardware: {'; '.join(hardware) or 'no run has been tested'}.",
    ]
    for name, table in tables.items():
        if failed[name] or results[name]["environments"]:
            rows = results[name]["rows"]
            lines += ["", *_markdown(table, rows, failed[name]), "", *_figures(name, table, rows, home)]
    out = home / "tables.md"
    out.write_text("\n".join(lines) + "\n")
    return out


def _results(name: str, table: Mapping[str, Any], home: Path) -> dict[str, Any]:
    """A table of tables.json: `environments` of its runs, and `rows` by name, of cells by column."""
    rows: dict[str, dict[str, dict | None]] = {row: {} for row in table["rows"]}
    runs = []
    for row in rows:
        for column, words in zip(table["columns"], table["rows"][row]["paper_words"], strict=True):
            place = Run(name, row, column, 0).folder(home).parent
            folders = sorted(place.glob("seed-*"))
            tested = [run for folder in folders if (run := _newest(folder, table, home))]
            rows[row][column] = _statistics(tested, words) if tested else None
            runs += tested
    return {"environments": _environments([run["environment"] for run in runs]), "rows": rows}


def _newest(folder: Path, table: Mapping[str, Any], home: Path) -> dict[str, Any] | None:
    """The newest value of the table's metric, and of those `beside` it by the names they are shown under."""
    metric = table["metric"]
    records = [record for record in read_metrics(folder / "metrics.jsonl") if metric in record]
    if not records:
        return None
    step = records[-1]["step"]
    config = read_yaml(folder / "config.yaml")
    wall = folder / WALL
    return {
        "run": folder.relative_to(home).as_posix(),
        "seed": folder.name,
        "value": records[-1][metric],
        "beside": {
            name: records[-1][other]
            for name, other in table.get("beside", {}).items()
            if other in records[-1]  # a shorter test lacks it
        },
        "half": _half(folder / "accuracy.json", table["half"]) if "half" in table else None,
        "steps": step,
        "words": step * config["task"]["batch_size"],
        "cut": not (folder / COMPLETE).is_file(),
        "seconds": float(wall.read_text()) if wall.is_file() else None,
        "environment": read_json(folder / "environment.json"),
    }


def _half(file: Path, test_set: str) -> tuple[int, int] | None:
    """The length up to which at least half of the sequences are right, and the longest that was tested."""
    sets = read_json(file)["sets"] if file.is_file() else {}
    if (curve := sets.get(test_set)) is None:
        return None
    right = itertools.takewhile(lambda point: point[1] >= 0.5, zip(curve["x"], curve["y"], strict=True))
    return max((length for length, _ in right), default=0), curve["x"][-1]


def _statistics(runs: Sequence[Mapping[str, Any]], paper_words: int) -> dict[str, Any]:
    values = {run["seed"]: run["value"] for run in runs}
    seconds = [run["seconds"] for run in runs if run["seconds"] is not None]
    best = max(runs, key=lambda run: run["value"])
    return {
        "best_run": best["run"],
        "best": best["value"],
        "beside": {
            name: {run["seed"]: run["beside"][name] for run in runs if name in run["beside"]}
            for name in best["beside"]
        },
        "half": {run["seed"]: run["half"] for run in runs if run["half"]},
        "median": statistics.median(values.values()),
        "lowest": min(values.values()),
        "values": values,
        "cut": sum(run["cut"] for run in runs),
        "steps": {run["seed"]: run["steps"] for run in runs},
        "share_of_paper_words": {run["seed"]: run["words"] / paper_words for run in runs},
        "minutes": statistics.fmean(seconds) / 60 if seconds else None,
    }


def _environments(found: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Each hardware, commit and set of packages, with the dates (`time`) and the number of its runs."""
    dates: dict[str, list[str]] = {}
    for environment in found:
        kind = json.dumps({key: environment[key] for key in ("hardware", "commit", "packages")})
        dates.setdefault(kind, []).append(environment["time"].partition("T")[0])
    return [json.loads(kind) | {"time": span(days, str), "runs": len(days)} for kind, days in dates.items()]


def _markdown(
    table: Mapping[str, Any], results: Mapping[str, Mapping[str, dict | None]], failed: Sequence[str]
) -> list[str]:
    """The lines of a table, and below it why rows or runs are missing."""
    columns = list(table["columns"])
    averages = ["average"] if table.get("average") else []
    header = [part for column in columns + averages for part in (f"{column}: paper", "ours")]
    lines = [
        f"## {table['title']}",
        "",
        f"Paper: {table['source']}.",
        "",
        f"| model | {' | '.join(header)} |",
        "|---" * (1 + len(header)) + "|",
    ]
    empty = []
    for row, content in table["rows"].items():
        cells = []
        for published, column in zip(content["published"], columns, strict=True):
            cells += [show_published(published), _ours(results[row][column])]
        cells += show_averages(content["published"], results[row].values()) if averages else []
        if any(cells):
            lines.append(f"| {row} | {' | '.join(cells)} |")
        else:
            empty.append(row)
    missing = [f"Not tested yet: {'; '.join(empty)}."] if empty else []
    missing += [
        f"{row} was not run: {content['skipped']}."
        for row, content in table["rows"].items()
        if "skipped" in content
    ]
    missing += failed
    return [*lines, "", *missing] if missing else lines


def _failed(name: str, table: Mapping[str, Any], home: Path) -> list[str]:
    """A line for each reason why runs of a row did not start or did not finish."""
    lines = []
    for row in table["rows"]:
        failed: dict[str, list[str]] = {}
        for column in table["columns"]:
            place = Run(name, row, column, 0).folder(home).parent
            for note in sorted(place.glob(f"seed-*/{FAILED}")):
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
            file = home / cells[column]["best_run"] / "accuracy.json" if cells[column] else None
            if file is not None and file.is_file():
                curves[row] = read_json(file)["sets"][test_set]
        if curves:
            out = home / f"{slug(name)}-{slug(column)}.png"
            plot_accuracy(curves, f"{table['title'].split(',')[0]}: {column}", out)
            lines.append(f"![{column}]({out.name})")
    return lines


def show_published(value: float | str | bool | None) -> str:
    """A published entry as tables show it: a number, yes or no, or what else a text says."""
    if isinstance(value, bool):  # YAML reads yes and no so
        return "yes" if value else "no"
    return f"{value:.3f}" if isinstance(value, float) else value or ""


def show_averages(published: Iterable[float | None], cells: Iterable[Mapping[str, Any] | None]) -> list[str]:
    """The means over the columns of the published numbers and of our best, where no column is missing."""
    rows = (list(published), [cell and cell["best"] for cell in cells])
    return ["" if None in row else f"{statistics.fmean(row):.3f}" for row in rows]


def _ours(cell: Mapping[str, Any] | None) -> str:
    if cell is None:
        return ""
    steps = span(cell["steps"].values(), "{:,}".format)
    share = span(cell["share_of_paper_words"].values(), percent)
    minutes = "" if cell["minutes"] is None else f"; {cell['minutes']:.1f} min"
    cut = f"; {cell['cut']} cut" if cell["cut"] else ""
    beside = "".join(
        f"; {name} {span(values.values(), '{:.3f}'.format)}" for name, values in cell["beside"].items()
    )
    half = f"; half right to {half_right(cell)}" if cell["half"] else ""
    seeds = ", ".join(seed.removeprefix("seed-") for seed in cell["values"])
    return (
        f"{cell['best']:.3f} ({cell['median']:.3f}; {cell['lowest']:.3f} to {cell['best']:.3f}; "
        f"seeds {seeds}; {steps} steps; {share}% of the words{minutes}{cut}{beside}{half})"
    )


def half_right(cell: Mapping[str, Any]) -> str:
    """The lengths up to which half of the sequences are right, over the seeds; + after the longest tested."""
    return span(
        map(tuple, cell["half"].values()), lambda half: f"{half[0]:,}{'+' if half[0] == half[1] else ''}"
    )


def percent(share: float) -> str:
    """A share in percent, with two significant digits."""
    return f"{float(f'{100 * share:.2g}'):g}"


def span(values: Iterable[Any], show: Callable[[Any], str]) -> str:
    """The lowest and the highest, or the one that all are."""
    shown = [show(value) for value in sorted(values)]
    return " to ".join(dict.fromkeys((shown[0], shown[-1])))
