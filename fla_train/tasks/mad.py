"""The six tasks of Mechanistic Architecture Design (MAD; Poli et al., arXiv 2403.17844).

DeltaNet (arXiv 2406.06484) reports them in table 1: in-context, fuzzy and noisy recall (`InContextRecall`),
selective copying, compression and memorization.

Two things differ from the published code: compression asks for its tokens one by one (there, one vector is
decoded by a network of its own, which is no language model), and noise fills single places.
"""

import numpy as np

from fla_train.tasks.draws import below, draw, stream_keys, without_replacement
from fla_train.tasks.task import IGNORE, Batch, Task

_MAP_SEED = 12345  # memorization: training and test sets share one map of keys to values


class InContextRecall(Task):
    """Keys and their values one after another; a key that comes again calls for the value it had.

    The first half of the vocabulary writes keys, the second values; noise ids follow. A sequence has its own
    map of keys to values and draws keys with replacement. With motifs, keys and values are words of 1 up to
    so many tokens (fuzzy recall). With noise, a place holds a noise token with probability `noise_share`
    instead of a pair (noisy recall); a sequence in which then no key comes again gets none.

    The labels of a value stand one token earlier: at the key's last token, and at the value's own.

    Args:
        vocab_size: key and value ids together, even; noise ids come on top.
        length: tokens; the last pair may be cut.
        motif: longest key and longest value.
        noise_share, noise_vocab: share of noise, and how many noise ids.
        label_all: label every token with the next, as the published training sets do; else only values of
            keys seen before, as the test sets do.
        seed, num_sequences: see Task.

    Raises:
        ValueError: if a sequence would have no key twice, or an option is out of range.
    """

    slice_key = "length"

    def __init__(
        self,
        vocab_size: int = 16,
        length: int = 128,
        *,
        motif: int = 1,
        noise_share: float = 0.0,
        noise_vocab: int = 16,
        label_all: bool = False,
        seed: int = 0,
        num_sequences: int | None = None,
    ):
        if vocab_size < 4 or vocab_size % 2 or motif < 1 or not 0 <= noise_share < 1 or noise_vocab < 1:
            raise ValueError(
                "recall needs an even vocab_size of 4 or more, motif and noise_vocab of 1 or more, and a "
                "noise_share in [0, 1)"
            )
        self.half, self.motif = vocab_size // 2, motif
        self.pairs = self.half  # distinct keys of a sequence
        if length * (1 - noise_share) < 2 * motif * (self.pairs + 1):
            raise ValueError(
                f"length {length} has no room for {self.pairs} keys and one again; make it longer"
            )
        noise_ids = noise_vocab if noise_share else 0
        super().__init__(
            vocab_size=vocab_size + noise_ids, seq_len=length, seed=seed, num_sequences=num_sequences
        )
        self.noise_share, self.noise_vocab, self.label_all = noise_share, noise_vocab, label_all
        # Words of 1 .. motif letters are numbered by length; _firsts[i] is the first number of length i + 1.
        counts = self.half ** np.arange(1, motif + 1)
        self._firsts = np.concatenate([[0], np.cumsum(counts)])

    def _words(self, numbers: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Letters [..., motif] and lengths [...] of words by number."""
        lengths = np.searchsorted(self._firsts, numbers, side="right")
        rest = numbers - self._firsts[lengths - 1]
        letters = np.stack([rest // self.half**i % self.half for i in range(self.motif)], axis=-1)
        return letters, lengths

    def _generate(self, keys: np.ndarray) -> Batch:
        n, length, places = len(keys), self.seq_len, self.seq_len
        drawn = draw(keys, 2 * self.pairs + 3 * places)
        for_keys, for_values, for_choice, for_noise, for_ids = np.split(
            drawn, np.cumsum([self.pairs, self.pairs, places, places])
        )
        rows = np.arange(n)[:, None]
        key_words, key_lengths = self._words(without_replacement(for_keys, int(self._firsts[-1])))
        value_words, value_lengths = self._words(below(for_values, int(self._firsts[-1])).T)
        choice = below(for_choice, self.pairs).T  # [n, places]: the pair of each place
        noise = (for_noise / 2.0**32 < self.noise_share).T
        sizes = (key_lengths + value_lengths)[rows, choice]
        starts, seen = _layout(noise, choice, sizes, self.pairs)
        repeated = seen & ~noise & (starts + key_lengths[rows, choice] < length)
        noise[~repeated.any(1)] = False  # too few pairs: a row needs something to answer
        starts, seen = _layout(noise, choice, sizes, self.pairs)

        inputs = np.zeros((n, length + 2 * self.motif), dtype=np.int64)  # with room for a cut pair
        values = np.full_like(inputs, IGNORE)  # at a value's tokens: the token, if its key was seen before
        inside = starts < length
        row, place = np.nonzero(inside & noise)
        inputs[row, starts[row, place]] = 2 * self.half + below(for_ids, self.noise_vocab)[place, row]
        row, place = np.nonzero(inside & ~noise)
        pair, start = choice[row, place], starts[row, place]
        key_length = key_lengths[row, pair]
        for i in range(self.motif):
            has = i < key_length
            inputs[row[has], start[has] + i] = key_words[row[has], pair[has], i]
            has = i < value_lengths[row, pair]
            at, token = start[has] + key_length[has] + i, self.half + value_words[row[has], pair[has], i]
            inputs[row[has], at] = token
            values[row[has], at] = np.where(seen[row[has], place[has]], token, IGNORE)
        labels = (inputs if self.label_all else values)[:, 1 : length + 1].copy()
        labels[:, -1] = IGNORE  # what follows the end is cut
        return Batch.of(inputs[:, :length].copy(), labels, length=self.seq_len)


class SelectiveCopying(Task):
    """Tokens scattered among blanks; after the copy token, give them in their order, one at each blank.

    Ids: 0 .. V - 3 tokens, V - 2 the blank, V - 1 the copy token.
    """

    slice_key = "length"

    def __init__(
        self,
        vocab_size: int = 16,
        length: int = 256,
        copies: int = 16,
        *,
        seed: int = 0,
        num_sequences: int | None = None,
    ):
        if vocab_size < 3 or copies < 1 or length < 2 * copies + 1:
            raise ValueError("selective copying needs 3 ids or more and a length of 2 copies + 1 or more")
        super().__init__(vocab_size=vocab_size, seq_len=length, seed=seed, num_sequences=num_sequences)
        self.copies = copies

    def _generate(self, keys: np.ndarray) -> Batch:
        n, room = len(keys), self.seq_len - self.copies - 1
        for_places, for_tokens = np.split(draw(keys, 2 * self.copies), 2)
        places = np.sort(without_replacement(for_places, room), axis=1)
        tokens = below(for_tokens, self.vocab_size - 2).T
        inputs = np.full((n, self.seq_len), self.vocab_size - 2, dtype=np.int64)
        np.put_along_axis(inputs, places, tokens, axis=1)
        inputs[:, room] = self.vocab_size - 1
        labels = np.full_like(inputs, IGNORE)
        labels[:, room + 1 :] = tokens
        return Batch.of(inputs, labels, length=self.seq_len)


class Compression(Task):
    """Read `length` tokens, then the compression token, then give the token of each queried place.

    Ids: 0 .. V - 1 tokens, V the compression token, V + 1 + i the question for place i; all places are
    queried, in random order. seq_len is 2 length + 1.
    """

    slice_key = "length"

    def __init__(
        self, vocab_size: int = 16, length: int = 32, *, seed: int = 0, num_sequences: int | None = None
    ):
        if vocab_size < 2 or length < 1:
            raise ValueError("compression needs 2 ids or more and a length of 1 or more")
        super().__init__(
            vocab_size=vocab_size + 1 + length, seq_len=2 * length + 1, seed=seed, num_sequences=num_sequences
        )
        self.letters, self.length = vocab_size, length

    def _generate(self, keys: np.ndarray) -> Batch:
        for_tokens, for_order = np.split(draw(keys, 2 * self.length), 2)
        tokens = below(for_tokens, self.letters).T
        order = without_replacement(for_order, self.length)
        middle = np.full((len(keys), 1), self.letters)
        inputs = np.concatenate([tokens, middle, self.letters + 1 + order], axis=1)
        labels = np.full_like(inputs, IGNORE)
        labels[:, self.length + 1 :] = np.take_along_axis(tokens, order, axis=1)
        return Batch.of(inputs, labels, length=self.seq_len)


class Memorization(Task):
    """Keys, each followed by a blank at which its value is due; one map for all sequences and seeds.

    Ids: 0 .. K - 1 keys, K .. 2K - 1 values with K = (V - 1) // 2, and V - 1 the blank.
    """

    slice_key = "length"

    def __init__(
        self, vocab_size: int = 256, length: int = 32, *, seed: int = 0, num_sequences: int | None = None
    ):
        if vocab_size < 3 or length < 2 or length % 2:
            raise ValueError("memorization needs 3 ids or more and an even length of 2 or more")
        super().__init__(vocab_size=vocab_size, seq_len=length, seed=seed, num_sequences=num_sequences)
        self.keys = (vocab_size - 1) // 2
        self.values = self.keys + below(draw(stream_keys(_MAP_SEED, [0]), self.keys), self.keys)[:, 0]

    def _generate(self, keys: np.ndarray) -> Batch:
        chosen = below(draw(keys, self.seq_len // 2), self.keys).T
        inputs = np.full((len(keys), self.seq_len), self.vocab_size - 1, dtype=np.int64)
        inputs[:, ::2] = chosen
        labels = np.full_like(inputs, IGNORE)
        labels[:, 1::2] = self.values[chosen]
        return Batch.of(inputs, labels, length=self.seq_len)


def _layout(
    noise: np.ndarray, choice: np.ndarray, sizes: np.ndarray, pairs: int
) -> tuple[np.ndarray, np.ndarray]:
    """For each place [n, m]: its first token, and whether its pair came before. Noise takes one token."""
    tokens = np.where(noise, 1, sizes)
    return np.cumsum(tokens, axis=1) - tokens, _seen_before(np.where(noise, -1, choice), pairs)


def _seen_before(choice: np.ndarray, values: int) -> np.ndarray:
    """[n, m] bool: whether choice[i, j] occurs in choice[i, :j]; -1 counts as nothing."""
    seen = np.zeros((len(choice), values), dtype=bool)
    result = np.zeros(choice.shape, dtype=bool)
    rows = np.arange(len(choice))
    for j in range(choice.shape[1]):
        real = choice[:, j] >= 0
        result[real, j] = seen[rows[real], choice[real, j]]
        seen[rows[real], choice[real, j]] = True
    return result
