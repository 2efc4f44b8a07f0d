"""What a preparation shows of itself, by a clock that the test sets."""

import io
import sys
import time

import pytest

from fla_train.utils.progress import Progress


@pytest.fixture
def clock(monkeypatch):
    """Seconds, as a list of one."""
    now = [1000.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    monkeypatch.setattr("tqdm.std.time", lambda: now[0])
    return now


@pytest.mark.parametrize(("total", "rest"), [(1000, ", 40%, 02:00 left"), (None, "")])
def test_a_line_a_minute_where_there_is_no_terminal(clock, total, rest):
    lines = []
    progress = Progress(total, "B", lines.append, show=True)
    progress.update(100, 50, resumed=True)  # the work of an earlier process counts for no speed
    for seconds, done, tokens in ((30, 300, 10**6), (60, 400, 120_000_050), (90, 500, 2 * 10**8)):
        clock[0] = 1000.0 + seconds
        progress.update(done, tokens)
    progress.close()
    assert lines == [f"data: 120,000,050 tokens, 2.00M tokens/s{rest}"]


def test_a_bar_on_a_terminal(clock, monkeypatch):
    terminal = io.StringIO()
    terminal.isatty = lambda: True
    monkeypatch.setattr(sys, "stderr", terminal)
    lines = []
    progress = Progress(1000, "B", lines.append, show=True)
    progress.update(100, 0, resumed=True)
    clock[0] += 60.0
    progress.update(400, 120_000_000)
    progress.close()
    shown = terminal.getvalue().split("\r")[-1]
    assert "40%" in shown and "[01:00<02:00" in shown and "2.00M tokens/s" in shown
    assert not lines


def test_nothing_where_nothing_is_asked_for(clock, capsys):
    lines = []
    progress = Progress(1000, "B", lines.append, show=False)
    clock[0] += 100.0
    progress.update(400, 120)
    progress.close()
    assert not lines and capsys.readouterr().err == ""
