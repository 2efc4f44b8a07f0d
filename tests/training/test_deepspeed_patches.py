"""DeepSpeed without each of our patches. If a test fails here, its patch is no longer needed."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch

import pytest
import torch
from deepspeed.accelerator import cuda_accelerator, get_accelerator
from deepspeed.accelerator.cuda_accelerator import CUDA_Accelerator
from torch.utils._python_dispatch import TorchDispatchMode
from warm_ranks import WarmRanks

from fla_train.training.config import TrainConfig
from fla_train.training.deepspeed_patches import ask_cuda_for_free_memory, collect_gradients, wait_on_stream
from fla_train.training.resolve import resolve


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


def test_deepspeed_waits_on_the_stream_and_not_on_the_host_while_gradients_are_reduced():
    accelerator, order = get_accelerator(), []
    stream = SimpleNamespace(wait_stream=order.append)
    zero = SimpleNamespace(overlap_comm=True, reduction_stream="reductions")
    with (
        patch.object(type(accelerator), "synchronize", lambda *_: order.append("host")),
        patch.object(type(accelerator), "current_stream", lambda *_: stream),
    ):
        with pytest.raises(RuntimeError), wait_on_stream(zero):
            accelerator.synchronize()
            raise RuntimeError
        accelerator.synchronize()
        with wait_on_stream(SimpleNamespace(overlap_comm=False)):
            accelerator.synchronize()
    assert order == ["reductions", "host", "host"]


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


def test_its_hooks_reduce_in_fp32_under_autocast_whatever_the_config_says(
    make_config: Callable[..., TrainConfig], warm_ranks: WarmRanks
):
    settings = ["launch.device=cpu", "launch.num_processes=2", "trainer.precision=bf16"]
    config = make_config(*settings, "trainer.gradient_reduction=bf16")
    assert warm_ranks.run(2, dtypes_of_the_hooks, config, False) == [(torch.float32, torch.bfloat16)] * 2
    assert warm_ranks.run(2, dtypes_of_the_hooks, config, True) == [(torch.bfloat16, torch.bfloat16)] * 2


def dtypes_of_the_hooks(config: TrainConfig, patched: bool) -> tuple[torch.dtype, torch.dtype]:
    """Return, on a rank, the dtypes in which hooks and config reduce the first parameter's gradient."""
    from engine_steps import make_model

    from fla_train.training.engine import build_engine

    with pytest.MonkeyPatch.context() as patches:
        if not patched:
            patches.setattr("fla_train.training.deepspeed_patches.reduce_in_bf16", lambda model: None)
        engine = build_engine(make_model(config), resolve(config).config)
    zero = engine.optimizer
    return zero.get_param_comm_dtype(next(engine.module.parameters())), zero.communication_data_type


def test_it_keeps_a_copy_of_weights_that_are_fp32_already(
    make_config: Callable[..., TrainConfig], warm_ranks: WarmRanks
):
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


def test_its_step_copies_all_gradients_into_one_tensor(
    make_config: Callable[..., TrainConfig], warm_ranks: WarmRanks
):
    config = make_config("launch.device=cpu", "trainer.precision=fp32")
    assert warm_ranks.run(1, makes_a_flat_gradient, config, False) == [True]
    assert warm_ranks.run(1, makes_a_flat_gradient, config, True) == [False]


def makes_a_flat_gradient(config: TrainConfig, patched: bool) -> bool:
    """Return, on a rank, whether a second step makes a tensor of the size of a group of parameters."""
    from engine_steps import make_batch, make_model

    from fla_train.training.engine import build_engine, train_step
    from fla_train.training.features.bad_steps import BadSteps
    from fla_train.training.optimizer import build_optimizer

    def plain(model: torch.nn.Module, config: object, **_: bool) -> torch.optim.Optimizer:
        return build_optimizer(model, config)

    with pytest.MonkeyPatch.context() as patches:
        if not patched:
            patches.setattr("fla_train.training.engine.build_optimizer", plain)
        engine = build_engine(make_model(config), resolve(config).config)
    bad_steps = BadSteps(engine.device, max_grad_norm=1.0)
    train_step(engine, [make_batch(0)], 1e-3, bad_steps)
    made = []

    class Sizes(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            result = func(*args, **(kwargs or {}))
            if isinstance(result, torch.Tensor) and not func.is_view:
                made.append(result.numel())
            return result

    with Sizes():
        train_step(engine, [make_batch(1)], 1e-3, bad_steps)
    return engine.optimizer.partition_size[0] in made


def test_each_parameter_gets_a_gradient_of_its_own(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("torch.distributed.get_world_size", lambda: 1)
    parameters = [torch.nn.Parameter(torch.zeros(2, 3)) for _ in range(5)]
    apart, turned, first, second, without = parameters
    apart.grad, turned.grad = torch.randn(2, 3), torch.randn(3, 2).T
    first.grad = second.grad = torch.randn(2, 3)
    zero = SimpleNamespace(bit16_groups=[parameters[:3], parameters[3:]], averaged_gradients={})
    collect_gradients(zero)
    found = [gradient for group in zero.averaged_gradients.values() for gradient in group]
    for parameter, gradient in zip(parameters, found, strict=True):
        expected = torch.zeros(2, 3) if parameter is without else parameter.grad
        assert torch.equal(gradient, expected) and gradient.is_contiguous()
    assert len({gradient.data_ptr() for gradient in found}) == len(found)
