"""Split each sequence over several ranks: `launch.context_parallel`.

`kernels/context_parallel.py` passes the states from rank to rank.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from fla_train.training.callback import Callback
from fla_train.utils.keys import key


@dataclass
class ContextParallelKeys:
    context_parallel: int = key(1, at_least=1)


class ContextParallel(Callback):
    """Check that the ranks of a group can split a sequence."""

    def check(self, config) -> Iterator[str]:
        seq_len, parts = config.trainer.seq_len, config.launch.context_parallel
        if seq_len % parts:
            yield f"launch.context_parallel={parts} does not divide trainer.seq_len={seq_len}"
        elif seq_len // parts < config.model.get("conv_size", 0):
            yield f"launch.context_parallel={parts} leaves {seq_len // parts} tokens to a rank: use fewer"
