"""Load a checkpoint into an engine: read its files without running code, and reshard the optimizer state.

A pickle can call any function while it is read, and a checkpoint may come from someone else. Its checksums
only prove that nobody changed it after it was written. Files may therefore hold only tensors, plain values
and the types in ALLOWED.

Resharding: ZeRO-2 flattens each parameter group and gives every rank an equal partition of it. A checkpoint
holds, for each rank, the partitions of Adam's moments (of Muon's momentum) and a map from parameter to
fragment (start and numel in the partition). A parameter's fragments in rank order form the whole parameter.
Partitions for any number of ranks follow from them, whatever the order of the parameters and the padding. The
checkpoint holds the weights whole, in the fp32 they are trained in. Nothing is written: each rank maps the
files and copies its fragments.
"""

import pickle
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.runtime.checkpoint_engine import TorchCheckpointEngine
from deepspeed.runtime.fp16.loss_scaler import LossScaler
from deepspeed.runtime.zero.config import ZeroStageEnum
from deepspeed.utils.tensor_fragment import fragment_address
from torch import Tensor

from fla_train.training.callback import Callback
from fla_train.training.checkpoint import (
    DEEPSPEED_TAG,
    FEATURES_FILE,
    OPTIMIZER_FILE,
    RANDOM_FILE,
    SHARD,
    TrainState,
    read_state,
    world_size,
)
from fla_train.training.deepspeed_patches import files_through
from fla_train.utils.random_states import set_random_states

# Types in DeepSpeed's optimizer files.
ALLOWED = [LossScaler, ZeroStageEnum, fragment_address]
# DeepSpeed's names in a rank's ZeRO-2 state.
ADAM = "base_optimizer_state"
FRAGMENTS = "param_slice_mappings"


def load_checkpoint(engine, folder: Path) -> TrainState:
    """Restore `engine` from the checkpoint `folder`. Every rank calls it.

    The restored state is exact if the number of ranks has not changed. If the number differs, weights and
    moments are equal, and sums over ranks round differently. Weight decay, betas and similar settings stay
    those of `engine`, because a config may change them.

    Raises:
        ValueError: a file holds more than tensors and plain values.
        RuntimeError: it belongs to another model.
    """
    saved = world_size(folder)
    same = saved == dist.get_world_size()
    settings = [{k: v for k, v in group.items() if k != "params"} for group in engine.optimizer.param_groups]
    with files_through(engine, SafeCheckpointEngine()):
        path, _ = engine.load_checkpoint(str(folder), tag=DEEPSPEED_TAG, load_optimizer_states=same)
    assert path is not None, f"DeepSpeed found nothing in {folder}"
    if not same:
        load_resharded_optimizer(engine, folder, saved)
    # A custom optimizer may keep state in its groups, so only the configured settings come from `engine`.
    kept = getattr(engine.optimizer.optimizer, "configured", None)
    for group, settings_now in zip(engine.optimizer.param_groups, settings, strict=True):
        group.update({k: v for k, v in settings_now.items() if kept is None or k in kept})
    return read_state(folder)


def load_random_states(folder: Path) -> None:
    """Restore this rank's random states. A rank beyond the saved ones uses those of a saved one."""
    rank = dist.get_rank() % world_size(folder)
    set_random_states(load_file(folder / RANDOM_FILE.format(rank=rank)))


def load_features(features: Sequence[Callback], folder: Path, log: Callable[[str], None]) -> None:
    """Restore the state of each feature from all ranks' files. Log the features that only one side has.

    Raises:
        ValueError: a file holds more than tensors and plain values.
    """
    files = [folder / FEATURES_FILE.format(rank=rank) for rank in range(world_size(folder))]
    saved = [load_file(file, mmap=True) for file in files]
    names = set().union(*saved)
    for feature in features:
        if feature.name in names:
            feature.load_state_dict([states.get(feature.name, {}) for states in saved])
        elif feature.state_dict():
            log(f"resume       {feature.name} starts afresh: the checkpoint has no state of it")
    for name in sorted(names - {feature.name for feature in features}):
        log(f"resume       the state of {name} is dropped: the run no longer uses it")


def is_loadable(value: Any) -> bool:
    """Return whether `load_file` reads this state of a feature: tensors and plain values, also nested."""
    if type(value) in (dict, OrderedDict):
        return all(map(is_loadable, (*value.keys(), *value.values())))
    if type(value) in (list, tuple):
        return all(map(is_loadable, value))
    return value is None or type(value) in (bool, int, float, str) or isinstance(value, Tensor)


def load_file(path: str | Path, map_location: Any = "cpu", *, mmap: bool = False) -> Any:
    """Load a file that `torch.save` wrote.

    Args:
        mmap: map the file, so that only the tensors that are used are read.

    Raises:
        ValueError: it refers to another type or function; none was called.
    """
    try:
        with torch.serialization.safe_globals(ALLOWED):
            return torch.load(path, map_location=map_location, mmap=mmap, weights_only=True)
    except pickle.UnpicklingError as error:
        # Torch wraps the cause in advice.
        cause = " ".join(str(error.__context__ or error).split())
        raise ValueError(
            f"{path} holds more than tensors and plain values and was not read: it could run code ({cause})"
        ) from error


class SafeCheckpointEngine(TorchCheckpointEngine):
    """Let DeepSpeed read the files of a checkpoint through `load_file`."""

    def load(self, path: str, map_location: Any = None) -> Any:
        return load_file(path, map_location)


# Fragments of one rank and parameter group by parameter: `start` and `numel` in the rank's partition.
Layout = Mapping[str, fragment_address]


def load_resharded_optimizer(engine, folder: Path, saved_world: int) -> None:
    """Load the optimizer state of `saved_world` ranks from `folder` into `engine`. Every rank calls it.

    The weights of `engine` are already loaded.
    """
    files = [folder / OPTIMIZER_FILE.format(rank=rank) for rank in range(saved_world)]
    shards = [load_file(file, mmap=True)[SHARD] for file in files]
    layouts: list[Sequence[Layout]] = [()] * dist.get_world_size()
    dist.all_gather_object(layouts, engine.optimizer.state_dict()[FRAGMENTS])
    state = {}
    for group, parameters in enumerate(engine.optimizer.param_groups):
        size = parameters["params"][0].numel()  # size of this rank's partition, including padding
        before = [shard[FRAGMENTS][group] for shard in shards]
        after = [layout[group] for layout in layouts]
        saved = [shard[ADAM]["state"].get(group, {}) for shard in shards]
        elements = max(fragment.start + fragment.numel for fragment in before[0].values())
        state[group] = {
            # Step counts are equal on all ranks. They are copied, since mapped files may be deleted.
            key: reshard([part[key] for part in saved], before, after, dist.get_rank(), size)
            if isinstance(value, Tensor) and value.numel() >= elements
            else deepcopy(value)
            for key, value in saved[0].items()
        }
    own = shards[0] | {ADAM: {"state": state, "param_groups": shards[0][ADAM]["param_groups"]}}
    # DeepSpeed expects an entry per rank but reads only this rank's. The masters come from the weights.
    engine.optimizer.load_state_dict([own] * len(layouts), load_from_fp32_weights=False)


def reshard(
    partitions: Sequence[Tensor], before: Sequence[Layout], after: Sequence[Layout], rank: int, size: int
) -> Tensor:
    """Return `rank`'s partition [size] in layouts `after`, from all partitions in layouts `before`."""
    result = partitions[0].new_zeros(size)
    for name, target in after[rank].items():
        fragments = [
            partition.narrow(0, layout[name].start, layout[name].numel)
            for partition, layout in zip(partitions, before, strict=True)
            if name in layout
        ]
        whole = torch.cat(fragments)
        numels = [layout[name].numel if name in layout else 0 for layout in after]
        assert whole.numel() == sum(numels), f"{name} has {whole.numel()} elements instead of {sum(numels)}"
        offset = sum(numels[:rank])
        result[target.start : target.start + target.numel] = whole[offset : offset + target.numel]
    return result
