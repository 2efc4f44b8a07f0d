"""Steps with and without a CUDA graph, which must not differ in a bit: `cuda_graph_steps.py CONFIG_YAML`."""

import sys
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from engine_steps import GLOBAL_BATCH, attached_features, checksum, make_batch, make_model
from torch import Tensor

from fla_train.data.sampler import Batch, BatchSampler
from fla_train.models.activation_checkpointing import checkpoint_activations
from fla_train.run.resolve import resolve
from fla_train.training.callback import Callback
from fla_train.training.config import TrainConfig, load_config
from fla_train.training.engine import build_engine, train_step
from fla_train.training.features.bad_steps import BadSteps
from fla_train.training.features.cuda_graph import CudaGraph
from fla_train.training.features.initial_states import InitialStates
from fla_train.training.recorded_pass import RecordedPass, gradients_of

LENGTHS = (32, 32, 32, 16, 16, 32, 32, 32)  # of the steps' batches: as in a curriculum


class Rehearsal(RecordedPass):
    """Compute on a CPU what a graph would replay on a GPU."""

    recordings = 0

    def _capture(self, leaves: Mapping[str, Tensor], arguments: Mapping[str, Any], stream: None) -> None:
        self.recordings += 1
        for value in self._inputs.values():
            value.fill_(-1)  # a replay must get its own

        def replay() -> None:
            self._loss, self._gradients = gradients_of(self._module, leaves, arguments, bf16=False)

        self._graph = SimpleNamespace(replay=replay)


def rehearse(config: TrainConfig) -> list[int]:
    """Compare on a CPU, from zero states and from passed ones; return the numbers of recordings."""
    engine, features = _engine(config)
    recordings = []
    for kind in ("zero", "passing"):
        cuda_graph = Rehearsal(engine.module, bf16=False)
        compare(engine, features, cuda_graph, kind)
        recordings.append(cuda_graph.recordings)
    return recordings


def compare(engine, common: list[Callback], recorded: RecordedPass, kind: str) -> None:
    """Compare steps of the engine alone with those of `recorded`; the engine runs the sixth in both.

    Args:
        common: further features of both.
        kind: with "passing" sequences start from the final states of the step before.
    """
    start = {name: value.clone() for name, value in engine.module.state_dict().items()}
    runs = []
    cuda_graph = CudaGraph()
    cuda_graph.run_pass = recorded.run
    for own in (None, cuda_graph):
        _rewind(engine, start)
        bad_steps = BadSteps(engine.device, max_grad_norm=0.5)
        states = _passing(engine) if kind == "passing" else None
        outcomes = []
        for step, length in enumerate(LENGTHS):
            batch = tuple(part[:, :length].to(engine.device) for part in make_batch(step))
            features = common + ([] if own is None or step == 5 else [own])  # 5: as with statistics
            if states is not None:
                states.before_step(step + 1, [Batch(*batch)])
                features.insert(0, states)
            outcomes.append(train_step(engine, [batch], 1e-2, bad_steps, features=features).read())
        runs.append((outcomes, checksum(engine.module)))
    assert runs[0] == runs[1], runs
    assert len({outcome.loss for outcome in runs[0][0]}) == len(LENGTHS)


def _engine(config: TrainConfig) -> tuple[Any, list[Callback]]:
    """Return the engine, and the features of the config: Float8, if any."""
    model = make_model(config)
    checkpoint_activations(model, config.trainer.activation_checkpointing, preserve_rng_state=False)
    config = resolve(config).config
    engine = build_engine(model, config)
    return engine, attached_features(engine, config)


def _passing(engine) -> InitialStates:
    trainer = SimpleNamespace(state_noise="fitted", zero_state_share=0.25)
    config = SimpleNamespace(initial_states="passing", seed=0, trainer=trainer)
    states, batches = InitialStates(), BatchSampler(GLOBAL_BATCH, GLOBAL_BATCH)
    states.attach(SimpleNamespace(config=config, batches=batches, engine=engine))
    return states


@torch.no_grad()
def _rewind(engine, start: dict[str, Tensor]) -> None:
    """The weights of the start, in the optimizer's copies too, and no moments."""
    engine.module.load_state_dict(start)
    engine.optimizer.refresh_fp32_params()
    engine.optimizer.optimizer.state.clear()


def main() -> None:
    config = load_config(Path(sys.argv[1]))
    engine, features = _engine(config)
    for kind in ("zero", "passing"):
        compare(engine, features, RecordedPass(engine.module, bf16=config.trainer.autocasts), kind)
    print("equal")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
