"""Steps with and without a recorded pass, which must not differ in a bit: `graphed_steps.py CONFIG_YAML`."""

import sys
from pathlib import Path

import torch
import torch.distributed as dist
from engine_steps import checksum, make_batch, make_model

from fla_train.training.engine import build_engine, train_step
from fla_train.training.graphed import GraphedPass
from fla_train.training.guard import StepGuard
from fla_train.training.schema import load_config

LENGTHS = (32, 32, 32, 16, 16, 32, 32, 32)  # of the steps' batches: a curriculum's words grow, too


def main() -> None:
    config = load_config(Path(sys.argv[1]))
    engine = build_engine(make_model(config), config)
    start = {name: value.clone() for name, value in engine.module.state_dict().items()}
    bf16 = config.trainer.precision == "bf16"
    runs = []
    for graphed in (None, GraphedPass(engine.module, bf16=bf16)):
        _rewind(engine, start)
        guard = StepGuard(engine.device, max_grad_norm=0.5)
        outcomes = []
        for step, length in enumerate(LENGTHS):
            batch = tuple(part[:, :length].to(engine.device) for part in make_batch(step))
            # The sixth step by the engine in both runs, as one with statistics is.
            outcomes.append(
                train_step(engine, [batch], 1e-2, guard, graphed=None if step == 5 else graphed).read()
            )
        runs.append((outcomes, checksum(engine.module)))
    assert runs[0] == runs[1], runs
    assert len({outcome.loss for outcome in runs[0][0]}) == len(LENGTHS)
    print("equal")
    dist.destroy_process_group()


@torch.no_grad()
def _rewind(engine, start: dict[str, torch.Tensor]) -> None:
    """The weights of the start, in the optimizer's copies too, and no moments."""
    engine.module.load_state_dict(start)
    engine.optimizer.refresh_fp32_params()
    engine.optimizer.optimizer.state.clear()


if __name__ == "__main__":
    main()
