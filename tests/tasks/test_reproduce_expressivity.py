"""scripts/reproduce_expressivity.sh with an idle trainer: which runs start, on which GPU, what is left."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "reproduce_expressivity.sh"
TRAINER = f"""#!{sys.executable}
import json, os, pathlib, sys, time
run = pathlib.Path(sys.argv[1].removeprefix("run.dir="))
calls = run / "calls"
calls.write_text(calls.read_text() + "x" if calls.exists() else "x")
if "model=fla/gla/tiny" in sys.argv:
    sys.exit("error: this model needs a package")
(run / "gpu").write_text(os.environ.get("CUDA_VISIBLE_DEVICES", "none"))
if "model.num_householder=3" in sys.argv:
    time.sleep(60)
(run / "metrics.jsonl").write_text(json.dumps({{"step": 4, "longer/scaled_accuracy": 0.5}}) + "\\n")
(run / "environment.json").write_text(json.dumps({{"hardware": "an abacus"}}))
"""


@pytest.fixture
def reproduce(tmp_path: Path):
    (tmp_path / "bin").mkdir()
    trainer = tmp_path / "bin" / "fla-train"
    trainer.write_text(TRAINER)
    trainer.chmod(0o755)
    path = f"{trainer.parent}{os.pathsep}{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"

    def run(*tables: str, status: int = 0, **settings: str) -> str:
        home = {"HOME_DIR": str(tmp_path / "runs"), "PATH": path, "SEEDS": "0"}
        done = subprocess.run(
            ["bash", str(SCRIPT), *tables], env=os.environ | home | settings, capture_output=True, text=True
        )
        assert done.returncode == status, done.stderr
        return done.stdout if status == 0 else done.stderr

    return run


def test_runs_are_spread_over_gpus_cut_at_their_limit_and_skipped_with_a_reason(reproduce, tmp_path) -> None:
    rows = r"formal/(GLA|DeltaNet_-1_1|DeltaProduct_[34]_-1_1)/parity/"
    said = reproduce("formal", ONLY=rows, LIMIT="5", GPUS="4,7")
    runs = tmp_path / "runs" / "formal"
    four, one = (runs / name / "parity" / "seed-0" for name in ("DeltaProduct_4_-1_1", "DeltaNet_-1_1"))
    assert {(four / "gpu").read_text(), (one / "gpu").read_text()} <= {"4", "7"}
    assert (four / "complete").exists() and float((one / "wall_seconds").read_text()) >= 0
    cut = runs / "DeltaProduct_3_-1_1" / "parity" / "seed-0"
    assert [(run / "gpu").read_text() for run in (four, cut, one)] == ["4", "7", "4"]
    assert not (cut / "complete").exists() and float((cut / "wall_seconds").read_text()) >= 5
    reason = "GLA did not run or end (parity seed-0): this model needs a package."
    assert reason in (tmp_path / "runs" / "tables.md").read_text()
    assert "| GLA |  |  |  |  |  |  |" in said and "of 4 runs 2 are complete, 1 were skipped" in said

    reproduce("formal", ONLY=rows.replace("[34]", "4"))  # again: what is complete is left alone
    assert (four / "calls").read_text() == "x"
    assert json.loads((tmp_path / "runs" / "tables.json").read_text())["formal"]["GLA"]["parity"] is None


def test_recipes_are_not_mixed_in_a_folder(reproduce) -> None:
    rows = "formal/DeltaNet_-1_1/parity"
    reproduce("formal", ONLY=rows, EXTRA="trainer.max_steps=4")
    for other in ({"EXTRA": "trainer.max_steps=8"}, {"FULL": "1"}):
        said = reproduce("formal", status=1, **({"ONLY": rows} | other))
        assert "was trained by another recipe (experiment=formal/parity_fast " in said
        assert "give another HOME_DIR" in said and len(said.splitlines()) == 1
    assert "complete" in reproduce("formal", ONLY=rows, EXTRA="trainer.max_steps=4")


def test_runs_that_all_fail_are_named_and_a_choice_of_none_is_refused(reproduce) -> None:
    said = reproduce("formal", ONLY="formal/GLA/")
    assert "GLA did not run or end (parity seed-0, mod. arithmetic seed-0, with brackets seed-0): " in said
    assert "no run has been tested" in said
    assert "ONLY='formal/GLU' is in no run of formal" in reproduce("formal", status=1, ONLY="formal/GLU")
