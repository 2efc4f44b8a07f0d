"""`fla-bench attention`: a window's memory grows with the length, and the command writes what it prints."""

import json

import pytest
import torch

from fla_train.cli import bench

SMALL = [
    "attention",
    "--heads",
    "2",
    "--kv-heads",
    "1",
    "--head-dim",
    "8",
    "--window",
    "50",
    "--document",
    "300",
]


@pytest.mark.skipif(torch.cuda.is_available(), reason="head sizes of a CPU")
def test_the_command(tmp_path, capsys) -> None:
    file = tmp_path / "attention.json"
    bench.run([*SMALL, "--tokens", "1024", "2048", "--rounds", "1", "--json", str(file)])
    rows = json.loads(file.read_text())["rows"]
    table = [line for line in capsys.readouterr().out.splitlines() if line.startswith("|")]
    assert len(table) == 2 + len(rows) == 10
    assert all(row["both_ms"] > row["forward_ms"] > 0 for row in rows)
    assert len({row["sees"] for row in rows}) == 4
    for short, long in zip(rows[:4], rows[4:], strict=True):
        assert long["memory_bytes"] < 2.5 * short["memory_bytes"]


def test_a_window_that_cannot_be_is_refused_before_measuring(capsys) -> None:
    with pytest.raises(ValueError, match="window"):
        bench.run([*SMALL, "--window", "1"])
    assert " all " not in capsys.readouterr().out


def test_sizes_below_one_are_refused(capsys) -> None:
    with pytest.raises(SystemExit):
        bench.run([*SMALL, "--window", "0"])
    assert "--window" in capsys.readouterr().err
