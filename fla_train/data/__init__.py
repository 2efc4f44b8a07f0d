"""Documents, tokenizers, token shards and the sequences that training reads. See docs/data.md."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fla_train.data.batches import (
        Batch,
        BatchPlan,
        DocumentSequences,
        MicroBatches,
        send,
        sequential_batches,
    )
    from fla_train.data.config import DataConfig, TokenizerConfig, data_faults, with_absolute_paths
    from fla_train.data.dataset import Sequences, TokenDataset
    from fla_train.data.opening import open_train, open_validation
    from fla_train.data.place import find_commits, find_prepared, prepared_name
    from fla_train.data.preparation import prepare
    from fla_train.data.prepared import PreparedData, open_prepared
    from fla_train.data.tokenizers import TokenizerNotCached, same_tokenizer, tokenizer_size

__all__ = [
    "Batch",
    "BatchPlan",
    "DataConfig",
    "DocumentSequences",
    "MicroBatches",
    "PreparedData",
    "Sequences",
    "TokenDataset",
    "TokenizerConfig",
    "TokenizerNotCached",
    "data_faults",
    "find_commits",
    "find_prepared",
    "open_prepared",
    "open_train",
    "open_validation",
    "prepare",
    "prepared_name",
    "same_tokenizer",
    "send",
    "sequential_batches",
    "tokenizer_size",
    "with_absolute_paths",
]

# Where the names live; imported when first asked for, since a tokenizing process needs neither torch nor
# transformers.
_MODULES = {
    "batches": ("Batch", "BatchPlan", "DocumentSequences", "MicroBatches", "send", "sequential_batches"),
    "config": ("DataConfig", "TokenizerConfig", "data_faults", "with_absolute_paths"),
    "dataset": ("Sequences", "TokenDataset"),
    "opening": ("open_train", "open_validation"),
    "place": ("find_commits", "find_prepared", "prepared_name"),
    "preparation": ("prepare",),
    "prepared": ("PreparedData", "open_prepared"),
    "tokenizers": ("TokenizerNotCached", "same_tokenizer", "tokenizer_size"),
}


def __getattr__(name: str) -> Any:
    for module, names in _MODULES.items():
        if name in names:
            return getattr(import_module(f"{__name__}.{module}"), name)
    raise AttributeError(f"module {__name__} has no attribute {name}")
