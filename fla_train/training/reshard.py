"""Reshard the optimizer state of a checkpoint for another number of ranks.

ZeRO lays the parameters of each group end to end and gives every rank one stretch of that line. A checkpoint
holds, for each rank, the stretches of Adam's moments (of Muon's momentum) and a map from parameter to
fragment (start and numel within the stretch). A parameter's fragments in rank order are the whole parameter,
so any other stretch follows from them, whatever the order of the parameters and the padding. Weights need no
cutting: the checkpoint holds them whole, in the fp32 they are trained in.

Nothing is written: each rank maps the files and copies what is its own.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from fla_train.training.checkpoint import OPTIMIZER_FILE
from fla_train.training.safe_load import load_file

# DeepSpeed's names inside a ZeRO-2 checkpoint
SHARD = "optimizer_state_dict"
ADAM = "base_optimizer_state"
MASTERS = "single_partition_of_fp32_groups"
FRAGMENTS = "param_slice_mappings"


class Fragment(Protocol):
    """Where a rank's part of a parameter lies in that rank's stretch, in elements."""

    start: int
    numel: int


Layout = Mapping[str, Fragment]  # one rank's fragments of one parameter group, by parameter


def load_optimizer(engine, folder: Path, saved_world: int) -> None:
    """Give `engine`, whose weights are loaded, the optimizer state that `saved_world` ranks left in `folder`.

    Every rank calls it.
    """
    files = [folder / OPTIMIZER_FILE.format(rank=rank) for rank in range(saved_world)]
    shards = [load_file(file, mmap=True)[SHARD] for file in files]
    layouts: list[Sequence[Layout]] = [()] * dist.get_world_size()
    dist.all_gather_object(layouts, engine.optimizer.state_dict()[FRAGMENTS])
    sizes = [group["params"][0].numel() for group in engine.optimizer.param_groups]
    own = shards[0] | {ADAM: adam_state(shards, layouts, dist.get_rank(), sizes)}
    # One entry per rank is asked for, and only this rank's is read. The masters come from the weights.
    engine.optimizer.load_state_dict([own] * len(layouts), load_from_fp32_weights=False)


def adam_state(
    shards: Sequence[Mapping], layouts: Sequence[Sequence[Layout]], rank: int, sizes: Sequence[int]
) -> dict:
    """State dict of `rank`'s AdamW, or PartitionedMuon, over its stretches.

    Args:
        shards: of each saved rank, the ZeRO state dict.
        layouts: of each present rank, the fragments of every parameter group.
        sizes: elements of `rank`'s stretch of every parameter group, padding included.
    """
    state = {}
    for group, size in enumerate(sizes):
        before = [shard[FRAGMENTS][group] for shard in shards]
        after = [layout[group] for layout in layouts]
        saved = [shard[ADAM]["state"].get(group, {}) for shard in shards]
        state[group] = {
            # The step count is one number, equal on all ranks; copied, since mapped files may go away.
            key: recut([part[key] for part in saved], before, after, rank, size)
            if value.ndim
            else value.clone()
            for key, value in saved[0].items()
        }
    return {"state": state, "param_groups": shards[0][ADAM]["param_groups"]}


def recut(
    stretches: Sequence[Tensor], before: Sequence[Layout], after: Sequence[Layout], rank: int, size: int
) -> Tensor:
    """`rank`'s stretch [size] by the layouts `after`, from all ranks' stretches by the layouts `before`."""
    result = stretches[0].new_zeros(size)
    for name, target in after[rank].items():
        parts = [
            stretch.narrow(0, layout[name].start, layout[name].numel)
            for stretch, layout in zip(stretches, before, strict=True)
            if name in layout
        ]
        whole = torch.cat(parts)
        numels = [layout[name].numel if name in layout else 0 for layout in after]
        assert whole.numel() == sum(numels), f"{name} has {whole.numel()} elements instead of {sum(numels)}"
        offset = sum(numels[:rank])
        result[target.start : target.start + target.numel] = whole[offset : offset + target.numel]
    return result
