"""Split each sequence over several ranks: `launch.context_parallel`.

`kernels/context_parallel.py` passes the states from rank to rank.
"""

from collections.abc import Iterator

import torch.distributed as dist

from fla_train.data.sampler import Batch
from fla_train.kernels.context_parallel import ContextGroup, ContextPart
from fla_train.training.callback import Callback
from fla_train.training.config import TrainConfig
from fla_train.training.process_group import TIMEOUT


class ContextParallel(Callback):
    """Check that the ranks of a group can split a sequence."""

    def check(self, config: TrainConfig) -> Iterator[str]:
        seq_len, parts = config.trainer.seq_len, config.launch.context_parallel
        if seq_len % parts:
            yield f"launch.context_parallel={parts} does not divide trainer.seq_len={seq_len}"
        elif seq_len // parts < config.model.get("conv_size", 0):
            yield f"launch.context_parallel={parts} leaves {seq_len // parts} tokens to a rank: use fewer"


class RankMesh:
    """Arrange the joined ranks as data x context: consecutive ranks share sequences. All ranks construct it.

    Attributes:
        data_rank, data_world: index and number of the groups that read different sequences.
        context: the ranks that split each sequence among them; None: sequences are whole.
    """

    def __init__(self, parts: int):
        self.data_rank, self.data_world = dist.get_rank() // parts, dist.get_world_size() // parts
        split = parts > 1
        self.context = ContextGroup(dist.new_subgroups(parts, timeout=TIMEOUT)[0]) if split else None


def split_batch(whole: Batch, context: ContextGroup) -> Batch:
    """Return this rank's columns of rows [B, T] that the ranks of `context` split; they divide T."""
    # Import late, because it imports Triton, which the launcher does not need.
    from fla_train.models.loss import next_tokens

    length = whole.input_ids.shape[1] // context.size
    columns = slice(context.rank * length, (context.rank + 1) * length)
    return whole._replace(
        input_ids=whole.input_ids[:, columns].contiguous(),
        labels=None,
        shift_labels=next_tokens(whole.labels)[:, columns].contiguous(),
        context_part=ContextPart.of(context, length, whole.cu_seqlens),
    )
