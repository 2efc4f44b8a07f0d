"""Multi-query associative recall: key-value pairs, then the keys again, each to be answered by its value.

The task is from Arora et al. (Zoology, arXiv 2312.04927), and DeltaNet (arXiv 2406.06484) uses it in section
4.1, figure 2.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from fla_train.tasks.draws import below, draw, weighted_without_replacement, without_replacement
from fla_train.tasks.task import IGNORE, Batch, Tally, Task

_BLANK = 0  # no key and no value: between queries, and after the end of shorter sequences


@dataclass(frozen=True)
class MQARSetting:
    """Sequences of `seq_len` tokens with `num_kv_pairs` pairs. `share` is their weight in a mixture."""

    seq_len: int
    num_kv_pairs: int
    share: float = 1.0


class MQAR(Task):
    """Multi-query associative recall, one setting or a mixture.

    A sequence begins with its pairs: key, value, key, value, ... Keys are distinct ids in [1, V/2), values
    distinct ids in [V/2, V). Each key is then repeated once, at an even offset from the end of the pairs, and
    labelled with its value. The offsets are drawn without replacement with weight rank^(power - 1), so most
    queries are close to the pairs. Other positions are blank (id 0) or, with `random_non_queries`, a random
    id of the whole vocabulary.

    In a mixture each sequence draws its setting by share. Shorter sequences are padded with blanks on the
    right.

    Args:
        settings: one or more, also as plain lists [seq_len, num_kv_pairs] or [seq_len, num_kv_pairs, share].
            configs/experiment/mqar has those of the papers.
        vocab_size: V.
        power: exponent of the distribution of offsets, > 0; 1 is uniform.
        random_non_queries: fill other positions with random ids.
        stream: `seed` and `num_sequences`, see Task.

    Raises:
        ValueError: a setting has no room for its pairs and queries, or not enough keys.
    """

    slice_key = "num_kv_pairs"

    def __init__(
        self,
        settings: Sequence[MQARSetting | tuple[int, int] | tuple[int, int, float]],
        *,
        vocab_size: int = 8192,
        power: float = 0.01,
        random_non_queries: bool = True,
        **stream: Any,
    ):
        if not settings or power <= 0:
            raise ValueError("MQAR needs at least one setting and a power above 0")
        settings = [s if isinstance(s, MQARSetting) else MQARSetting(*s) for s in settings]
        self._first_value = vocab_size // 2
        for setting in settings:
            self._check(setting)
        longest = max(setting.seq_len for setting in settings)
        super().__init__(vocab_size=vocab_size, seq_len=longest, **stream)
        self.settings = tuple(settings)
        self.power = power
        self.random_non_queries = random_non_queries
        shares = np.array([setting.share for setting in settings], dtype=np.float64)
        self._upper = np.cumsum(shares) / shares.sum()  # setting i is drawn below _upper[i]

    def summary(self, tally: Tally) -> dict[str, float | list[float]]:
        """Return accuracy (mean over sequences of the fraction of right queries) and sequence_accuracy."""
        return {"accuracy": tally.mean_row_accuracy, "sequence_accuracy": tally.sequence_accuracy}

    def _check(self, setting: MQARSetting) -> None:
        pairs = setting.num_kv_pairs
        if setting.seq_len % 2 or pairs < 1 or 4 * pairs > setting.seq_len or setting.share <= 0:
            raise ValueError(f"{setting}: seq_len must be even and at least 4 num_kv_pairs, share above 0")
        if pairs > self._first_value - 1:
            raise ValueError(f"{setting}: a vocabulary of {2 * self._first_value} has too few keys")

    def _generate(self, keys: np.ndarray) -> Batch:
        input_ids = np.full((len(keys), self.seq_len), _BLANK, dtype=np.int64)
        labels = np.full_like(input_ids, IGNORE)
        # Draw 0 of each stream chooses the setting, the later ones fill the sequence.
        choice = np.searchsorted(self._upper, draw(keys, 1)[0] / 2.0**32, side="right")
        for number in np.unique(choice):
            setting, rows = self.settings[number], np.flatnonzero(choice == number)
            inputs, targets = self._sequences(keys[rows], setting)
            input_ids[rows, : setting.seq_len] = inputs
            labels[rows, : setting.seq_len] = targets
        lengths = np.array([setting.seq_len for setting in self.settings])
        pairs = np.array([setting.num_kv_pairs for setting in self.settings])
        return Batch.of(input_ids, labels, length=lengths[choice], num_kv_pairs=pairs[choice])

    def _sequences(self, keys: np.ndarray, setting: MQARSetting) -> tuple[np.ndarray, np.ndarray]:
        """Draw inputs and labels [b, seq_len] of the streams `keys` [b]."""
        n, pairs, context = len(keys), setting.num_kv_pairs, 2 * setting.num_kv_pairs
        places = (setting.seq_len - context) // 2  # even offsets after the pairs
        drawn = draw(keys, 1 + 2 * pairs + places + setting.seq_len)[1:]
        for_keys, for_values, for_gaps, for_blanks = np.split(drawn, np.cumsum([pairs, pairs, places]))
        key_ids = 1 + without_replacement(for_keys, self._first_value - 1)  # [b, pairs]
        value_ids = self._first_value + without_replacement(for_values, self.vocab_size - self._first_value)
        weights = np.arange(1, places + 1) ** (self.power - 1.0)
        queries = context + 2 * weighted_without_replacement(for_gaps, weights, pairs)

        inputs = np.full((n, setting.seq_len), _BLANK, dtype=np.int64)
        inputs[:, 0:context:2] = key_ids
        inputs[:, 1:context:2] = value_ids
        np.put_along_axis(inputs, queries, key_ids, axis=1)
        labels = np.full_like(inputs, IGNORE)
        np.put_along_axis(labels, queries, value_ids, axis=1)
        if self.random_non_queries:
            blank = inputs == _BLANK
            inputs[blank] = below(for_blanks, self.vocab_size).T[blank]
        return inputs, labels
