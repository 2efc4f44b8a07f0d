"""Readers of metrics.jsonl skip damaged lines, name them once and keep them in the file."""

import json
import logging
from pathlib import Path

import pytest

from fla_train.training.log import MetricsFile
from fla_train.training.metrics import last_value, plot_losses, resumed_at
from fla_train.utils.records import read_metrics

DAMAGED = {
    "brackets without end": b"[" * 100_000,
    "bad JSON": b'{"step": 10, "tokens": 80, "loss"; 4.0}',
    "a wrong byte": b'{"step": 10, "tokens": 80, "loss\xff": 4.0}',
    "no step": b'{"stfp": 10, "tokens": 80, "loss": 4.0}',
    "text as step": b'{"step": "10", "tokens": 80, "loss": 4.0}',
    "an infinite step": b'{"step": NaN, "tokens": 80, "loss": 4.0}',
    "an impossible step": b'{"step": 1e308, "tokens": 80, "loss": 4.0}',
    "a list": b"[10, 80]",
    "an empty line": b"",
}


def line(step: int, **values: float) -> bytes:
    return json.dumps({"step": step, "tokens": 8 * step} | values).encode()


@pytest.mark.parametrize("damaged", DAMAGED.values(), ids=DAMAGED.keys())
def test_only_the_damaged_line_is_lost(damaged, tmp_path, caplog):
    path = tmp_path / "metrics.jsonl"
    # A kill has truncated the last line.
    lines = [*(line(step, loss=5 - step / 10) for step in range(1, 37)), b'{"step": 37, "lo']
    lines[9] = damaged
    path.write_bytes(b"\n".join(lines))
    steps = [step for step in range(1, 37) if step != 10]
    for _ in range(2):
        assert [record["step"] for record in read_metrics(path)] == steps
    warnings = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert len(warnings) == 2 and all(str(path) in text for text in warnings)
    assert "line 10 " in warnings[0] and "line 37 " in warnings[1]
    assert last_value(path, "loss") == pytest.approx(5 - 3.6)
    assert plot_losses([tmp_path], tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG")

    metrics = MetricsFile(path, resumed_step=30)
    metrics.write({"step": 31, "tokens": 248, "loss": 1.0})
    metrics.close()
    assert path.read_bytes().split(b"\n") == [*lines[:30], lines[36], line(31, loss=1.0), b""]


def test_a_damaged_start_is_skipped(tmp_path: Path) -> None:
    for number, content in enumerate((line(0), line(3), line(4).replace(b"step", b"step\xff"))):
        folder = tmp_path / "starts" / str(number)
        folder.mkdir(parents=True)
        (folder / "start.json").write_bytes(content + b"\n")
    assert resumed_at(tmp_path) == [24]
