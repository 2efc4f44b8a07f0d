"""Optimizer steps of a real engine, for test_engine.py and test_muon.py.

`run_layouts` trains the same model from the same start with several numbers of ranks and micro-batches, on
the same masked global batches; `reference` runs the steps without DeepSpeed.
"""

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from deepspeed import DeepSpeedEngine
from warm_ranks import WarmRanks

from fla_train.data.sampler import Batch, BatchSampler
from fla_train.models.configuration import DeltaProductConfig
from fla_train.models.modeling import DeltaProductForCausalLM
from fla_train.run.resolve import resolve
from fla_train.training.callback import Callback
from fla_train.training.checks import features_of
from fla_train.training.config import TrainConfig
from fla_train.training.engine import StepResult, build_engine, precompile_step, train_step
from fla_train.training.features.bad_steps import BadSteps
from fla_train.training.features.evaluation import evaluate

GLOBAL_BATCH, SEQ_LEN, STEPS = 8, 32, 4
LEARNING_RATE = 1e-2


def make_model(config: TrainConfig) -> DeltaProductForCausalLM:
    torch.manual_seed(1)
    return DeltaProductForCausalLM(DeltaProductConfig.from_node(config.model)).float()


def attached_features(engine: DeepSpeedEngine, config: TrainConfig) -> list[Callback]:
    features = features_of(config)
    for feature in features:
        feature.attach(SimpleNamespace(model=engine.module))
    return features


def make_batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """ids and labels [GLOBAL_BATCH, SEQ_LEN]; sequence i keeps about i / GLOBAL_BATCH of its targets."""
    generator = torch.Generator().manual_seed(step)
    ids = torch.randint(0, 320, (GLOBAL_BATCH, SEQ_LEN), generator=generator)
    share = torch.arange(GLOBAL_BATCH)[:, None] / GLOBAL_BATCH
    dropped = torch.rand(ids.shape, generator=generator) > share
    return ids, ids.masked_fill(dropped, -100)


def run_layouts(ranks: WarmRanks, config: TrainConfig, layouts: Sequence[tuple[int, int]]) -> dict[str, dict]:
    """Return the results of rank 0 for each (ranks, micro-batch size), under `R rank(s) x ACCUMULATION`."""
    results = {}
    for world, micro_batch in layouts:
        trainer = replace(config.trainer, micro_batch_size=micro_batch)
        config = replace(config, trainer=trainer, launch=replace(config.launch, num_processes=world))
        content = ranks.run(world, run, config)[0]
        results[f"{world} rank(s) x {content['accumulation']}"] = content
    return results


def reference(
    model: torch.nn.Module, optimizers: Sequence[torch.optim.Optimizer], max_grad_norm: float
) -> dict:
    """Take these steps with plain PyTorch: one loss over the whole batch, clipping, the optimizers."""
    losses, norms, weights = [], [], []
    for step in range(STEPS):
        ids, labels = make_batch(step)
        logits = model(input_ids=ids).logits[:, :-1]
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten())
        loss.backward()
        norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), max_grad_norm).item())
        for optimizer in optimizers:
            optimizer.step()
        model.zero_grad()
        losses.append(loss.item())
        weights.append(checksum(model))
    ids, labels = make_batch(99)
    logits = model(input_ids=ids).logits[:, :-1]
    held_out = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten()).item()
    return {"losses": losses, "grad_norms": norms, "weights": weights, "eval": held_out}


def checksum(model: torch.nn.Module) -> list[float]:
    return [p.detach().double().sum().item() for p in model.parameters()]


@contextlib.contextmanager
def poisoned(engine: DeepSpeedEngine) -> Iterator[None]:
    """Inside, the loss is NaN on the last rank."""

    def poison(module: torch.nn.Module, arguments: tuple, output):
        output.loss = output.loss * float("nan")
        return output

    with contextlib.ExitStack() as stack:
        if dist.get_rank() == dist.get_world_size() - 1:
            stack.callback(engine.module.register_forward_hook(poison).remove)
        yield


def precompile_without_kernels(engine: DeepSpeedEngine, batch: Sequence[torch.Tensor]) -> int:
    """How many passes `precompile_step` runs, of which the steps after it must not show anything."""
    losses = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("fla_train.training.engine.precompile", lambda work, threads: losses.append(work()[0]))
        precompile_step(engine, tuple(batch), threads=1)
    assert all(parameter.grad is None for parameter in engine.module.parameters())
    return len(losses)


def run(config: TrainConfig) -> dict:
    """Return losses, norms and checksums of steps, and the effects of a NaN on one rank and of a spike."""
    precision = config.trainer.precision  # tests emulate fp8, which `resolve` refuses on a CPU
    plan = resolve(replace(config, trainer=replace(config.trainer, precision="auto")))
    plan.config.trainer.precision = precision if precision != "auto" else plan.config.trainer.precision
    engine = build_engine(make_model(config), plan.config)
    features = attached_features(engine, plan.config)
    rank, world = dist.get_rank(), dist.get_world_size()
    sampler = BatchSampler(GLOBAL_BATCH, config.trainer.micro_batch_size, rank, world)

    bad_steps = BadSteps(torch.device("cpu"), max_grad_norm=config.optimizer.max_grad_norm)

    weights = [checksum(engine.module)]

    def steps(first: int, count: int) -> list[StepResult]:
        outcomes = []
        for step in range(first, first + count):
            ids, labels = make_batch(step)
            pairs = [(ids[rows], labels[rows]) for rows in sampler.indices(0)]
            stop = rank == world - 1 and step == first + count - 1
            outcomes.append(train_step(engine, pairs, LEARNING_RATE, bad_steps, stop=stop, features=features))
            weights.append(checksum(engine.module))
        return [outcome.read() for outcome in outcomes]

    passes = precompile_without_kernels(engine, [tensor[sampler.indices(0)[0]] for tensor in make_batch(0)])
    results = steps(0, STEPS)
    content = {
        "precompiled_passes": passes,
        "accumulation": sampler.accumulation,
        "losses": [r.loss for r in results],
        "grad_norms": [r.grad_norm for r in results],
        "targets": [r.targets for r in results],
        "skipped": [r.skipped for r in results],
        "stop": [r.stop for r in results],
        "weights": weights[1:],
    }
    ids, labels = make_batch(99)
    mine = [Batch(ids[rank::world], labels[rank::world])]
    content["eval"] = evaluate(engine, mine, seq_len=ids.shape[1], buckets=4)["loss"]

    with poisoned(engine):
        content["poisoned_skipped"] = steps(STEPS, 1)[0].skipped
    content["poisoned_unchanged"] = weights[-1] == weights[-2]
    (healthy,) = steps(STEPS + 1, 1)
    content["healthy_skipped"] = healthy.skipped
    content["healthy_changed"] = weights[-1] != weights[-2]
    # As after many steps whose losses were about 1 below today's, 0.01 to either side.
    bad_steps = BadSteps(torch.device("cpu"), max_grad_norm=0.5, spike_deviations=6.0)
    statistics = torch.tensor([200, healthy.loss - 1, 1e-4], dtype=torch.float64)
    bad_steps.load_state_dict([{"losses": statistics}])
    (spike,) = steps(STEPS + 2, 1)
    content["spike_skipped"], content["spike_unchanged"] = spike.skipped, weights[-1] == weights[-2]
    return content
