"""Cases of the fused ops: least traffic against bytes counted by hand, and runs of every definition."""

import pytest
import torch

from fla_train.bench.fused_ops import FUNCTIONS, make_cases, ours
from fla_train.bench.measure import compare
from fla_train.bench.report import Report
from fla_train.bench.roofline import Ceilings

CPU = torch.device("cpu")
ROWS = 2 * 24
SIZES = {
    "batch": 2,
    "tokens": 24,
    "hidden": 32,
    "head_dim": 16,
    "intermediate": 40,
    "vocabulary": 50,
    "num_householder": 2,
}


def test_products_bound_where_they_take_longer_than_bytes() -> None:
    (case,) = make_cases(["cross-entropy"], SIZES, torch.float32, CPU)
    assert case.bounds(Ceilings(1.0, 1e30)) == pytest.approx((2 * ROWS * 32 * 50, 6 * ROWS * 32 * 50))
    forward, both = case.bounds(Ceilings(1e30, 1.0))
    weight, hidden = 4 * 50 * 32, 4 * ROWS * 32
    assert forward == weight + hidden + 8 * ROWS + 4  # 8-byte targets, 4-byte loss
    assert both == forward + weight + hidden + 4


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_the_definitions_are_within_bounds(dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fla_train.bench.measure.CPU_SECONDS", 1e-3)
    report = Report({"dtype": dtype})
    report.device, seen = CPU, set()
    for case in make_cases(FUNCTIONS, SIZES, report.dtype, CPU):
        (row,) = compare(case, ours(CPU), report)
        assert "note" not in row, row
        assert row["forward_ms"] > 0 and row["both_ms"] > 0
        assert row["errors"].keys() == {*case.output_gradients, *(f"d{name}" for name in case.leaves)}
        seen.add(case.function)
    assert seen == set(FUNCTIONS)
