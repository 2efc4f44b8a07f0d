"""Read the torch files of a checkpoint: tensors, plain Python values and a few named types, and no code.

A pickle can call any function while it is read, and a checkpoint may come from someone else; its checksums
say only that it is as its writer left it.
"""

import pickle
from pathlib import Path
from typing import Any

import numpy as np
import torch
from deepspeed.runtime.checkpoint_engine import TorchCheckpointEngine
from deepspeed.runtime.fp16.loss_scaler import LossScaler
from deepspeed.runtime.zero.config import ZeroStageEnum
from deepspeed.utils.tensor_fragment import fragment_address

# What DeepSpeed puts into the optimizer's files
ZERO_TYPES = (LossScaler, ZeroStageEnum, fragment_address)
# numpy's random state, in the rng files written before it was saved as a tensor
ARRAY_TYPES = (np._core.multiarray._reconstruct, np.ndarray, np.dtype, type(np.dtype(np.uint32)))
ALLOWED = [*ZERO_TYPES, *ARRAY_TYPES]


def load_file(path: str | Path, map_location: Any = "cpu", *, mmap: bool = False) -> Any:
    """What `torch.save` wrote to `path`.

    Args:
        mmap: map the file: what is never looked at is never read.

    Raises:
        ValueError: it asks for another type or function; none was called.
    """
    try:
        with torch.serialization.safe_globals(ALLOWED):
            return torch.load(path, map_location=map_location, mmap=mmap, weights_only=True)
    except pickle.UnpicklingError as failure:
        cause = " ".join(str(failure.__context__ or failure).split())  # torch puts advice around it
        raise ValueError(
            f"{path} holds more than tensors and plain values and was not read: it could run code ({cause})"
        ) from failure


class SafeCheckpointEngine(TorchCheckpointEngine):
    """How DeepSpeed reads the files of a checkpoint."""

    def load(self, path: str, map_location: Any = None) -> Any:
        return load_file(path, map_location)
