"""Run linear layers in float8: `trainer.precision=fp8`. See `models.float8` for the arithmetic."""

from collections.abc import Iterator, Mapping

import torch

from fla_train.data.sampler import Batch
from fla_train.training.callback import Callback
from fla_train.training.config import TrainConfig
from fla_train.training.memory import training_memory


class Float8(Callback):
    """Mark the model's layers that run in float8, and cast their weights once per step."""

    def check(self, config: TrainConfig) -> Iterator[str]:
        on_gpu = config.launch.device == "cuda" and not config.dry_run and torch.cuda.device_count()
        if on_gpu and torch.cuda.get_device_capability() < (8, 9):
            yield "trainer.precision=fp8 needs a GPU of compute capability 8.9 (Ada, Hopper): set it to bf16"

    def memory(self, config: TrainConfig) -> int:
        """Return the bytes of float8 copies: one per element in each of two layouts.

        Without checkpointing they replace bf16 weights.
        """
        return training_memory(config).parameters // 2 if config.trainer.activation_checkpointing else 0

    def attach(self, trainer) -> None:
        super().attach(trainer)
        from fla_train.models.float8 import Float8Weights  # imports the kernels, and the launcher does not

        trainer.model.float8 = Float8Weights(trainer.model)

    def model_inputs(self, number: int, batch: Batch) -> Mapping[str, None]:
        """Cast the weights before the first pass of a step."""
        if number == 0:
            self.trainer.model.float8.cast()
        return {}
