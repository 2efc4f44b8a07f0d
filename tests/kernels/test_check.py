"""`check_backend` passes sound backends and finds broken ones."""

import dataclasses

import pytest
import torch

from fla_train.kernels.delta_product import check_backend, interface, selfcheck
from fla_train.kernels.delta_product.recurrent import recurrent_delta_product
from fla_train.kernels.delta_product.selfcheck import CASES, CheckReport

pytestmark = pytest.mark.usefixtures("poisoned_memory")
FEW = [dataclasses.replace(case, tokens=20) for case in CASES if case.documents is None]


@pytest.mark.parametrize(("backend", "dtype"), [("chunk", torch.bfloat16), ("chunk", torch.float32)])
def test_sound_backends_pass(backend, dtype):
    report = check_backend(backend, "cpu", dtype)
    assert report.ok, report.summary()
    assert {row.case for row in report.rows} == {case.name for case in CASES}
    gradients = {f"d{name}" for name in selfcheck.DIFFERENTIABLE}
    assert {row.tensor for row in report.rows} == {"o", "final_state"} | gradients


def report_on_wrong(monkeypatch: pytest.MonkeyPatch, change) -> CheckReport:
    """The report on a backend that runs the definition with `change` applied to its arguments."""

    def run(**arguments):
        return recurrent_delta_product(**change(arguments))

    monkeypatch.setattr(
        interface, "load_backend", lambda name: run if name == "chunk" else recurrent_delta_product
    )
    return check_backend("chunk", "cpu", torch.bfloat16, cases=FEW, head_dims=(16, 8))


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


def test_what_a_backend_raises_is_reported(monkeypatch):
    def out_of_resources(arguments):
        raise RuntimeError("out of resource: shared memory\nmore")

    report = report_on_wrong(monkeypatch, out_of_resources)
    assert not report.ok
    assert report.summary().endswith("FAILED, beta near 0: RuntimeError: out of resource: shared memory")


@pytest.mark.gpu
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_default_backend_on_a_gpu_passes(dtype, case):
    """Case by case: each compiles its kernels, in float32 for ten seconds and more."""
    report = check_backend("auto", "cuda", dtype, cases=[case])
    assert report.backend == "triton" and report.ok, report.summary()
