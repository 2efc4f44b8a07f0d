"""Documents, tokenizers, token shards and the sequences that training reads. See docs/architecture.md."""

from fla_train.data.batches import BatchPlan, MicroBatches, sequential_batches
from fla_train.data.config import DataConfig, TokenizerConfig, data_faults
from fla_train.data.dataset import TokenDataset
from fla_train.data.prepare import PreparedData, open_prepared, prepare
from fla_train.data.tokenizers import check_vocabulary

__all__ = [
    "BatchPlan",
    "DataConfig",
    "MicroBatches",
    "PreparedData",
    "TokenDataset",
    "TokenizerConfig",
    "check_vocabulary",
    "data_faults",
    "open_prepared",
    "prepare",
    "sequential_batches",
]
