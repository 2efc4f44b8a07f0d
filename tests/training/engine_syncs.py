"""Optimizer steps on a GPU that fail where the host waits for it: `python engine_syncs.py CONFIG_YAML`."""

import sys
from pathlib import Path

import torch
import torch.distributed as dist
from engine_steps import make_batch, make_model

from fla_train.training.engine import Outcome, build_engine, train_step
from fla_train.training.guard import StepGuard
from fla_train.training.schema import load_config


def refuse(*arguments: object) -> None:
    raise AssertionError("a step waits for the device")


def main() -> None:
    config = load_config(Path(sys.argv[1]))
    engine = build_engine(make_model(config), config)
    guard = StepGuard(engine.device, max_grad_norm=1.0, spike_deviations=4.0)

    def step(number: int) -> Outcome:
        ids, labels = batches[number]
        return train_step(engine, list(zip(ids.split(2), labels.split(2), strict=True)), 1e-3, guard)

    batches = [tuple(part.to(engine.device) for part in make_batch(number)) for number in range(6)]
    for number in range(3):  # compilation, tuning, the optimizer's first allocations
        step(number)
    wait, torch.cuda.synchronize = torch.cuda.synchronize, refuse
    torch.cuda.set_sync_debug_mode("error")
    outcomes = [step(number) for number in range(3, 6)]
    torch.cuda.set_sync_debug_mode("default")
    torch.cuda.synchronize = wait
    results = [outcome.read() for outcome in outcomes]
    assert all(result.loss > 0 and not result.skipped for result in results)
    print("read", list(range(3, 6)))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
