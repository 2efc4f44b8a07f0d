"""`fla-runs`: the order of the table, what it shows of the differences, means over seeds."""

from pathlib import Path

import pytest

from fla_train.cli.runs import LONGEST_LABEL, labels, table_lines


def row(run: str, best: float | None = 1.0, **differs: object) -> dict:
    found = {"run": run, "model": "net/0.3m", "parameters": 300_000, "status": "finished"}
    found |= {"step": 2, "max_steps": 2, "loss": 1.0, "validation_loss": best, "best_validation_loss": best}
    return found | {"tokens_per_second": None, "differs": differs}


def test_folders_may_be_relative_and_absolute() -> None:
    lines = table_lines([row("runs/a"), row(f"{Path.cwd()}/b")], "validation_loss", 120)
    assert str(Path.cwd()) in lines[0] and " runs/a " in lines[2] and " b " in lines[3]
    assert lines[2].startswith("*") and " 300,000 " in lines[2]


@pytest.mark.parametrize("count", [1, 9])
def test_every_difference_is_shown(count: int) -> None:
    """In the table if they are short, else below it; a figure then has the runs' names."""
    keys = {f"model.key{i}": i for i in range(count)}
    rows = [row("runs/a", **keys), row("runs/b", **keys | {"model.key0": False})]
    text = "\n".join(table_lines(rows, "validation_loss", 80))
    assert all(f"{key}={value}" in text for key, value in keys.items()) and "model.key0=false" in text
    fit = len(", ".join(keys)) <= LONGEST_LABEL
    assert labels(rows) == (["model.key0=0", "model.key0=false"] if fit else ["a", "b"])


def test_runs_of_other_seeds_have_a_mean() -> None:
    rows = [row(f"runs/{i}", value, seed=i, lr=0.1) for i, value in enumerate([1.0, 1.5, 2.0])]
    lines = table_lines([*rows, row("runs/3", 9.0, seed=0, lr=0.2)], "validation_loss", 80)
    assert lines[-1].split("  ")[-1] == "lr=0.1" and "1.5000 ± 0.5000" in lines[-1]
    assert lines[-2].split()[0] == "runs"  # no line for a single run
