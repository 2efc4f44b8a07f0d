"""`fla-bench scaling`: what it would run on a machine of four GPUs, and the table it makes of it."""

import json
import time

import pytest
import torch.distributed as dist

from fla_train.bench import scaling
from fla_train.cli.app import compose
from fla_train.cli.train import register
from fla_train.training.config import accumulation_steps, to_config, validate


def test_runs_have_names_of_their_own_and_strong_scaling_ends_in_weak():
    runs = list(scaling.speed_runs(["340m", "1.3b"], [1, 2, 4], steps=8))
    assert len({run.name for run in runs}) == len(runs) == 10
    assert [run.gpus for run in runs if run.kind == "strong"] == [1, 2]  # on four it is weak scaling


def test_settings_are_valid_and_strong_scaling_keeps_the_tokens_per_step():
    register()
    for run in scaling.speed_runs(["340m"], [1, 2, 4], steps=8):
        further = [
            f"run.dir=runs/{run.name}",
            "data=stdlib",
            "logger=none",
            f"launch.num_processes={run.gpus}",
        ]
        config = to_config(compose("train", [*further, *run.overrides]))
        validate(config)
        steps = accumulation_steps(config)
        assert steps == (4 // run.gpus if run.kind == "strong" else 1)


def test_overlap_is_a_run_of_its_own():
    """The others have the default, which is what is faster."""
    overlap = "launch.overlap_communication=true"
    runs = scaling.speed_runs(["340m"], [1, 2], steps=8)
    assert [run.name for run in runs if overlap in run.overrides] == ["340m-overlap-2"]


@pytest.mark.parametrize("synced", [True, False])
def test_plain_pytorch_is_timed_by_the_step(synced: bool, monkeypatch: pytest.MonkeyPatch):
    register()
    more = ["model.num_hidden_layers=1", "model.hidden_size=32", "model.num_heads=2", "model.head_dim=16"]
    more += [
        "model.vocab_size=64",
        "trainer.seq_len=16",
        "trainer.micro_batch_size=3",
        "trainer.precision=fp32",
    ]
    config = to_config(compose("train", ["launch.device=cpu", *more]))
    ranks = {
        "RANK": "0",
        "WORLD_SIZE": "1",
        "LOCAL_RANK": "0",
        "LOCAL_WORLD_SIZE": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "0",
    }
    for key, value in ranks.items():
        monkeypatch.setenv(key, value)
    clock = iter([0, 7, 14, 21, 28, 28.5, 29, 29.5])  # the first steps compile
    monkeypatch.setattr(time, "perf_counter", lambda: next(clock))
    speed, _ = scaling.train_plainly(config, 8, synced)
    dist.destroy_process_group()
    assert speed == 3 * 16 / 0.5


def test_efficiency_is_speed_per_gpu_over_that_of_one():
    runs = [
        scaling.Run("a", 1, [], "340m", "weak", tokens_per_second=100.0),
        scaling.Run("b", 4, [], "340m", "weak", tokens_per_second=380.0),
        scaling.Run("c", 2, [], "340m", "strong", failure="1"),
    ]
    lines = scaling.table(runs).splitlines()
    assert "| 340m | weak | 4 | 380 | 95.0% | 0.0 |" in lines
    assert any(line.startswith("| 340m | strong | 2 | 1 |") for line in lines)


def test_neither_the_first_steps_nor_the_profiled_one_count(tmp_path):
    (tmp_path / "a").mkdir()
    (tmp_path / "a.log").touch()
    speeds = [5, 9, 9, 9, 100, 110, 120, 3, 50]  # the eighth is read while the ninth step is profiled
    lines = [
        json.dumps({"step": i + 1, "loss": 1.0, "tokens_per_second": speed, "memory_gib": 2.0})
        for i, speed in enumerate(speeds)
    ]
    (tmp_path / "a" / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    (run,) = (r for r in scaling.speed_runs(["340m"], [1, 2], steps=10) if r.name == "340m-weak-2")
    run.name = "a"
    scaling.read(run, tmp_path)
    assert run.tokens_per_second == 110.0
