"""`check_backend` passes sound backends and finds broken ones."""

import dataclasses

import pytest
import torch

from fla_train.kernels.delta_product import check_backend, contract
from fla_train.kernels.delta_product.check import CASES, CheckReport, Row, model_cases, relative_rms
from fla_train.kernels.delta_product.recurrent import recurrent_delta_product
from fla_train.kernels.delta_product.triton_split import Pieces

FEW = [dataclasses.replace(case, tokens=20) for case in CASES if case.documents is None]


@pytest.mark.parametrize(
    ("backend", "dtype"),
    [("recurrent", torch.bfloat16), ("chunked", torch.bfloat16), ("chunked", torch.float32)],
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


def faulty(monkeypatch: pytest.MonkeyPatch, change) -> CheckReport:
    """The report on a backend that runs the definition with `change` applied to its arguments."""

    def run(**arguments):
        return recurrent_delta_product(**change(arguments))

    monkeypatch.setattr(
        contract, "load_backend", lambda name: run if name == "chunked" else recurrent_delta_product
    )
    return check_backend("chunked", "cpu", torch.bfloat16, cases=FEW, head_dims=(16, 8))


def test_a_wrong_output_is_found(monkeypatch):
    report = faulty(monkeypatch, lambda a: a | {"v": a["v"] * 1.02})
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

    report = faulty(monkeypatch, scale_gradient)
    assert {row.tensor for row in report.rows if not row.ok} == {f"d{name}"}


def test_nan_is_found(monkeypatch):
    report = faulty(monkeypatch, lambda a: a | {"scale": float("nan")})
    assert not report.ok and "worst o nan" in report.summary()


def test_what_a_backend_raises_is_reported(monkeypatch):
    def out_of_resources(arguments):
        raise RuntimeError("out of resource: shared memory\nmore")

    report = faulty(monkeypatch, out_of_resources)
    assert not report.ok
    assert report.summary().endswith("FAILED, beta near 0: RuntimeError: out of resource: shared memory")


def test_an_impossible_request_is_the_callers_fault():
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
def test_the_cut_case_is_cut(monkeypatch):
    counts, combine = [], Pieces._combine

    def spy(pieces, *arguments, **kwargs):
        counts.append(pieces.count)
        return combine(pieces, *arguments, **kwargs)

    monkeypatch.setattr(Pieces, "_combine", spy)
    case = next(case for case in CASES if case.piece_chunks)
    report = check_backend("triton", "cpu", torch.float32, cases=[case], head_dims=(16, 16))
    assert report.ok, report.summary()
    assert counts == [8, 8]  # forward and backward of two sequences of seven chunks
    assert case not in model_cases(case.substeps, gated=True)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_default_backend_on_a_gpu_passes(dtype):
    report = check_backend("auto", "cuda", dtype)
    assert report.backend == "triton" and report.ok, report.summary()
