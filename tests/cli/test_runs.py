"""`fla-runs`: what the table shows of differences and of runs that differ in their seed."""

from pathlib import Path

import pytest

from fla_train.cli.runs import labels, table_text


def row(run: str, best: float | None = 1.0, **differs: object) -> dict:
    values = {"run": run, "model": "net/0.3m", "parameters": 300_000, "status": "finished"}
    values |= {"step": 2, "max_steps": 2, "loss": 1.0, "validation_loss": best, "best_validation_loss": best}
    return values | {"tokens_per_second": None, "differs": differs}


def test_folders_may_be_relative_and_absolute() -> None:
    lines = table_text([row("runs/a"), row(f"{Path.cwd()}/b")], "validation_loss").splitlines()
    assert "runs/a " in lines[2] and " 300,000 " in lines[2] and " b " in lines[3]


@pytest.mark.parametrize("count", [1, 9])
def test_every_difference_is_shown(count: int) -> None:
    keys = {f"model.key{i}": i for i in range(count)}
    rows = [row("runs/a", **keys), row("runs/b", **keys | {"model.key0": False})]
    text = table_text(rows, "validation_loss")
    assert all(f"{key}={value}" in text for key, value in keys.items()) and "model.key0=false" in text
    assert labels(rows) == (["model.key0=0", "model.key0=false"] if count == 1 else ["a", "b"])


def test_runs_of_other_seeds_have_a_mean() -> None:
    rows = [row(f"runs/{i}", value, seed=i, lr=0.1) for i, value in enumerate([1.0, 1.5, 2.0])]
    last = table_text([*rows, row("runs/3", 9.0, seed=0, lr=0.2)], "validation_loss").splitlines()[-1]
    assert last.startswith("lr=0.1") and "1.5000 0.5000" in " ".join(last.split())
