"""`fla-doctor`: the verdict follows the checks, and checks in several processes are the same checks."""

from functools import partial
from importlib.metadata import version

import pytest
import torch

from fla_train.bench import backend_checks
from fla_train.kernels.delta_product import interface
from fla_train.kernels.delta_product.recurrent import recurrent_delta_product
from fla_train.kernels.delta_product.selfcheck import CASES


def test_a_wrong_backend_is_named_and_fails(run_command, monkeypatch):
    def wrong(**arguments):
        return recurrent_delta_product(**arguments | {"scale": 1.1 * arguments["scale"]})

    backends = {"chunk": wrong, "recurrent": recurrent_delta_product}
    few = partial(backend_checks.check_backend, cases=CASES[:2], head_dims=(16, 16))
    monkeypatch.setattr(backend_checks, "check_backend", few)
    monkeypatch.setattr(interface, "load_backend", backends.__getitem__)
    monkeypatch.setattr(backend_checks, "checks", lambda: [(name, "cpu", torch.float32) for name in backends])
    code, out, _ = run_command("fla-doctor")
    assert code == 1 and "NOT READY" in out and "chunk on cpu is wrong" in out
    monkeypatch.setattr(backend_checks, "checks", lambda: [("recurrent", "cpu", torch.float32)])
    code, out, _ = run_command("fla-doctor", "--verbose")
    assert code == 0 and "READY: 1 checks passed" in out and f"torch {version('torch')}" in out
    assert all(case.name in out for case in CASES[:2])


def test_the_kernels_of_a_shape_are_explained(run_command, monkeypatch):
    monkeypatch.setattr(backend_checks, "run_checks", lambda *arguments, **options: [])
    shape = ["2", "16384", "4", "64", "64", "3"]
    _, out, _ = run_command("fla-doctor", "--shape", *shape)
    assert "tokens 16384, heads 4" in out
    for decision in ("algorithm: chunk, because", "sequences: ", "backward: ", "chunk_prepare_wy: "):
        assert decision in out
    _, out, _ = run_command("fla-doctor")
    assert ("tokens 2048, heads 8" in out) == torch.cuda.is_available()
    code, _, err = run_command("fla-doctor", "--shape", "1", "8", "1", "64", "64", "65")
    assert code == 2 and "Householder" in err


@pytest.mark.slow
def test_triton_cases_run_in_processes(monkeypatch):
    """Triton's interpreter replaces a GPU."""
    monkeypatch.setattr(backend_checks, "CASES", CASES[:1])
    (report,) = backend_checks.run_checks([("triton", "cpu", torch.float32)])
    assert report.backend == "triton" and report.ok, report.summary()
    assert {row.case for row in report.rows} == {CASES[0].name}
