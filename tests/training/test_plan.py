"""Compare the plan's estimate of memory with measurements on an H100, from reports of `fla-bench train`."""

import json
from pathlib import Path

import pytest

import fla_train
from fla_train.run.resolve import resolve

REPORTS = Path(__file__).parents[2] / "docs" / "reports" / "benchmarks"
MODELS = ("delta-net-340m", "gated-delta-product-340m", "gated-delta-product-1.3b")
MORE = ("selective", "selective-16", "recomputed", "fp8", "fp8-selective")


@pytest.mark.parametrize("name", [*MODELS, *(f"gated-delta-product-1.3b-{more}" for more in MORE)])
def test_memory_is_that_of_a_gpu(name: str) -> None:
    report = json.loads((REPORTS / f"train-{name}.json").read_text())
    (row,) = report["rows"]
    machine = ["launch.device=cuda", "launch.num_processes=1", "dry_run=true"]
    precision = [] if "fp8" in name else ["trainer.precision=bf16"]  # auto is fp32 on this test's machine
    config = fla_train.compose(*report["settings"]["overrides"], *machine, *precision)
    assert resolve(config).memory_bytes == pytest.approx(row["memory_bytes"], rel=0.025)
