"""Precompiling: as many processes as the device has memory for; what fails there ends nothing here."""

from concurrent.futures import ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool

import pytest
import torch

from fla_train.bench import precompile
from fla_train.bench.precompile import CONTEXT_BYTES, Precompiler, Trial
from fla_train.bench.roofline import Shape
from fla_train.kernels.delta_product.triton.launch_table import fallback

GIB = 1 << 30


@pytest.mark.parametrize(("free", "processes"), [(9 * GIB, 3), (GIB, 1), (1000 * GIB, 12)])
def test_every_trial_runs_once_and_failures_are_left(free, processes, monkeypatch):
    opened, ran = [], []

    def pool(count):
        opened.append(count)
        return ThreadPoolExecutor(count)

    def once(trial, dtype, device):
        ran.append((trial, dtype, device))
        if trial == "broken":
            raise RuntimeError("an illegal memory access was encountered")

    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free, 80 * GIB))
    monkeypatch.setattr(precompile, "PROCESSES", 12)
    monkeypatch.setattr(precompile, "pool", pool)
    monkeypatch.setattr(precompile, "_once", once)
    device = torch.device("cuda")
    with Precompiler(torch.bfloat16, device, needed=3 * GIB - CONTEXT_BYTES) as precompiler:
        precompiler.run(["first", "broken"])
        assert sorted(trial for trial, *_ in ran) == ["broken", "first"]
        precompiler.run(["last"])
    assert opened == [processes]
    assert ran[-1] == ("last", torch.bfloat16, device)


def test_a_pool_whose_process_died_is_done_without(monkeypatch):
    class Broken(ThreadPoolExecutor):
        def submit(self, *_):
            raise BrokenProcessPool

    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (GIB, 80 * GIB))
    monkeypatch.setattr(precompile, "pool", Broken)
    with Precompiler(torch.bfloat16, torch.device("cuda"), needed=GIB) as precompiler:
        precompiler.run(["first"])
        precompiler.run(["second"])


def test_nothing_is_compiled_for_a_cpu(monkeypatch):
    monkeypatch.setattr(precompile, "pool", lambda count: pytest.fail("no process is needed"))
    with Precompiler(torch.float32, torch.device("cpu"), needed=0) as precompiler:
        precompiler.run([object()])


@pytest.mark.gpu
def test_a_trial_leaves_its_kernels_on_disk(tmp_path, monkeypatch):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    trial = Trial(Shape(2, 128, 2, 64, 64, 1, gated=True), True, fallback())
    with Precompiler(torch.bfloat16, torch.device("cuda"), needed=GIB) as precompiler:
        precompiler.run([trial])
    assert len(list(tmp_path.rglob("*.cubin"))) >= 4  # prepare, state, adjoint, gradient
