"""Gradients added up over ranks in bf16: the error of each weight's gradient.

U = 2^-8 bounds the relative error of one rounding to bf16 (8 bits of precision, to nearest). Each of two
ranks rounds its gradient, and the sum is rounded again.
"""

from collections.abc import Callable
from dataclasses import replace

import engine_steps
import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from warm_ranks import WarmRanks

from fla_train.bench.ranks import on_ranks
from fla_train.data.sampler import BatchSampler
from fla_train.run.resolve import resolve
from fla_train.training.config import TrainConfig
from fla_train.training.engine import build_engine, train_step
from fla_train.training.features.bad_steps import BadSteps

Make = Callable[..., TrainConfig]
U = 2.0**-8
EPS = 1e6  # of AdamW, far above any gradient: the first step subtracts learning rate / EPS x the gradient
FP32 = 2e-6  # error of the gradients of a pass in fp32 and of the step that shows them, of the largest one


@pytest.fixture(scope="module")
def config(make_config: Make) -> TrainConfig:
    return make_config(
        *("launch.device=cpu", "trainer.precision=fp32", "launch.num_processes=2"),
        *(f"optimizer.eps={EPS}", "optimizer.weight_decay=0", "optimizer.max_grad_norm=0"),
    )


def with_reduction(config: TrainConfig, dtype: str, **trainer: object) -> TrainConfig:
    return replace(config, trainer=replace(config.trainer, gradient_reduction=dtype, **trainer))


def step_of(config: TrainConfig) -> list[Tensor]:
    """Return, on each rank, the gradient of every parameter, as the weights show it after one step."""
    engine = build_engine(engine_steps.make_model(config), resolve(config).config)
    before = [p.detach().cpu().clone() for p in engine.module.parameters()]
    plan = BatchSampler(
        engine_steps.GLOBAL_BATCH, config.trainer.micro_batch_size, dist.get_rank(), dist.get_world_size()
    )
    ids, labels = (part.to(engine.device) for part in engine_steps.make_batch(0))
    pairs = [(ids[rows], labels[rows]) for rows in plan.indices(0)]
    train_step(engine, pairs, EPS, BadSteps(engine.device, max_grad_norm=0.0)).read()
    return [old - p.detach().cpu() for old, p in zip(before, engine.module.parameters(), strict=True)]


def parts_of_the_gradient(config: TrainConfig, ranks: int) -> list[list[list[Tensor]]]:
    """Return, by plain PyTorch, each parameter's gradient for each rank and micro-batch."""
    ids, labels = engine_steps.make_batch(0)
    targets = (labels[:, 1:] != -100).sum()
    model = engine_steps.make_model(config)
    parts = []
    for rank in range(ranks):
        plan = BatchSampler(engine_steps.GLOBAL_BATCH, config.trainer.micro_batch_size, rank, ranks)
        passes = []
        for rows in plan.indices(0):
            logits = model(input_ids=ids[rows]).logits[:, :-1].flatten(0, 1)
            summed = torch.nn.functional.cross_entropy(logits, labels[rows, 1:].flatten(), reduction="sum")
            passes.append(list(torch.autograd.grad(summed / targets, list(model.parameters()))))
        parts.append(passes)
    return parts


def flat(tensors: list[Tensor]) -> Tensor:
    return torch.cat([tensor.flatten() for tensor in tensors]).double()


def test_gradients_are_those_of_plain_pytorch_but_for_their_rounding(config, warm_ranks):
    config = with_reduction(config, "fp32", micro_batch_size=1)
    parts = [[flat(gradients) for gradients in passes] for passes in parts_of_the_gradient(config, 2)]
    ranks = [sum(passes) for passes in parts]
    exact = sum(ranks)
    rounded = [*ranks, exact]  # a rank's micro-batches are rounded together
    in_fp32 = FP32 * exact.abs().max()
    for dtype, bound in {"fp32": in_fp32, "bf16": in_fp32 + U * sum(x.abs() for x in rounded)}.items():
        found = [flat(part) for part in warm_ranks.run(2, step_of, with_reduction(config, dtype))]
        assert torch.equal(found[0], found[1])
        error = found[0] - exact
        assert bool((error.abs() <= bound).all()), dtype
    expected = sum((x.bfloat16() - x).square().sum() for x in rounded) ** 0.5
    assert error.norm().item() == pytest.approx(expected.item(), rel=0.1)


def test_it_holds_under_autocast(config: TrainConfig, warm_ranks: WarmRanks):
    full, half = (
        flat(warm_ranks.run(2, step_of, with_reduction(config, dtype, precision="bf16"))[0])
        for dtype in ("fp32", "bf16")
    )
    assert 1e-3 < (half - full).norm() / full.norm() < 4e-3


@pytest.mark.gpu
def test_it_holds_on_two_gpus(config: TrainConfig):
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    config = replace(config, launch=replace(config.launch, device="cuda"))
    full, half = (
        flat(on_ranks(2, step_of, with_reduction(config, dtype, precision="bf16")))
        for dtype in ("fp32", "bf16")
    )
    assert 1e-3 < (half - full).norm() / full.norm() < 4e-3
