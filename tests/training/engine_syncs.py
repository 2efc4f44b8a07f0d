"""Optimizer steps on a GPU that fail where the host waits for it: `python engine_syncs.py CONFIG_YAML`.

One is applied, one is skipped for a NaN on the last rank, one for a spike of the loss.
"""

import sys
from pathlib import Path

import torch
import torch.distributed as dist
from engine_steps import make_batch, make_model, poisoned

from fla_train.run.resolve import resolve
from fla_train.training.config import load_config
from fla_train.training.engine import Outcome, build_engine, train_step
from fla_train.training.features.bad_steps import BadSteps


def refuse(*arguments: object) -> None:
    raise AssertionError("a step waits for the device")


def main() -> None:
    config = load_config(Path(sys.argv[1]))
    engine = build_engine(make_model(config), resolve(config).config)

    def make_filter(*statistics: float) -> BadSteps:
        bad_steps = BadSteps(engine.device, max_grad_norm=1.0, spike_deviations=4.0)
        bad_steps.load_state_dict([{"losses": torch.tensor(statistics, dtype=torch.float64)}])
        return bad_steps

    def step(number: int, bad_steps: BadSteps) -> Outcome:
        ids, labels = batches[number]
        return train_step(engine, list(zip(ids.split(2), labels.split(2), strict=True)), 1e-3, bad_steps)

    batches = [tuple(part.to(engine.device) for part in make_batch(number)) for number in range(6)]

    bad_steps = make_filter(0.0, 0.0, 0.0)
    for number in range(3):  # compilation, tuning, the optimizer's first allocations
        warm = step(number, bad_steps)
    surprised = make_filter(200.0, warm.read().loss - 1, 1e-4)
    wait, torch.cuda.synchronize = torch.cuda.synchronize, refuse
    torch.cuda.set_sync_debug_mode("error")
    outcomes = [step(3, bad_steps)]
    with poisoned(engine):
        outcomes.append(step(4, bad_steps))
    outcomes.append(step(5, surprised))
    torch.cuda.set_sync_debug_mode("default")
    torch.cuda.synchronize = wait
    results = [outcome.read() for outcome in outcomes]
    assert [result.skipped for result in results] == [False, True, True], results
    assert results[0].loss > 0 and results[2].loss > 0, results
    print("read", list(range(3, 6)))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
