"""The prepared text of a run: what it trains on, what it validates on, and what a batch of either is."""

import torch
from torch import Tensor

from fla_train.data.cache import PreparedData
from fla_train.data.dataset import Dataset
from fla_train.data.open_dataset import open_train, open_validation
from fla_train.data.sampler import Batch, PackedDataset, send
from fla_train.training.config import TrainConfig
from fla_train.training.evaluator import Part


def open_text(data: PreparedData, config: TrainConfig) -> tuple[Dataset | PackedDataset, dict[str, Part]]:
    """The sequences to train on; the parts to validate on by name, perhaps none.

    Raises:
        ValueError: a manifest is corrupt, a shard is missing or cut short, or no sequence fits.
    """
    seq_len = config.trainer.seq_len
    train = open_train(data.folder, seq_len, config.seed)
    validation = open_validation(data.folder, seq_len)
    if not config.data.document_boundaries:
        return train, dict(validation)
    parts = {name: (PackedDataset(part), weight) for name, (part, weight) in validation.items()}
    return PackedDataset(train), parts


def to_batch(read: Tensor | Batch, device: torch.device) -> Batch:
    """What was read, on `device`; of bare ids [B, T] every token but the first is a target."""
    if isinstance(read, Batch):
        return read.to(device)
    ids = send(read, device)
    return Batch(ids, ids)
