"""A damaged line of metrics.jsonl costs itself only: the others are read, it is named and it stays."""

import json
import logging
from pathlib import Path

import pytest

from fla_train.training.log import MetricsFile
from fla_train.training.metrics import checkpoint_seconds, last_value, plot_losses, resumed_at
from fla_train.utils.records import read_metrics

DAMAGED = {
    "brackets without end": b"[" * 100_000,
    "bad JSON": b'{"step": 10, "tokens": 80, "loss"; 4.0}',
    "a wrong byte": b'{"step": 10, "tokens": 80, "loss\xff": 4.0}',
    "no step": b'{"stfp": 10, "tokens": 80, "loss": 4.0}',
    "a step that is no number": b'{"step": "10", "tokens": 80, "loss": 4.0}',
    "a step that is not finite": b'{"step": NaN, "tokens": 80, "loss": 4.0}',
    "a step that no run reaches": b'{"step": 1e308, "tokens": 80, "loss": 4.0}',
    "no object": b"[10, 80]",
    "nothing": b"",
    "a line cut short": b'{"step": 10, "tok',
}


def write(path: Path, damaged: bytes) -> list[bytes]:
    """36 records, that of step 10 `damaged`, and the last line cut short."""
    lines = [json.dumps({"step": s, "tokens": 8 * s, "loss": 5 - s / 10}).encode() for s in range(1, 37)]
    lines[9] = damaged
    lines.append(b'{"step": 37, "lo')
    path.write_bytes(b"\n".join(lines))
    return lines


@pytest.mark.parametrize("damaged", DAMAGED.values(), ids=DAMAGED.keys())
def test_a_damaged_line_costs_itself_only(
    damaged: bytes, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "metrics.jsonl"
    lines = write(path, damaged)
    whole = [step for step in range(1, 37) if step != 10]
    for _ in range(2):  # named once
        assert [record["step"] for record in read_metrics(path)] == whole
    named = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert len(named) == 2 and all(str(path) in line for line in named)
    assert "line 10 " in named[0] and "line 37 " in named[1]
    assert last_value(path, "loss") == pytest.approx(5 - 3.6)
    assert plot_losses([tmp_path], tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG")

    metrics = MetricsFile(path, resumed_step=30)
    metrics.write({"step": 31, "tokens": 248, "loss": 1.0})
    metrics.close()
    assert path.read_bytes().split(b"\n") == [*lines[:30], lines[36], metrics_line(31, 248, 1.0), b""]
    assert [record["step"] for record in read_metrics(path)] == [*whole[:29], 31]


def metrics_line(step: int, tokens: int, loss: float) -> bytes:
    return json.dumps({"step": step, "tokens": tokens, "loss": loss}).encode()


def test_a_key_that_a_flipped_bit_renamed_does_not_end_the_run(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text(
        '{"step": 1, "tokens": 8, "loss": 2.0, "tokens_per_second": 4.0}\n'
        '{"step": 2, "tokems": 16, "loss": 1.0, "tokens_per_second": 4.0}\n'
    )
    assert checkpoint_seconds(path) == (0.0, 2.0)
    plot_losses([tmp_path], tmp_path / "loss.png")


def test_a_file_without_damage_is_not_rewritten(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(metrics_line(3, 24, 1.0) + b"\n")
    before = path.stat().st_ino
    MetricsFile(path, resumed_step=3).close()
    assert path.stat().st_ino == before


def test_a_wrong_byte_among_the_starts_leaves_the_others(tmp_path: Path) -> None:
    lines = (
        b'{"step": 0, "tokens": 0}',
        b'{"step": 3, "tokens": 24}',
        b'{"step\xff": 4, "tokens": 32}',
        b'{"step": 5}',
    )
    for number, line in enumerate(lines):
        folder = tmp_path / "starts" / str(number)
        folder.mkdir(parents=True)
        (folder / "start.json").write_bytes(line + b"\n")
    assert resumed_at(tmp_path) == [24]
