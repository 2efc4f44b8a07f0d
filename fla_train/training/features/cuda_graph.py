"""Record forward and backward pass as a CUDA graph, for models whose kernels are shorter than their launches.

The model of a word problem keeps a GPU busy for one or two milliseconds per step, while the host takes
several times as long to launch its hundred or more kernels one by one. Selective activation checkpointing
makes the host slow with large models as well. A recorded graph launches all kernels together.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fla_train.training.callback import Callback


@dataclass
class CudaGraphKeys:
    cuda_graph: bool = False


class CudaGraph(Callback):
    """Replay the pass of each micro-batch, except in steps with statistics: a graph runs no hooks."""

    _active = True

    def memory(self, config) -> int:
        """Return the bytes of a step with statistics, during which the graph's activations stay allocated."""
        # Import late, because commands that answer before torch is imported read this file.
        from fla_train.models.build import is_zoo
        from fla_train.training.memory import training_memory

        counted = config.trainer.stats_every and not is_zoo(config.model)
        return training_memory(config).activations if counted else 0

    def attach(self, trainer) -> None:
        super().attach(trainer)
        from fla_train.training.recorded_pass import RecordedPass  # imports torch

        self._recorded = RecordedPass(trainer.model, bf16=trainer.config.trainer.autocasts)

    def before_step(self, step: int, micro_batches: Sequence) -> None:
        self._active = not self.trainer.is_observed(step)

    def run_pass(self, inputs: Mapping[str, Any]) -> Any:
        return self._recorded.run(inputs) if self._active else None


def records_graph(config) -> bool:
    """Return whether a run with this resolved config records its passes as CUDA graphs."""
    return config.trainer.cuda_graph and config.launch.device == "cuda"
