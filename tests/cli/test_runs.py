"""`fla-runs`: how a table names what distinguishes a run."""

from pathlib import Path

from fla_train.cli.runs import LONGEST_LABEL, difference, table_lines


def test_folders_may_be_relative_and_absolute() -> None:
    rows = [
        {"run": run, "status": "complete", "step": 2, "max_steps": 2, "loss": 1.0, "validation_loss": None}
        | {"best_validation_loss": None, "tokens_per_second": None, "differs": {}, "model": "net/2m"}
        for run in ("runs/a", f"{Path.cwd()}/b")
    ]
    lines = table_lines(rows, "loss")
    assert str(Path.cwd()) in lines[0] and " runs/a " in lines[2] and " b " in lines[3]


def test_few_differences_are_overrides() -> None:
    row = {"differs": {"model.num_heads": 4, "optimizer.lr": 0.001}, "model": "net/2m"}
    assert difference(row) == "model.num_heads=4, optimizer.lr=0.001"


def test_of_many_the_shortest_are_shown_and_the_others_counted() -> None:
    others = {f"data.key{i}": "x" * 9 * i for i in range(8, 0, -1)}
    text = difference({"differs": {"model.num_heads": 4, **others}, "model": "net/2m"})
    assert text == f"net/2m, data.key1={'x' * 9}, data.key2={'x' * 18}, 6 more"
    assert len(text.rpartition(", ")[0]) <= LONGEST_LABEL
    without_model = difference({"differs": others, "model": "net/2m"})
    assert without_model.startswith("data.key1=") and without_model.endswith("6 more")
