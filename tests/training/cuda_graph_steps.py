"""Steps with and without a CUDA graph, which must not differ in a bit: `cuda_graph_steps.py CONFIG_YAML`."""

import random
import sys
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from engine_steps import GLOBAL_BATCH, checksum, make_batch, make_model
from torch import Tensor

from fla_train.data.sampler import Batch, BatchSampler
from fla_train.models.activation_checkpointing import checkpoint_activations
from fla_train.training.bad_steps import BadStepFilter
from fla_train.training.config import TrainConfig, load_config
from fla_train.training.cuda_graph import CudaGraphPass, gradients_of
from fla_train.training.engine import build_engine, train_step
from fla_train.training.initial_states import InitialStates

LENGTHS = (32, 32, 32, 16, 16, 32, 32, 32)  # of the steps' batches: a curriculum's words grow, too


class Rehearsal(CudaGraphPass):
    """Computes what a graph would replay, where there is none: on a CPU."""

    recordings = 0

    def _capture(self, leaves: Mapping[str, Tensor], arguments: Mapping[str, Any], stream: None) -> None:
        self.recordings += 1
        for value in self._inputs.values():
            value.fill_(-1)  # a replay must get its own

        def replay() -> None:
            self._loss, self._gradients = gradients_of(self._module, leaves, arguments, bf16=False)

        self._graph = SimpleNamespace(replay=replay)


def rehearse(config: TrainConfig) -> list[int]:
    """Compare on a CPU: from zero states, from passed ones, and a model that can't be recorded.

    Returns the numbers of recordings.
    """
    engine = _engine(config)
    recordings = []
    for kind in ("zero", "passing", "unrecordable"):
        if kind == "unrecordable":
            engine.module.gradient_checkpointing_disable()
            engine.module.register_forward_pre_hook(lambda module, inputs: draw_on_host())
        cuda_graph = Rehearsal(engine.module, bf16=False)
        compare(engine, cuda_graph, kind)
        recordings.append(cuda_graph.recordings)
    return recordings


def draw_on_host() -> None:
    """As the layer drop of some models does."""
    random.random()


def compare(engine, cuda_graph: CudaGraphPass, kind: str) -> None:
    """The same steps by the engine alone and by `cuda_graph`, the sixth by the engine in both runs.

    Args:
        kind: with "passing" sequences start from the final states of the step before.
    """
    start = {name: value.clone() for name, value in engine.module.state_dict().items()}
    runs = []
    for own in (None, cuda_graph):
        _rewind(engine, start)
        bad_steps = BadStepFilter(engine.device, max_grad_norm=0.5)
        states = _passing(engine) if kind == "passing" else None
        outcomes = []
        for step, length in enumerate(LENGTHS):
            batch = tuple(part[:, :length].to(engine.device) for part in make_batch(step))
            by = None if step == 5 else own  # as a step with statistics
            if states is not None:
                states.prepare(engine, Batch(*batch))
                states.begin(step, [])
            outcome = train_step(engine, [batch], 1e-2, bad_steps, cuda_graph=by, states=states)
            outcomes.append(outcome.read())
        runs.append((outcomes, checksum(engine.module)))
    assert runs[0] == runs[1], runs
    assert len({outcome.loss for outcome in runs[0][0]}) == len(LENGTHS)


def _engine(config: TrainConfig):
    model = make_model(config)
    checkpoint_activations(model, config.trainer.activation_checkpointing, preserve_rng_state=False)
    return build_engine(model, config)


def _passing(engine) -> InitialStates:
    return InitialStates(
        "passing",
        noise=None,
        zero_share=0.25,
        seed=0,
        sampler=BatchSampler(GLOBAL_BATCH, GLOBAL_BATCH),
        layers=engine.module.config.num_hidden_layers,
        device=engine.device,
    )


@torch.no_grad()
def _rewind(engine, start: dict[str, Tensor]) -> None:
    """The weights of the start, in the optimizer's copies too, and no moments."""
    engine.module.load_state_dict(start)
    engine.optimizer.refresh_fp32_params()
    engine.optimizer.optimizer.state.clear()


def main() -> None:
    config = load_config(Path(sys.argv[1]))
    engine = _engine(config)
    for kind in ("zero", "passing"):
        compare(engine, CudaGraphPass(engine.module, bf16=config.trainer.autocasts), kind)
    print("equal")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
