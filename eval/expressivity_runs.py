"""The runs behind the papers' expressivity tables, which expressivity_tables.yaml describes."""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

import yaml

SCAN_WEIGHT = 8  # Mamba loops over tokens: about so many layers of ours


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
        scan = SCAN_WEIGHT if values.get("baseline", "").startswith("mamba") else 1
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
    """What a row, a column or a table is called in paths."""
    return re.sub(r"[^\w.-]+", "_", text).strip("_")
