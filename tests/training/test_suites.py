"""Suites during training: what is started, what is logged, and that training does not notice."""

import importlib.util
import json
import subprocess
import sys
import time
from pathlib import Path

import pytest
from warm_ranks import WarmRanks

from fla_train.training.config import validate
from fla_train.training.evaluator import SuiteRuns
from fla_train.utils.records import read_metrics

EVALUATOR = """
import json, os, sys, time
options = dict(argument.split("=", 1) for argument in sys.argv[1:])
while not os.path.exists(options["gate"]):
    time.sleep(0.02)
if "fail" in options:
    sys.exit("error: no such data")
ranks = [key for key in os.environ if key in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "LOCAL_RANK")]
metrics = {"eval/web/loss_64": 2.5, "eval/lost": float("inf"), "eval/ranks": float(len(ranks))}
open(options["output"] + "/results.json", "w").write(json.dumps({"metrics": metrics, **options}))
"""


@pytest.fixture
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """`runs(*options)`: suite runs with a stand-in for fla-eval, and the records and lines they give."""
    (tmp_path / "evaluator.py").write_text(EVALUATOR)
    real = subprocess.Popen

    def stand_in(command: list[str], **options: object) -> subprocess.Popen:
        assert command[:3] == [sys.executable, "-P", "-c"] and command[3].endswith(
            "fla_train.cli.eval import main; main()"
        )
        return real([sys.executable, str(tmp_path / "evaluator.py"), *command[4:]], **options)

    monkeypatch.setattr(subprocess, "Popen", stand_in)
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("MASTER_ADDR", "here")

    def make(*options: str) -> tuple[SuiteRuns, list, list]:
        records, lines = [], []
        options = (f"gate={tmp_path / 'gate'}", *options)
        made = SuiteRuns("demo", options, tmp_path / "eval", record=records.append, log=lines.append)
        return made, records, lines

    return make


def open_gate(tmp_path: Path) -> None:
    (tmp_path / "gate").touch()


def test_training_does_not_wait_and_gets_the_results_later(runs, tmp_path: Path) -> None:
    suites, records, lines = runs("suite.limit=5")
    suites.start(tmp_path / "hf/step-0000004", 4)
    suites.collect(4, 400)
    suites.start(tmp_path / "hf/step-0000008", 8)  # the first one is still at it
    assert not records and lines == ["step 8: suite demo left out, that of step 4 still runs"]
    open_gate(tmp_path)
    while not records:
        suites.collect(9, 900)
        time.sleep(0.02)
    assert records == [
        {
            "step": 9,
            "tokens": 900,
            "evaluated_step": 4,
            "eval/web/loss_64": 2.5,
            "eval/lost": None,
            "eval/ranks": 0.0,
        }
    ]
    given = json.loads((tmp_path / "eval/demo-step-0000004/results.json").read_text())
    assert given["checkpoint"].endswith("hf/step-0000004") and given["suite"] == "demo"
    assert given["suite.limit"] == "5"
    suites.start(tmp_path / "hf/step-0000012", 12)
    beats = []
    suites.finish(12, 1200, beats.append)
    assert records[1]["evaluated_step"] == 12 and beats


def test_the_newest_model_is_evaluated_at_the_end_if_it_was_left_out(runs, tmp_path: Path) -> None:
    suites, records, lines = runs()
    for step in (4, 8, 12):  # the first one is still at it
        suites.start(tmp_path / f"hf/step-{step:07d}", step)
    open_gate(tmp_path)
    suites.finish(12, 1200, lambda doing: None)
    assert [record["evaluated_step"] for record in records] == [4, 12]
    assert "step 12: suite demo starts late" in lines
    given = json.loads((tmp_path / "eval/demo-step-0000012/results.json").read_text())
    assert given["checkpoint"].endswith("hf/step-0000012")


def test_a_suite_that_fails_is_a_line(runs, tmp_path: Path) -> None:
    open_gate(tmp_path)
    suites, records, lines = runs("fail=1")
    suites.start(tmp_path / "hf/step-0000004", 4)
    suites.finish(4, 400, lambda doing: None)
    assert not records and len(lines) == 1 and lines[0].startswith("step 4: suite demo failed, see ")
    assert "no such data" in (tmp_path / "eval/demo-step-0000004/eval.log").read_text()


@pytest.mark.parametrize(
    ("exported", "logged", "started"),
    [
        (False, [], False),  # a fresh run, or one that branches off another
        (True, [4, 8], False),
        (True, [4], True),  # killed while it ran, or resumed at a step before its record
    ],
)
def test_a_resume_makes_up_for_lost_results(
    runs, tmp_path: Path, exported: bool, logged: list[int], started: bool
) -> None:
    suites, records, _ = runs()
    export, metrics = tmp_path / "hf/step-0000008", tmp_path / "metrics.jsonl"
    metrics.write_text("".join(json.dumps({"step": s, "evaluated_step": s}) + "\n" for s in logged))
    if exported:
        export.mkdir(parents=True)
    open_gate(tmp_path)
    suites.start_if_lost(export, 8, metrics)
    suites.finish(9, 900, lambda doing: None)
    assert [record["evaluated_step"] for record in records] == [8] * started


def test_stop_ends_the_evaluation(runs, tmp_path: Path) -> None:
    suites, records, lines = runs()
    suites.stop()  # nothing to stop
    suites.start(tmp_path / "hf/step-0000004", 4)
    suites.stop()
    suites.finish(4, 400, lambda doing: pytest.fail("nothing is running"))
    assert not records and not lines


@pytest.fixture
def riddles(tmp_path: Path) -> list[str]:
    """Options of fla-eval: one of the zero-shot tasks, on a mirror with three documents."""
    rows = [
        {
            "id": str(i),
            "question": question,
            "choices": {"text": texts, "label": ["A", "B"]},
            "answerKey": "A",
        }
        for i, (question, texts) in enumerate(
            [("Hot?", ["fire", "ice"]), ("Wet?", ["rain", "sand"]), ("Up?", ["sky", "sea"])]
        )
    ]
    splits = tmp_path / "splits/arc_easy"
    splits.mkdir(parents=True)
    for split in ("test", "validation"):
        (splits / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    script = Path(__file__).resolve().parents[2] / "scripts/build_eval_mirror.py"
    subprocess.run([sys.executable, script, splits.parent, tmp_path / "mirror"], check=True)
    lm_eval = Path(importlib.util.find_spec("lm_eval").origin).parent
    options = [f"mirror={tmp_path / 'mirror'}", "suite.tasks=[arc_easy]", "suite.limit=2"]
    return [*options, f"suite.include_path={lm_eval}/tasks/arc"]  # to index all of lm-eval's takes seconds


@pytest.mark.long
def test_training_is_the_same_to_the_bit(
    make_config, warm_ranks: WarmRanks, riddles: list[str], tmp_path: Path
) -> None:
    """Two runs that differ only in the suites, a sweep and a task of lm-eval, which seeds what it can reach:
    same losses, same weights, and the suites' results besides.
    """
    options = ["suite.perplexity.lengths=[16,32]", "suite.perplexity.bucket=16", *riddles]
    suite = [*("trainer.suite_every=2", "trainer.suite=demo"), f"trainer.suite_options={json.dumps(options)}"]
    metrics, weights = {}, {}
    for name, more in (("plain", []), ("suites", suite)):
        config = make_config(f"run.dir={tmp_path / name}", "trainer.max_steps=5", "launch.device=cpu", *more)
        warm_ranks.launch(config)
        metrics[name] = read_metrics(tmp_path / name / "metrics.jsonl")
        weights[name] = (tmp_path / name / "hf/step-0000005/model.safetensors").read_bytes()
    assert weights["plain"] == weights["suites"]
    losses = {
        name: [record["loss"] for record in records if "loss" in record] for name, records in metrics.items()
    }
    assert len(losses["plain"]) == 5 and losses["plain"] == losses["suites"]
    found = [record for record in metrics["suites"] if "evaluated_step" in record]
    assert found[-1]["evaluated_step"] == 5
    expected = {"eval/validation/loss_16", "eval/validation/loss_32", "eval/arc_easy/acc_norm"}
    assert all(expected <= record.keys() for record in found)
    steps = [record["step"] for record in metrics["suites"]]
    assert steps == sorted(steps)
    assert (tmp_path / f"suites/eval/demo-step-000000{found[0]['evaluated_step']}/index.html").is_file()


def test_suites_that_cannot_run_are_refused(make_config) -> None:
    with pytest.raises(ValueError, match=r"trainer\.suite=riddles must be one of demo, "):
        validate(make_config("trainer.suite_every=2", "trainer.suite=riddles"))


TRAINER = """
import subprocess, sys, time
from pathlib import Path
from fla_train.training.evaluator import SuiteRuns

def long_evaluation(command, **options):
    rounds = "import time\\nfor _ in range(1200): print('.', flush=True); time.sleep(0.05)"
    code = command[3].replace("from fla_train.cli.eval import main; main()", rounds)
    assert code != command[3]
    return real([*command[:3], code], **options)

real, subprocess.Popen = subprocess.Popen, long_evaluation
SuiteRuns("demo", [], Path(sys.argv[1]), record=print, log=print).start(Path("export"), 4)
time.sleep(60)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel's help is Linux's")
def test_an_evaluation_ends_with_its_trainer(tmp_path: Path) -> None:
    log = tmp_path / "demo-step-0000004" / "eval.log"
    with subprocess.Popen([sys.executable, "-c", TRAINER, str(tmp_path)]) as trainer:
        deadline = time.monotonic() + 60
        while not (log.is_file() and log.stat().st_size) and time.monotonic() < deadline:
            time.sleep(0.05)
        trainer.kill()
    time.sleep(0.2)
    size = log.stat().st_size
    assert size
    time.sleep(0.5)
    assert log.stat().st_size == size


def test_a_suite_that_the_disk_refuses_is_left_out(runs, tmp_path: Path) -> None:
    (tmp_path / "eval").write_text("in the way")
    suites, records, lines = runs()
    suites.start(tmp_path / "hf/step-0000004", 4)
    suites.finish(9, 900, lambda doing: None)
    assert lines == ["step 4: suite demo left out (Not a directory)"] and not records
