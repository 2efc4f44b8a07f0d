"""`fla-bench tune`, its kernels interpreted: what it tries, what it refuses, and the table that it leaves."""

import json
from dataclasses import replace

import pytest
import torch

from fla_train.bench import implementations
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

CPU = torch.device("cpu")
PREPARE = [{"num_warps": 8, "num_stages": 1}, {"num_warps": 4}, {"num_warps": 4, "maxnreg": 128}]


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two kernels, three candidates for one of them, the present options for the other, short sequences."""
    monkeypatch.setattr(tuning, "KERNELS", ("chunk_prepare_wy", "chunk_bwd_qkg"))
    monkeypatch.setattr(tuning, "JUDGED_TOKENS", 2)
    monkeypatch.setattr(
        tuning, "candidates", lambda kernel, key, now: PREPARE if kernel == "chunk_prepare_wy" else [now]
    )


def selected() -> select.Selection:
    return select_kernel("cpu", torch.float16, batch=1, tokens=2, heads=1, key_dim=8, value_dim=8)


def present() -> dict:
    """The options of `chunk_prepare_wy` that a call takes now."""
    return selected().chunk_prepare_wy.options


def clock(run: object) -> float:
    """Candidates are the faster the later they stand in the list."""
    return 10.0 - PREPARE.index(present())


def run_tune(timer: object) -> list:
    shape = Shape(1, 2, 1, 8, 8, 1, gated=True)
    return list(tuning.tune(shape, torch.float16, CPU, timer))


@pytest.mark.parametrize(
    ("dims", "kernels"),
    [
        ((128, 128), {"chunk_prepare_wy", "chunk_bwd_state", "chunk_bwd_qkg"}),
        ((64, 128), {"chunk_prepare_wy", "chunk_bwd_state"}),
        ((256, 256), {"chunk_bwd_qkg"}),
        ((256, 128), set()),
    ],
)
def test_kernels_in_gluon_are_tried_where_they_fit(dims, kernels):
    key, known = Key("9.0", *dims, 1), fallback(dims[0])
    found = {
        kernel: any("gluon" in options for options in tuning.candidates(kernel, key, getattr(known, kernel)))
        for kernel in tuning.KERNELS
    }
    assert {kernel for kernel, tried in found.items() if tried} == kernels


def test_the_fastest_is_taken(small):
    outcomes = run_tune(clock)
    assert [outcome.kernel for outcome, _ in outcomes] == list(tuning.KERNELS)
    first, _ = outcomes[0]
    assert (first.options, first.milliseconds, first.before, first.tried) == (PREPARE[2], 8.0, 10.0, 3)
    assert outcomes[-1][1].chunk_prepare_wy == PREPARE[2]
    assert first.markdown().count("|") == tuning.HEADER[0].count("|")


def test_a_fast_one_that_is_wrong_and_one_that_cannot_run_are_refused(small, monkeypatch):
    sound = implementations.delta_product

    def unsound(*inputs, backend, **options):
        o, state = sound(*inputs, backend=backend, **options)
        return (o * 1.05 if backend == "triton" and present() == PREPARE[2] else o), state

    def timer(run):
        if present() == PREPARE[1]:
            raise RuntimeError("out of resource: shared memory\nmore")
        return clock(run)

    monkeypatch.setattr(implementations, "delta_product", unsound)
    outcome, best = run_tune(timer)[0]
    assert best.chunk_prepare_wy == PREPARE[0]
    assert "RuntimeError: out of resource: shared memory" in outcome.refused[0]
    assert "o is off by" in outcome.refused[1]


def test_one_that_is_wrong_on_the_timed_sizes_only_is_refused(small, monkeypatch):
    sound = implementations.delta_product

    def unsound(q, *inputs, backend, **options):
        o, state = sound(q, *inputs, backend=backend, **options)
        return (o * 1.05 if q.shape[2] == 1 and present() == PREPARE[2] else o), state

    monkeypatch.setattr(implementations, "delta_product", unsound)
    outcome, best = run_tune(clock)[0]
    assert best.chunk_prepare_wy == PREPARE[1]
    assert "o is off by" in outcome.refused[0]


def test_one_that_is_wrong_in_segments_only_is_refused(small, monkeypatch):
    sound = implementations.delta_product

    def unsound(*inputs, backend, **options):
        o, state = sound(*inputs, backend=backend, **options)
        return (o * 1.05 if selected().segment_chunks and present() == PREPARE[2] else o), state

    monkeypatch.setattr(implementations, "delta_product", unsound)
    outcome, best = run_tune(clock)[0]
    assert best.chunk_prepare_wy == PREPARE[1]
    assert "o is off by" in outcome.refused[0] and "in segments" in outcome.refused[0]


def test_a_fused_backward_is_judged_where_both_kernels_run_and_these_are_timed(small, monkeypatch):
    known = fallback()
    fused = replace(known, chunk_bwd_state=known.chunk_bwd_state | {"gluon": 1})
    monkeypatch.setattr(tuning, "lookup", lambda *_: (fused, ""))
    timed, judged, sound = [], [], tuning.forward_backward

    def asks_for_fused() -> bool:
        return "gluon" in select._override.options.chunk_bwd_state

    def timer(run):
        timed.append((asks_for_fused(), present()))
        return 1.0

    def watched(run, problem):
        if select._override.options:  # else the recurrence runs
            judged.append(asks_for_fused())
        return sound(run, problem)

    monkeypatch.setattr(tuning, "forward_backward", watched)
    *_, (outcome, best) = run_tune(timer)
    assert timed == [(True, options) for options in PREPARE] + [(False, PREPARE[0])]
    assert not judged[0], "what the fused backward is compared with"
    assert outcome.kernel == "chunk_bwd_qkg" and best.chunk_bwd_state == fused.chunk_bwd_state


def test_nothing_right_is_an_error(small, monkeypatch):
    monkeypatch.setattr(tuning.Judge, "error", lambda *arguments: "wrong")
    with pytest.raises(
        ValueError, match="no options of chunk_prepare_wy are right on this machine: see fla-doctor"
    ):
        run_tune(clock)


@pytest.mark.parametrize("value_dim", [64, 128, 192])
def test_candidates_are_safe_and_differ(value_dim):
    key = Key("9.0", 128, value_dim, 1)
    for kernel in tuning.KERNELS:
        found = tuning.candidates(kernel, key, getattr(fallback(), kernel))
        assert found[0] == getattr(fallback(), kernel) and len(found) >= 6
        assert len({json.dumps(options, sort_keys=True) for options in found}) == len(found)
        assert all(option_error(kernel, options, value_dim) is None for options in found)
        assert all(options.get("BV", 64) <= value_dim for options in found)


def test_the_command_writes_the_table_that_calls_read(small, launch_cache, monkeypatch, capsys):
    monkeypatch.setattr(tuning, "median_times", lambda runs, device, rounds: {"run": clock(runs["run"])})
    sizes = ["--batch", "1", "--tokens", "2", "--heads", "1", "--head-dim", "8", "--dtype", "fp16"]
    bench.run(["tune", *sizes, "--num-householder", "1"])
    out = capsys.readouterr().out
    assert str(launch_cache / "launches.json") in out
    assert [line.split("|")[4].strip() for line in out.splitlines() if line.startswith("| 64")] == list(
        tuning.KERNELS
    )
    assert present() == PREPARE[2]
    before = (launch_cache / "launches.json").read_text()
    bench.run(["tune", *sizes, "--num-householder", "2", "--file", str(launch_cache / "other.json")])
    assert (launch_cache / "launches.json").read_text() == before
    rows = json.loads((launch_cache / "other.json").read_text())["rows"]
    assert [row["num_householder"] for row in rows] == [2]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--tokens", "0"], "--tokens: must be at least 1"),
        (["--head-dim", "512", "--tokens", "2", "--batch", "1"], "key dimension of at most 256"),
    ],
)
def test_a_wrong_request_is_one_line(arguments, message, monkeypatch, capsys):
    monkeypatch.setattr(tuning, "JUDGED_TOKENS", 2)
    monkeypatch.setattr("sys.argv", ["fla-bench", "tune", *arguments])
    with pytest.raises(SystemExit) as stop:
        bench.main()
    assert stop.value.code == 2
    assert message in capsys.readouterr().err


def test_a_broken_table_is_one_line(launch_cache, monkeypatch, capsys):
    (launch_cache / "launches.json").write_text("{")
    monkeypatch.setattr("sys.argv", ["fla-bench", "tune"])
    with pytest.raises(SystemExit) as stop:
        bench.main()
    assert stop.value.code == 2
    assert "is no table of launch options" in capsys.readouterr().err
