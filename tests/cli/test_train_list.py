"""`fla-runs train` shares the GPUs, skips finished runs and stops in time. A script replaces `fla-train`."""

import errno
import io
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from fla_train.cli.train_list import train_list

TRAINER = """
import os, pathlib, signal, sys, time
given = dict(text.split("=", 1) for text in sys.argv[1:])
run = pathlib.Path(given["run.dir"])
with (run / "gpus").open("a") as file:
    file.write((os.environ["CUDA_VISIBLE_DEVICES"] or "cpu") + " ")
if given["seed"] == "7":
    print("error: no such model")
    sys.exit(2)
(run / "config.yaml").write_text("trainer: {max_steps: 4}")
signal.signal(signal.SIGTERM, lambda *_: sys.exit(75))
if given["seed"] == "8" and len((run / "gpus").read_text().split()) == 1:
    time.sleep(60)
step = 2 if given["seed"] == "9" else 4  # a callback has ended the run
(run / "metrics.jsonl").write_text(f'{{"step": {step}, "tokens": 8, "loss": 1.0}}\\n')
(run / "hf" / f"step-000000{step}").mkdir(parents=True)
(run / "plots").mkdir()
(run / "plots" / "loss.png").touch()
"""
LIST = """
shared: [model=delta_net/tiny]
runs: {a: [seed=1], b: [seed=2], slow: [seed=8], wrong: [seed=7], early: [seed=9]}
"""


@pytest.fixture
def train(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., int]:
    """`train(option, ...)` runs the command with the trainer above in tmp_path/runs."""

    def start(name: str, overrides: list[str], log: Path, **variables: str) -> subprocess.Popen:
        assert name == "train" and overrides[-2] == "model=delta_net/tiny"
        with log.open("w") as file:
            command = [sys.executable, "-I", "-S", "-c", TRAINER, *overrides]
            return subprocess.Popen(command, stdout=file, stderr=file, env=os.environ | variables)

    monkeypatch.setattr("fla_train.cli.train_list.start_command", start)
    monkeypatch.setattr("fla_train.cli.train_list.POLL", 0.01)
    (tmp_path / "list.yaml").write_text(LIST)
    return lambda *words: train_list([str(tmp_path / "list.yaml"), "--folder", f"{tmp_path}/runs", *words])


def gpus(tmp_path: Path, name: str) -> list[str]:
    return (tmp_path / "runs" / name / "gpus").read_text().split()


def test_runs_share_the_gpus_and_finished_ones_are_left_alone(train, tmp_path: Path, capsys) -> None:
    assert train("--only", "[ab]", "--gpus", "4,7") == 0
    assert {*gpus(tmp_path, "a"), *gpus(tmp_path, "b")} == {"4", "7"}
    assert train("--only", "[abw]*", "--gpus", "4") == 1
    assert len(gpus(tmp_path, "a")) == 1 and "error: no such model" in capsys.readouterr().out
    assert train("--dry-run") == 0
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == [
        *("finished", "finished", "new", "new", "new")
    ]


class ClosedTerminal(io.StringIO):
    def write(self, text: str) -> int:
        raise OSError(errno.EIO, os.strerror(errno.EIO))


def test_a_closed_terminal_does_not_end_the_runs(train, tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "stdout", ClosedTerminal())
    assert train("--only", "[ab]", "--gpus", "4") == 0
    assert gpus(tmp_path, "a") == gpus(tmp_path, "b") == ["4"]


def test_a_run_that_cannot_start_does_not_end_the_others(train, tmp_path: Path, capsys) -> None:
    (tmp_path / "runs" / "slow").mkdir(parents=True)
    (tmp_path / "runs" / "slow" / "config.yaml").write_text("[")
    (tmp_path / "runs" / "a").touch()
    assert train("--only", "a", "--only", "b", "--only", "slow", "--gpus", "4") == 1
    assert gpus(tmp_path, "b") == ["4"] and capsys.readouterr().out.count("error: ") == 2


def test_the_same_command_continues_runs_that_were_stopped(train, tmp_path: Path) -> None:
    assert train("--only", "[sw]*", "--gpus", "none", "--jobs", "2", "--seconds", "47") == 75
    assert train("--only", "slow", "--only", "early", "--gpus", "4") == 0
    assert gpus(tmp_path, "slow") == ["cpu", "4"]
    assert (tmp_path / "runs" / "slow" / "metrics.jsonl").is_file()
