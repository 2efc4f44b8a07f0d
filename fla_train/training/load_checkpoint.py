"""Load a checkpoint into an engine: read its files without running code, and reshard the optimizer state.

A pickle can call any function while it is read, and a checkpoint may come from someone else. Its checksums
only prove that nobody changed it after it was written. Files may therefore hold only tensors and plain
values.

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
from torch import Tensor

from fla_train.training.callback import Callback
from fla_train.training.checkpoint import WEIGHTS, TrainState, rank_file, read_state, world_size
from fla_train.utils.random_states import set_random_states

# Fragments of one rank and parameter group by parameter: start and numel in the rank's partition.
Fragments = Mapping[str, tuple[int, int]]


def load_checkpoint(engine, folder: Path) -> TrainState:
    """Restore `engine` from the checkpoint `folder`. Every rank calls it.

    The restored state is exact if the number of ranks has not changed. If the number differs, weights and
    moments are equal, and sums over ranks round differently. Weight decay, betas and similar settings stay
    those of `engine`, because a config may change them.

    Raises:
        ValueError: a file holds more than tensors and plain values.
        RuntimeError: it belongs to another model.
    """
    engine.module.load_state_dict(load_file(folder / WEIGHTS))
    optimizer, rank, shards = engine.optimizer.optimizer, dist.get_rank(), _read_shards(folder)
    fragments: list[Sequence[Fragments]] = [()] * dist.get_world_size()
    dist.all_gather_object(fragments, fragments_of(engine))
    source, state = rank % len(shards), {}  # number of the shard from which this rank reads common values
    for group, parameters in enumerate(optimizer.param_groups):
        saved = [shard["optimizer"]["state"].get(group) for shard in shards]
        if saved[source] is None:
            continue
        size = parameters["params"][0].numel()  # size of this rank's partition, including padding
        before = [shard["fragments"][group] for shard in shards]
        after = [layout[group] for layout in fragments]
        elements = max(start + numel for start, numel in before[0].values())
        state[group] = {
            # Step counts are equal on all ranks. They are copied, since mapped files may be deleted.
            key: reshard([shard[key] for shard in saved], before, after, rank, size)
            if isinstance(value, Tensor) and value.numel() >= elements
            else deepcopy(value)
            for key, value in saved[source].items()
        }
    # A custom optimizer may keep state in its groups, so only the configured settings come from `engine`.
    kept = getattr(optimizer, "configured", None)
    settings = [
        {name: value for name, value in group.items() if name != "params" and (kept is None or name in kept)}
        for group in optimizer.param_groups
    ]
    groups = shards[source]["optimizer"]["param_groups"]
    optimizer.load_state_dict({"state": state, "param_groups": groups})
    for index, (group, settings_now) in enumerate(zip(optimizer.param_groups, settings, strict=True)):
        group.update(settings_now)
        # Torch has cast the tensors to the weights' dtype. A custom optimizer may keep others.
        held = optimizer.state[group["params"][0]]
        for key, value in state.get(index, {}).items():
            if isinstance(value, Tensor) and value.dtype != held[key].dtype:
                held[key] = value.to(held[key].device)
    return read_state(folder)


def load_random_states(folder: Path) -> None:
    """Restore this rank's random states. A rank beyond the saved ones uses those of a saved one."""
    shards = _read_shards(folder)
    set_random_states(shards[dist.get_rank() % len(shards)]["random"])


def load_features(features: Sequence[Callback], folder: Path, log: Callable[[str], None]) -> None:
    """Restore the state of each feature from all ranks' files. Log the features that only one side has.

    Raises:
        ValueError: a file holds more than tensors and plain values.
    """
    saved = [shard["features"] for shard in _read_shards(folder)]
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


def load_file(path: str | Path) -> Any:
    """Map a file that `torch.save` wrote, so that only the tensors that are used are read.

    Raises:
        ValueError: it refers to a type or function, and none was called; or it can't be mapped.
    """
    try:
        return torch.load(path, map_location="cpu", mmap=True, weights_only=True)
    except (pickle.UnpicklingError, RuntimeError) as error:
        # Torch wraps the cause in advice.
        cause = " ".join(str(error.__context__ or error).split())
        raise ValueError(f"{path} can't be read as tensors and plain values: {cause}") from error


def _read_shards(folder: Path) -> list[dict[str, Any]]:
    """Return the files of all ranks that wrote the checkpoint."""
    return [load_file(folder / rank_file(rank)) for rank in range(world_size(folder))]


def fragments_of(engine) -> list[Fragments]:
    """Return the fragments in this rank's partition of each parameter group."""
    return [
        {name: (fragment.start, fragment.numel) for name, fragment in group.items()}
        for group in engine.optimizer._param_slice_mappings
    ]


def reshard(
    partitions: Sequence[Tensor],
    before: Sequence[Fragments],
    after: Sequence[Fragments],
    rank: int,
    size: int,
) -> Tensor:
    """Return `rank`'s partition [size] in the layout `after`, from all partitions in the layout `before`."""
    if before == after:
        return partitions[rank].clone()
    result = partitions[0].new_zeros(size)
    for name, (start, numel) in after[rank].items():
        fragments = [
            partition.narrow(0, *layout[name])
            for partition, layout in zip(partitions, before, strict=True)
            if name in layout
        ]
        whole = torch.cat(fragments)
        numels = [layout[name][1] if name in layout else 0 for layout in after]
        assert whole.numel() == sum(numels), f"{name} has {whole.numel()} elements instead of {sum(numels)}"
        offset = sum(numels[:rank])
        result[start : start + numel] = whole[offset : offset + numel]
    return result
