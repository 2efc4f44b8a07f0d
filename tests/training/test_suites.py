"""Suites during training: which start, which results are recorded, and that training is unchanged."""

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from fla_train.training.features.suites import Suites
from fla_train.training.run_folder import RunFolder

EVALUATOR = """
import json, os, sys, time
options = dict(argument.split("=", 1) for argument in sys.argv[1:])
while not os.path.exists(options["gate"]):
    time.sleep(0.02)
if "fail" in options:
    sys.exit("error: no such data")
ranks = [key for key in os.environ if key in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "LOCAL_RANK")]
metrics = {"eval/web/loss_64": 2.5, "eval/ranks": float(len(ranks))}
open(options["output"] + "/results.json", "w").write(json.dumps({"metrics": metrics, **options}))
"""


class Run:
    """The trainer that `Suites` needs, with a stand-in for fla-eval that waits for `open_gate`."""

    def __init__(self, root: Path, *options: str):
        self.gate, self.records, self.lines = root / "gate", [], []
        self.folder, self.state, self.finished = RunFolder(root), SimpleNamespace(step=0, tokens=0), False
        options = [f"gate={self.gate}", *options]
        settings = SimpleNamespace(suite="demo", suite_every=4, suite_options=options)
        self.config = SimpleNamespace(trainer=settings)
        self.log, self.logger = self.lines.append, SimpleNamespace(record=self.records.append)
        self.watchdog = SimpleNamespace(beat=lambda doing: None)
        self.suites = Suites()

    def attach(self, step: int = 0) -> Suites:
        self.state.step = step
        self.suites.attach(self)
        return self.suites

    def train_to(self, step: int) -> None:
        self.folder.export(step).mkdir(parents=True)
        self.state.step, self.state.tokens = step, 100 * step
        self.suites.between_steps(step)

    def evaluated(self) -> list[int]:
        return [record["evaluated_step"] for record in self.records]


@pytest.fixture(autouse=True)
def started(monkeypatch: pytest.MonkeyPatch) -> list[subprocess.Popen]:
    """Run a stand-in for fla-eval. Return its processes."""
    real, processes = subprocess.Popen, []

    def popen(command: list[str], **options: object) -> subprocess.Popen:
        if "fla_train.cli.eval import main" not in "".join(command):
            return real(command, **options)
        processes.append(real([sys.executable, "-c", EVALUATOR, *command[4:]], **options))
        return processes[-1]

    monkeypatch.setattr(subprocess, "Popen", popen)
    monkeypatch.setattr("fla_train.training.features.suites.POLL", 0.02)
    monkeypatch.setenv("RANK", "0")
    return processes


def test_training_does_not_wait_and_the_newest_model_is_evaluated_at_the_end(tmp_path: Path):
    run = Run(tmp_path, "suite.limit=5")
    suites = run.attach()
    for step in (4, 8, 12):  # the first evaluation still runs
        run.train_to(step)
        suites.after_results([])
    assert not run.records and len(run.lines) == 2
    run.gate.touch()
    suites.finish()
    assert run.evaluated() == [4, 12]
    assert run.records[0] == {
        "step": 12,
        "tokens": 1200,
        "evaluated_step": 4,
        "eval/web/loss_64": 2.5,
        "eval/ranks": 0.0,
    }
    request = json.loads((tmp_path / "eval/demo-step-0000012/results.json").read_text())
    assert request["checkpoint"].endswith("hf/step-0000012") and request["suite.limit"] == "5"


@pytest.mark.parametrize("cause", ["fail=1", "disk"])
def test_a_suite_that_fails_costs_a_line(tmp_path: Path, cause: str):
    run = Run(tmp_path, cause if "=" in cause else "a=1")
    if cause == "disk":
        (tmp_path / "eval").write_text("in the way")
    run.gate.touch()
    run.attach()
    run.train_to(4)
    run.suites.finish()
    assert not run.records and all(line.startswith("step 4: suite demo") for line in run.lines)


@pytest.mark.parametrize(("recorded", "evaluated"), [([], [8]), ([4, 8], []), ([4], [8])])
def test_a_resumed_run_evaluates_what_a_kill_has_lost(tmp_path, recorded, evaluated):
    lines = [json.dumps({"step": step, "evaluated_step": step}) + "\n" for step in recorded]
    (tmp_path / "metrics.jsonl").write_text("".join(lines))
    run = Run(tmp_path)
    run.folder.export(8).mkdir(parents=True)
    run.gate.touch()
    suites = run.attach(step=9)
    run.state.step = 0  # which has no export, so that only the one of step 8 is waited for
    suites.finish()
    assert run.evaluated() == evaluated


def test_stop_ends_the_evaluation(tmp_path: Path, started: list[subprocess.Popen]):
    run = Run(tmp_path)
    run.attach()
    run.train_to(4)
    run.suites.stop()
    assert started[0].poll() is not None and not run.records
