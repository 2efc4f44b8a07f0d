"""scripts/time_scaling.py: what it would run on a machine of four GPUs, and the table it makes of it."""

import json
import runpy
from pathlib import Path

import pytest

from fla_train.cli.app import compose
from fla_train.cli.train import register
from fla_train.training.resolve import accumulation_steps
from fla_train.training.schema import to_config
from fla_train.training.validate import validate

SCRIPT = Path(__file__).parents[2] / "scripts" / "time_scaling.py"


@pytest.fixture(scope="module")
def script() -> dict:
    return runpy.run_path(str(SCRIPT))


def test_runs_have_names_of_their_own_and_strong_scaling_ends_in_weak(script):
    runs = list(script["speed_runs"](["340m", "1.3b"], [1, 2, 4], steps=8))
    assert len({run.name for run in runs}) == len(runs) == 10
    assert [run.gpus for run in runs if run.kind == "strong"] == [1, 2]  # on four it is weak scaling


def test_settings_are_valid_and_strong_scaling_keeps_the_tokens_per_step(script):
    register()
    runs = [*script["speed_runs"](["340m"], [1, 2, 4], steps=8), *script["elastic_runs"](4)]
    for run in runs:
        further = [
            f"run.dir=runs/{run.name}",
            "data=stdlib",
            "logger=none",
            f"launch.num_processes={run.gpus}",
        ]
        config = to_config(compose("train", [*further, *run.overrides]))
        validate(config)
        steps = accumulation_steps(config)
        assert steps == (4 // run.gpus if run.kind in ("strong", "") else 1)


def test_efficiency_is_speed_per_gpu_over_that_of_one(script):
    run = script["Run"]
    runs = [
        run("a", 1, [], "340m", "weak", tokens_per_second=100.0),
        run("b", 4, [], "340m", "weak", tokens_per_second=380.0),
        run("c", 2, [], "340m", "strong", failure="1"),
    ]
    lines = script["table"](runs).splitlines()
    assert "| 340m | weak | 4 | 380 | 95.0% | 0.0 |" in lines
    assert any(line.startswith("| 340m | strong | 2 | 1 |") for line in lines)


def test_neither_the_first_steps_nor_the_profiled_one_count(script, tmp_path):
    (tmp_path / "a").mkdir()
    (tmp_path / "a.log").touch()
    speeds = [5, 9, 9, 9, 100, 110, 120, 3, 50]  # the eighth is read while the ninth step is profiled
    lines = [
        json.dumps({"step": i + 1, "loss": 1.0, "tokens_per_second": speed, "memory_gib": 2.0})
        for i, speed in enumerate(speeds)
    ]
    (tmp_path / "a" / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    (run,) = (r for r in script["speed_runs"](["340m"], [1, 2], steps=10) if r.name == "340m-weak-2")
    run.name = "a"
    script["read"](run, tmp_path)
    assert run.tokens_per_second == 110.0
