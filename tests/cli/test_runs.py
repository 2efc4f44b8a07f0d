"""`fla-runs`: how a table names what distinguishes a run."""

from fla_train.cli.runs import LONGEST_LABEL, difference


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
