"""DeepSpeed without each of our patches. If a test fails here, its patch is no longer needed."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from deepspeed.accelerator import cuda_accelerator
from deepspeed.accelerator.cuda_accelerator import CUDA_Accelerator
from warm_ranks import WarmRanks

from fla_train.run.resolve import resolve
from fla_train.training.config import TrainConfig
from fla_train.training.deepspeed_patches import ask_cuda_for_free_memory


def unpatched(code: str, tmp_path: Path) -> str:
    """Return what `code` prints in a separate process without patches."""
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout.splitlines()[-1]


def test_import_of_deepspeed_compiles_and_offers_the_shared_memory_operator(tmp_path: Path):
    code = """
import deepspeed.ops
from deepspeed.runtime import compiler
calls = []
compiler.compile = lambda: lambda function: calls.append(function) or function
import deepspeed.runtime.zero.muon.original_muon
print(len(calls) > 0, deepspeed.ops.__compatible_ops__.get("deepspeed_shm_comm"))
"""
    assert unpatched(code, tmp_path) == "True True"


def test_gpus_may_be_named_by_uuid(monkeypatch: pytest.MonkeyPatch):
    accelerator = CUDA_Accelerator()
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-ffbb84ad-35a2-4822-b8c3-8758fbd9f6ed")
    monkeypatch.setattr(cuda_accelerator, "pynvml", SimpleNamespace(nvmlDeviceGetHandleByIndex=int))
    monkeypatch.setattr("deepspeed.accelerator.get_accelerator", lambda: accelerator)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda index: (7 + (index or 0), 99))
    with pytest.raises(ValueError, match="invalid literal for int"):
        accelerator.available_memory(0)
    ask_cuda_for_free_memory()
    assert (accelerator.available_memory(), accelerator.available_memory(1)) == (7, 8)


def test_it_hooks_every_gradient(make_config: Callable[..., TrainConfig], warm_ranks: WarmRanks):
    config = make_config("launch.device=cpu", "trainer.precision=fp32")
    (counts,) = warm_ranks.run(1, hooks_and_parameters, config)
    assert counts[0] >= counts[1] > 0


def hooks_and_parameters(config: TrainConfig) -> tuple[int, int]:
    """Return, on a rank, hooks that DeepSpeed has put on gradients (ours removed them), and parameters."""
    from engine_steps import make_model

    from fla_train.training.engine import build_engine

    engine = build_engine(make_model(config), resolve(config).config)
    return len(engine.optimizer._grad_acc_hooks), sum(1 for _ in engine.module.parameters())


def test_it_keeps_a_copy_of_weights_that_are_fp32_already(make_config, warm_ranks):
    config = make_config("launch.device=cpu", "launch.num_processes=2", "trainer.precision=bf16")
    assert warm_ranks.run(2, masters_are_weights, config, False) == [False, False]
    assert warm_ranks.run(2, masters_are_weights, config, True) == [True, True]


def masters_are_weights(config: TrainConfig, patched: bool) -> bool:
    """Return, on a rank, whether masters and linked fragments share the weights' memory."""
    from engine_steps import make_model

    from fla_train.training.engine import build_engine

    with pytest.MonkeyPatch.context() as patches:
        if not patched:
            patches.setattr("fla_train.training.deepspeed_patches.share_masters", lambda zero: None)
        engine = build_engine(make_model(config), resolve(config).config)
    parameters = list(engine.module.parameters())
    linked = [p._hp_mapping.hp_fragment for p in parameters if p._hp_mapping is not None]
    masters = [*engine.optimizer.single_partition_of_fp32_groups, *linked]
    storages = {p.untyped_storage().data_ptr() for p in parameters}
    shared = {master.untyped_storage().data_ptr() in storages for master in masters}
    assert len(shared) == 1
    return shared.pop()
