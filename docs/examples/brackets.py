"""A custom task: which bracket closes next, in nested brackets of several kinds (the Dyck language)."""

from typing import Any

import numpy as np

from fla_train.tasks.draws import below, draw
from fla_train.tasks.task import Batch, Task


class Brackets(Task):
    """Say after each token which bracket must close next.

    A word opens and closes brackets at random, never deeper than `depth`. Ids: 0 stands for "none is open",
    1 to `kinds` open, kinds + 1 to 2 * kinds close. The label of a token is the id that closes the innermost
    open bracket, or 0.

    Args:
        length: tokens of a word.
        kinds: of brackets.
        depth: brackets that may be open at once.
        stream: `seed` and `num_sequences`, see Task.
    """

    headline = "sequence_accuracy"  # share of words without a wrong label
    length_option = "length"  # task.curriculum may begin with shorter words

    def __init__(self, length: int, kinds: int = 2, depth: int = 3, **stream: Any):
        if min(length, kinds, depth) < 1:
            raise ValueError(f"length={length}, kinds={kinds} and depth={depth} must be at least 1")
        super().__init__(vocab_size=2 * kinds + 1, seq_len=length, **stream)
        self.kinds, self.depth = kinds, depth

    def _generate(self, keys: np.ndarray) -> Batch:
        # Row i may use the stream keys[i] only: sequence i is then the same in any batch and on any rank.
        moves, opened = np.split(draw(keys, 2 * self.seq_len), 2)  # [T, B] each
        rows, n = np.arange(len(keys)), np.zeros(len(keys), dtype=np.int64)
        # [B, depth + 1]: the ids that close the open brackets; place 0 stands for none.
        stack = np.zeros((len(keys), self.depth + 1), dtype=np.int64)
        input_ids = np.zeros((len(keys), self.seq_len), dtype=np.int64)
        labels = np.zeros_like(input_ids)
        for t in range(self.seq_len):
            opens = (n == 0) | ((n < self.depth) & (below(moves[t], 2) == 1))
            kind = 1 + below(opened[t], self.kinds)
            input_ids[:, t] = np.where(opens, kind, stack[rows, n])
            n += np.where(opens, 1, -1)
            stack[rows[opens], n[opens]] = self.kinds + kind[opens]
            labels[:, t] = stack[rows, n]
        return Batch.of(input_ids, labels)
