"""Estimate the device memory of training a model of the DeltaProduct family."""

from typing import TYPE_CHECKING

from fla_train.models.build import model_settings
from fla_train.models.flops import TrainingMemory, training_memory_bytes

if TYPE_CHECKING:
    from fla_train.training.config import TrainConfig


def training_memory(config: "TrainConfig") -> TrainingMemory:
    """Return the memory of each rank for a resolved config, without that of features."""
    trainer = config.trainer
    return training_memory_bytes(
        model_settings(config.model),
        tokens_per_device=trainer.micro_batch_size * trainer.seq_len // config.launch.context_parallel,
        num_devices=config.launch.num_processes,
        element_size=2 if trainer.autocasts else 4,
        gradient_checkpointing=trainer.activation_checkpointing,
        accumulates=config.num_accumulated > 1,
    )
