"""`fla-bench tune` with interpreted kernels: which candidate wins, and the table that calls read."""

import json

import pytest
import torch

from fla_train.bench import kernels
from fla_train.bench import tune as tuning
from fla_train.bench.roofline import Shape
from fla_train.cli import bench
from fla_train.kernels.delta_product import select
from fla_train.kernels.delta_product.select import select_kernel
from fla_train.kernels.delta_product.triton.launch_table import Key, fallback, option_error

pytestmark = [
    pytest.mark.skipif(torch.cuda.is_available(), reason="compiles every candidate there"),
    pytest.mark.usefixtures("launch_cache"),
]

PREPARE = [{"num_warps": 8, "num_stages": 1}, {"num_warps": 4}, {"num_warps": 4, "maxnreg": 128}]


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tune two kernels on short sequences, with three candidates for one of them. Later ones are faster."""
    monkeypatch.setattr(tuning, "KERNELS", ("chunk_prepare_wy", "chunk_bwd_qkg"))
    monkeypatch.setattr(tuning, "CHECKED_TOKENS", 2)
    monkeypatch.setattr(
        tuning, "candidates", lambda kernel, key, now: PREPARE if kernel == "chunk_prepare_wy" else [now]
    )
    monkeypatch.setattr(tuning, "median_ms", lambda run, device: 10.0 - PREPARE.index(present()))


def selected() -> select.Selection:
    return select_kernel("cpu", torch.float16, batch=1, tokens=2, heads=1, key_dim=8, value_dim=8)


def present() -> dict:
    """Return the options of `chunk_prepare_wy` that a call gets now."""
    return selected().chunk_prepare_wy.options


def run_tune() -> tuple[dict, dict]:
    """Return the row of the first kernel, and its options."""
    shape = Shape(1, 2, 1, 8, 8, 1, gated=True)
    (row, best), *_ = tuning.tune(shape, torch.float16, torch.device("cpu"))
    return row, best.chunk_prepare_wy


@pytest.mark.parametrize("where", [pytest.param("timed sizes", marks=pytest.mark.long), "segments"])
def test_the_fastest_that_is_right_everywhere_wins(where, small, monkeypatch) -> None:
    right = kernels.delta_product

    def sometimes_wrong(q, *inputs, backend, **options):
        o, state = right(q, *inputs, backend=backend, **options)
        if backend != "triton" or present() != PREPARE[2]:
            return o, state
        wrong = {"timed sizes": q.shape[2] == 1, "segments": selected().segment_chunks}
        return (o * 1.05 if wrong[where] else o), state

    monkeypatch.setattr(kernels, "delta_product", sometimes_wrong)
    row, options = run_tune()
    assert options == PREPARE[1]
    assert (row["before_ms"], row["tried"], row["failed"]) == (10.0, 3, 1)


def test_nothing_right_is_an_error(small, monkeypatch) -> None:
    monkeypatch.setattr(tuning.Check, "error", lambda *arguments: "wrong")
    with pytest.raises(ValueError, match="no options of chunk_prepare_wy"):
        run_tune()


@pytest.mark.parametrize("value_dim", [64, 192])
def test_candidates_are_safe_and_differ(value_dim) -> None:
    key = Key("9.0", 128, value_dim, 1)
    for kernel in tuning.KERNELS:
        options = tuning.candidates(kernel, key, getattr(fallback(), kernel))
        assert options[0] == getattr(fallback(), kernel) and len(options) >= 6
        assert len({json.dumps(x, sort_keys=True) for x in options}) == len(options)
        assert all(option_error(kernel, x, value_dim) is None for x in options)


def test_the_command_writes_the_table_that_calls_read(small, launch_cache) -> None:
    sizes = ["--batch", "1", "--tokens", "2", "--heads", "1", "--head-dim", "8", "--dtype", "fp16"]
    bench.run(["tune", *sizes, "--num-householder", "1"])
    assert present() == PREPARE[2]
    rows = json.loads((launch_cache / "launches.json").read_text())["rows"]
    assert [row["num_householder"] for row in rows] == [1]
