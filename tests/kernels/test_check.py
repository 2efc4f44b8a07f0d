"""`check_backend` passes sound backends and finds broken ones."""

import dataclasses

import pytest
import torch

from fla_train.kernels.delta_product import check_backend, interface, selfcheck
from fla_train.kernels.delta_product.hopper import bwd_fused
from fla_train.kernels.delta_product.recurrent import recurrent_delta_product
from fla_train.kernels.delta_product.select import override, select_kernel
from fla_train.kernels.delta_product.selfcheck import (
    BATCH,
    CASES,
    HEADS,
    CheckReport,
    Row,
    model_cases,
    relative_rms,
)
from fla_train.kernels.delta_product.triton.launch_table import fallback
from fla_train.kernels.delta_product.triton.sequence_split import Segments

pytestmark = pytest.mark.usefixtures("poisoned_memory")
FEW = [dataclasses.replace(case, tokens=20) for case in CASES if case.documents is None]


@pytest.mark.parametrize(
    ("backend", "dtype"), [("recurrent", torch.bfloat16), ("chunk", torch.bfloat16), ("chunk", torch.float32)]
)
def test_sound_backends_pass(backend, dtype):
    report = check_backend(backend, "cpu", dtype)
    assert report.ok, report.summary()
    assert {row.case for row in report.rows} == {case.name for case in CASES}
    assert {row.tensor for row in report.rows} == {
        "o", "final_state", "dq", "dk", "dv", "dbeta", "dg", "dinitial_state"
    }  # fmt: skip
    assert report.summary().startswith(
        f"{backend} on cpu in {str(dtype)[6:]}: ok, {len(report.rows)} comparisons"
    )


def report_on_wrong(monkeypatch: pytest.MonkeyPatch, change) -> CheckReport:
    """The report on a backend that runs the definition with `change` applied to its arguments."""

    def run(**arguments):
        return recurrent_delta_product(**change(arguments))

    monkeypatch.setattr(
        interface, "load_backend", lambda name: run if name == "chunk" else recurrent_delta_product
    )
    return check_backend("chunk", "cpu", torch.bfloat16, cases=FEW, head_dims=(16, 8))


def test_a_wrong_output_is_found(monkeypatch):
    report = report_on_wrong(monkeypatch, lambda a: a | {"v": a["v"] * 1.02})
    assert not report.ok
    assert "FAILED" in report.summary()
    assert {"o", "dv"} <= {row.tensor for row in report.rows if not row.ok}


@pytest.mark.parametrize("name", ["q", "k", "v", "beta", "g", "initial_state"])
def test_one_wrong_gradient_is_found(monkeypatch, name):
    def scale_gradient(arguments):
        x = arguments[name]
        if x is None:
            return arguments
        doubled = x.detach() + 1.06 * (x.nan_to_num(neginf=0.0) - x.nan_to_num(neginf=0.0).detach())
        return arguments | {name: doubled.to(x.dtype)}

    report = report_on_wrong(monkeypatch, scale_gradient)
    assert {row.tensor for row in report.rows if not row.ok} == {f"d{name}"}


def test_one_wrong_copy_of_many_is_found(monkeypatch):
    def last_sequence(arguments):
        v = arguments["v"]
        return arguments | {"v": torch.cat([v[:-1], 1.05 * v[-1:]])}

    monkeypatch.setattr(selfcheck, "num_copies", lambda *_: 5)
    assert report_on_wrong(monkeypatch, lambda a: a).ok
    report = report_on_wrong(monkeypatch, last_sequence)
    wrong = {(row.case, row.tensor) for row in report.rows if not row.ok}
    assert wrong >= {(case.name, tensor) for case in FEW for tensor in ("o", "dv")}


def test_nan_is_found(monkeypatch):
    report = report_on_wrong(monkeypatch, lambda a: a | {"scale": float("nan")})
    assert not report.ok and "worst o nan" in report.summary()


def test_what_a_backend_raises_is_reported(monkeypatch):
    def out_of_resources(arguments):
        raise RuntimeError("out of resource: shared memory\nmore")

    report = report_on_wrong(monkeypatch, out_of_resources)
    assert not report.ok
    assert report.summary().endswith("FAILED, beta near 0: RuntimeError: out of resource: shared memory")


def test_an_impossible_request_is_the_callers_error():
    with pytest.raises(ValueError, match="unknown"):
        check_backend("fast")


def test_a_row_at_its_tolerance_passes_and_nan_does_not():
    assert Row("case", "o", 1e-3, 1e-3).ok
    assert not Row("case", "o", 1.1e-3, 1e-3).ok
    assert not Row("case", "o", float("nan"), 1e-3).ok


def test_relative_rms():
    x = torch.tensor([3.0, 4.0])
    assert relative_rms(x * 1.1, x) == pytest.approx(0.1, rel=1e-5)
    assert relative_rms(x * torch.nan, x) != relative_rms(x, x) == 0.0


@pytest.mark.skipif(torch.cuda.is_available(), reason="the test below covers it")
@pytest.mark.usefixtures("by_chunks")
def test_the_split_case_is_split(monkeypatch):
    counts, combine = [], Segments._combine

    def spy(segments, *arguments, **kwargs):
        counts.append(segments.count)
        return combine(segments, *arguments, **kwargs)

    monkeypatch.setattr(Segments, "_combine", spy)
    case = next(case for case in CASES if case.segment_chunks)
    report = check_backend("triton", "cpu", torch.float32, cases=[case], head_dims=(16, 16))
    assert report.ok, report.summary()
    assert counts == [8, 8]  # forward and backward of two sequences of seven chunks
    assert case not in model_cases(case.num_householder, gated=True)


@pytest.mark.parametrize("processors", [78, 114, 132])
def test_busy_cases_keep_any_hopper_busy_and_others_do_not(pretend_hopper, processors):
    pretend_hopper(processors)
    for case in CASES:
        copies = selfcheck.num_copies(case, "triton", torch.device("cuda"))
        sizes = {"batch": copies * BATCH, "tokens": 64, "heads": HEADS, "key_dim": 128, "value_dim": 128}
        assert select_kernel("cpu", torch.bfloat16, **sizes).fused_backward is case.busy


@pytest.mark.parametrize("gated", [True, False])
def test_every_model_is_checked_on_a_busy_device(gated):
    assert sum(case.busy for case in model_cases(2, gated)) == 1
    assert all(case.head_dims is None for case in model_cases(2, gated))


@pytest.mark.parametrize("gated", [True, False])
def test_models_are_checked_with_the_kernels_of_training_where_no_states_go_in_or_out(gated):
    report = check_backend("chunk", cases=model_cases(1, gated), head_dims=(8, 8))
    assert report.ok, report.summary()
    tensors = {"o", "dq", "dk", "dv", "dbeta"} | ({"dg"} if gated else set())
    assert {row.tensor for row in report.rows} == tensors


@pytest.mark.skipif(torch.cuda.is_available(), reason="a test of test_gluon.py runs the kernel")
@pytest.mark.usefixtures("by_chunks")
@pytest.mark.parametrize("busy", [True, False])
def test_busy_cases_reach_the_fused_backward(monkeypatch, pretend_hopper, busy):
    def launch(programs, **arguments):
        raise RuntimeError(f"launched with {programs} programs")

    pretend_hopper(8)
    copies, plain = selfcheck.num_copies, fallback()
    monkeypatch.setattr(
        selfcheck, "num_copies", lambda case, name, _: copies(case, name, torch.device("cuda"))
    )
    monkeypatch.setattr(bwd_fused, "launch", launch)
    options = dataclasses.replace(plain, chunk_bwd_state=plain.chunk_bwd_state | {"gluon": 1})
    for case in (case for case in CASES if case.busy):
        small = dataclasses.replace(case, tokens=3, head_dims=(64, 64), busy=busy)
        with override(options=options):
            report = check_backend("triton", "cpu", torch.float16, cases=[small])
        expected = f"{case.name}: RuntimeError: launched with 24 programs"
        assert report.failure == (expected if busy else None)
        assert report.ok is not busy


@pytest.mark.gpu
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_default_backend_on_a_gpu_passes(dtype, case):
    """Case by case: each compiles its kernels, in float32 for ten seconds and more."""
    report = check_backend("auto", "cuda", dtype, cases=[case])
    assert report.backend == "triton" and report.ok, report.summary()
