"""Code traces: an interactive session that permutes variables and prints one of them now and then.

This is state tracking under the next-token loss, after Siems et al. (arXiv 2602.14814). They write
permutation composition as traces of a Python session, in which prints reveal the state between
transformations, and train by next-token prediction. Their abstract says no more, so grammar, spacing and
tokens are our choice.
"""

from collections.abc import Sequence
from itertools import permutations
from string import ascii_lowercase
from typing import Any

import numpy as np

from fla_train.tasks.draws import below, draw, without_replacement
from fla_train.tasks.task import IGNORE, Batch, Task

MAX_VARIABLES = 6  # 719 assignments permute six variables


class CodeTrace(Task):
    """Predict the next token of a session in which variables swap their values.

    The n variables get the values 0 .. n - 1 in random order. Then the session repeats: some assignments
    that permute variables, and the print of one variable, drawn uniformly:

        >>> a = 2
        >>> b = 0
        >>> c = 1
        >>> a, c = c, a
        >>> a, b, c = b, c, a
        >>> print(b)
        2

    Assignments are drawn uniformly, so only the printed values can be predicted from the state. The number
    of assignments between two prints is drawn from `gaps` once per sequence, and recorded as the metadata
    "moves_between_reveals". A random value is right with probability 1 / n.

    Args:
        variables: n, 2 to 6.
        length: tokens.
        max_moved: limit on the variables that one assignment changes. 2: swaps. 3: cycles of three too.
            None: n.
        gaps: possible numbers of assignments between two prints.
        statement_tokens: make each line one token, so that a layer has one token for a permutation.
            Otherwise a token is a symbol: ">>> ", a name, ", ", " = ", a digit, "print(", ")" or the end of
            the line.
        label_all: label every token with the next one, as for a language model; otherwise only printed
            values.
        stream: `seed` and `num_sequences`, see Task.

    Attributes:
        tokens: the text of each id. The method `text` joins them.

    Raises:
        ValueError: an option is out of range, or a row may end before its first print.
    """

    slice_key = "moves_between_reveals"
    length_option = "length"

    def __init__(
        self,
        variables: int,
        length: int,
        *,
        max_moved: int | None = None,
        gaps: Sequence[int] = (1, 2, 4, 8),
        statement_tokens: bool = True,
        label_all: bool = False,
        **stream: Any,
    ):
        if not 2 <= variables <= MAX_VARIABLES or not gaps or min(gaps) < 1:
            raise ValueError(f"code_trace needs 2 to {MAX_VARIABLES} variables, and gaps of 1 or more")
        most = variables if max_moved is None else max_moved
        if not 2 <= most <= variables:
            raise ValueError(f"max_moved={max_moved} must be 2 to {variables}, the number of variables")
        identity = np.arange(variables)
        images = np.array(list(permutations(range(variables))))
        moved = (images != identity).sum(1)
        # The identity comes last. It is the effect of a print on the state.
        self._moves = np.concatenate([images[(moved > 0) & (moved <= most)], identity[None]])
        self.variables, self.gaps, self.label_all = variables, np.array(gaps), label_all
        lines = self._lines()
        if statement_tokens:
            lines = [("".join(line),) for line in lines]
        self.tokens = list(dict.fromkeys(symbol for line in lines for symbol in line))
        # The ids of each line, [lines, symbols of the longest], -1 after its end.
        self._ids = np.full((len(lines), max(map(len, lines))), -1)
        for number, line in enumerate(lines):
            self._ids[number, : len(line)] = [self.tokens.index(symbol) for symbol in line]
        sizes = (self._ids >= 0).sum(1)
        first = variables * sizes[0] + max(gaps) * sizes[self._first_move : self._first_print].max()
        if length < (least := int(first + sizes[self._first_print])):
            raise ValueError(f"length {length} ends before a print: give {least} or lower gaps")
        super().__init__(vocab_size=len(self.tokens), seq_len=length, **stream)

    def text(self, ids: Sequence[int] | np.ndarray) -> str:
        """Return the session that token ids stand for."""
        return "".join(self.tokens[i] for i in ids)

    def _lines(self) -> list[tuple[str, ...]]:
        """List the symbols of each line: first assignments, permutations, prints, printed values."""
        names, values = ascii_lowercase[: self.variables], list(map(str, range(self.variables)))
        lines = [(">>> ", name, " = ", value, "\n") for name in names for value in values]
        self._first_move = len(lines)

        def separated(variables: np.ndarray) -> list[str]:
            return [symbol for i in variables for symbol in (", ", names[i])][1:]

        for images in self._moves[:-1]:
            targets = np.flatnonzero(images != np.arange(self.variables))
            lines.append((">>> ", *separated(targets), " = ", *separated(images[targets]), "\n"))
        self._first_print = len(lines)
        lines += [(">>> ", "print(", name, ")", "\n") for name in names]
        self._first_value = len(lines)
        return lines + [(value, "\n") for value in values]

    def _generate(self, keys: np.ndarray) -> Batch:
        n, length = self.variables, self.seq_len + 1  # one more, the last label
        drawn = draw(keys, 1 + n + length)
        gap = self.gaps[below(drawn[0], len(self.gaps))]
        state = without_replacement(drawn[1 : 1 + n], n)  # [b, n]: the value of each variable
        lines = np.empty((len(keys), n + length), dtype=np.int64)
        lines[:, :n] = np.arange(n) * n + state
        value = np.zeros(len(keys), dtype=np.int64)
        # A cycle has `gap` permutations, a print and the printed value. One draw is enough for a line.
        for j, draws in enumerate(drawn[1 + n :]):
            phase = j % (gap + 2)
            move = np.where(phase < gap, below(draws, len(self._moves) - 1), len(self._moves) - 1)
            variable = below(draws, n)
            state = np.take_along_axis(state, self._moves[move], axis=1)
            lines[:, n + j] = np.select(
                [phase < gap, phase == gap],
                [self._first_move + move, self._first_print + variable],
                self._first_value + value,
            )
            value = state[np.arange(len(keys)), variable]
        ids = self._ids[lines]  # [b, lines, symbols]
        revealed = np.zeros(ids.shape, dtype=bool)
        revealed[..., 0] = lines >= self._first_value
        ids, revealed = ids.reshape(len(keys), -1), revealed.reshape(len(keys), -1)
        kept = (ids >= 0) & ((ids >= 0).cumsum(1) <= length)
        ids, revealed = (array[kept].reshape(len(keys), length) for array in (ids, revealed))
        labels = ids[:, 1:] if self.label_all else np.where(revealed[:, 1:], ids[:, 1:], IGNORE)
        return Batch.of(ids[:, :-1].copy(), labels.copy(), moves_between_reveals=gap, length=self.seq_len)
