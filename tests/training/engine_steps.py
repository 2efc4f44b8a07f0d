"""Optimizer steps of a real engine: `torchrun engine_steps.py CONFIG_YAML OUT_JSON MICRO_BATCH...`

For test_engine.py. Trains the same model from the same start once for each micro-batch size, on the
same masked global batches, and writes what rank 0 saw.
"""

import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist

from fla_train.data import BatchPlan
from fla_train.models import DeltaProductForCausalLM, build_config
from fla_train.training.engine import build_engine, mean_loss, train_step
from fla_train.training.schema import TrainConfig, load_config

GLOBAL_BATCH, SEQ_LEN, STEPS = 8, 32, 4
LEARNING_RATE = 1e-2


def make_model(config: TrainConfig) -> DeltaProductForCausalLM:
    torch.manual_seed(1)
    return DeltaProductForCausalLM(build_config(config.model)).float()


def make_batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """ids and labels [GLOBAL_BATCH, SEQ_LEN]; sequence i keeps about i / GLOBAL_BATCH of its targets."""
    generator = torch.Generator().manual_seed(step)
    ids = torch.randint(0, 320, (GLOBAL_BATCH, SEQ_LEN), generator=generator)
    share = torch.arange(GLOBAL_BATCH)[:, None] / GLOBAL_BATCH
    dropped = torch.rand(ids.shape, generator=generator) > share
    return ids, ids.masked_fill(dropped, -100)


def checksum(model: torch.nn.Module) -> list[float]:
    return [p.detach().double().sum().item() for p in model.parameters()]


def run(config: TrainConfig, micro_batch: int) -> dict:
    config.trainer.micro_batch_size = micro_batch
    engine = build_engine(make_model(config), config)
    rank, world = dist.get_rank(), dist.get_world_size()
    plan = BatchPlan(GLOBAL_BATCH, micro_batch, rank, world)

    def steps(first: int, count: int) -> list:
        results = []
        for step in range(first, first + count):
            ids, labels = make_batch(step)
            pairs = [(ids[rows], labels[rows]) for rows in plan.indices(0)]
            results.append(train_step(engine, pairs, LEARNING_RATE))
        return results

    results = steps(0, STEPS)
    content = {
        "accumulation": plan.accumulation,
        "losses": [r.loss for r in results],
        "grad_norms": [r.grad_norm for r in results],
        "targets": [r.targets for r in results],
        "skipped": [r.skipped for r in results],
        "weights": checksum(engine.module),
    }
    ids, labels = make_batch(99)
    content["eval"] = mean_loss(engine, [(ids[rank::world], labels[rank::world])])

    def poison(module: torch.nn.Module, arguments: tuple, output):
        output.loss = output.loss * float("nan")
        return output

    before = checksum(engine.module)
    hook = engine.module.register_forward_hook(poison) if rank == world - 1 else None
    (poisoned,) = steps(STEPS, 1)
    if hook is not None:
        hook.remove()
    content["poisoned_skipped"] = poisoned.skipped
    content["poisoned_unchanged"] = checksum(engine.module) == before
    (healthy,) = steps(STEPS + 1, 1)
    content["healthy_skipped"] = healthy.skipped
    content["healthy_changed"] = checksum(engine.module) != before
    return content


def main() -> None:
    from accelerate.state import AcceleratorState

    config_path, out, *micro_batches = sys.argv[1:]
    contents = []
    for micro_batch in map(int, micro_batches):
        contents.append(run(load_config(Path(config_path)), micro_batch))
        AcceleratorState._reset_state()  # one configuration at a time; the process group stays
    if dist.get_rank() == 0:
        Path(out).write_text(json.dumps(contents))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
