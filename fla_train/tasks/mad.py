"""The six tasks of Mechanistic Architecture Design (MAD; Poli et al., arXiv 2403.17844).

DeltaNet (arXiv 2406.06484) reports them in table 1: in-context and noisy recall (`InContextRecall`), fuzzy
recall, selective copying, compression and memorization.

Three things differ from the published code: compression asks for its tokens one by one (there, a separate
network decodes one vector, which a language model can't do), and noise fills single places. In fuzzy recall
the last key has always come before; the published generator leaves it out of some sequences.
"""

from typing import Any

import numpy as np

from fla_train.tasks.draws import below, draw, stream_keys, without_replacement
from fla_train.tasks.task import IGNORE, Batch, Task

_MAP_SEED = 12345  # memorization: training and test sets share one map of keys to values


class InContextRecall(Task):
    """Keys and their values one after another; a repeated key must be answered by its earlier value.

    Keys are the first half of the vocabulary, values the second, and noise ids follow. Each sequence has a
    separate map of keys to values, and draws keys with replacement. In noisy recall, a noise token
    replaces a pair with probability `noise_share`, except in sequences that would then repeat no key.

    The label of a value is at its key.

    Args:
        vocab_size: number of key and value ids together, even; noise ids are additional.
        length: tokens; the last pair may be cut.
        noise_share, noise_vocab: probability of noise, and number of noise ids.
        label_all: label every token with the next one, as the published training sets do; otherwise only
            values of keys seen before, as the test sets do.
        stream: `seed` and `num_sequences`, see Task.

    Raises:
        ValueError: a sequence might repeat no key, or an option is out of range.
    """

    slice_key = "length"

    def __init__(
        self,
        vocab_size: int = 16,
        length: int = 128,
        *,
        noise_share: float = 0.0,
        noise_vocab: int = 16,
        label_all: bool = False,
        **stream: Any,
    ):
        if vocab_size < 4 or vocab_size % 2 or not 0 <= noise_share < 1 or noise_vocab < 1:
            raise ValueError("recall needs even vocab_size >= 4, noise_vocab >= 1 and noise_share in [0, 1)")
        self.half = vocab_size // 2
        # With fewer places than keys, the probability that no key repeats is below exp(-places^2 / (2 keys)).
        places = length * (1 - noise_share) / 2
        if places < self.half + 1 and places**2 < 40 * self.half:
            raise ValueError(f"length {length} is too short for one of {self.half} keys to come again")
        noise_ids = noise_vocab if noise_share else 0
        super().__init__(vocab_size=vocab_size + noise_ids, seq_len=length, **stream)
        self.noise_share, self.noise_vocab, self.label_all = noise_share, noise_vocab, label_all

    def _generate(self, keys: np.ndarray) -> Batch:
        n, length, places = len(keys), self.seq_len, self.seq_len
        drawn = draw(keys, 2 * self.half + 3 * places)
        for_keys, for_values, for_choice, for_noise, for_ids = np.split(
            drawn, np.cumsum([self.half, self.half, places, places])
        )
        key_ids = without_replacement(for_keys, self.half)
        value_ids = self.half + below(for_values, self.half).T
        choice = below(for_choice, self.half).T  # [n, places]: the pair of each place
        noise = (for_noise / 2.0**32 < self.noise_share).T
        starts, seen = _layout(noise, choice, self.half)
        noise[~(seen & ~noise & (starts + 1 < length)).any(1)] = False  # a row needs a label
        starts, seen = _layout(noise, choice, self.half)

        inputs = np.zeros((n, length + 2), dtype=np.int64)  # with room for a cut pair
        values = np.full_like(inputs, IGNORE)  # the value at each value whose key was seen before
        inside = starts < length
        row, place = np.nonzero(inside & noise)
        inputs[row, starts[row, place]] = 2 * self.half + below(for_ids, self.noise_vocab)[place, row]
        row, place = np.nonzero(inside & ~noise)
        pair, start = choice[row, place], starts[row, place]
        inputs[row, start], inputs[row, start + 1] = key_ids[row, pair], value_ids[row, pair]
        values[row, start + 1] = np.where(seen[row, place], value_ids[row, pair], IGNORE)
        labels = (inputs if self.label_all else values)[:, 1 : length + 1].copy()
        labels[:, -1] = IGNORE  # what follows the end is cut
        return Batch.of(inputs[:, :length].copy(), labels, length=self.seq_len)


class FuzzyRecall(Task):
    """Recall of words: keys and values of several letters, one after another; the last key is repeated.

    A key is a word of different letters of the first half of the vocabulary, and a value one of the second.
    Each place draws a new key. If it happens to be an earlier key, it keeps its value. One pair, at a random
    place, is repeated at the end. Shorter sequences begin with blanks (the last id).

    The label of a value's letter is one token earlier.

    Args:
        vocab_size: ids with the blank; half of the others are letters of keys.
        length: tokens.
        motif: length limit of keys and values, in letters. The lengths of values are uniform from 1.
        training: use keys of 1 to `motif` letters and a label at every token, as in the published training
            sets; otherwise keys of `motif` letters, and labels at the values of keys seen before.
        stream: `seed` and `num_sequences`, see Task.

    Raises:
        ValueError: there are too few letters, or no room for a pair before the last one.
    """

    slice_key = "length"

    def __init__(
        self,
        vocab_size: int = 16,
        length: int = 128,
        *,
        motif: int = 3,
        training: bool = False,
        **stream: Any,
    ):
        self.half = (vocab_size - 1) // 2
        if motif < 1 or self.half < motif or length <= 4 * motif:
            raise ValueError("fuzzy recall needs motif >= 1, vocab_size > 2 motif and length > 4 motif")
        super().__init__(vocab_size=vocab_size, seq_len=length, **stream)
        self.motif, self.training = motif, training

    def _generate(self, keys: np.ndarray) -> Batch:
        n, motif, places = len(keys), self.motif, self.seq_len // 2
        for_probe, drawn = np.split(draw(keys, 1 + (places + 1) * (2 + 2 * motif)), [1])
        pairs = [self._pair(part) for part in np.split(drawn, places + 1)]
        # The probe is the pair that is repeated at the end.
        (probe, probe_key), longest = pairs.pop(), 2 * motif
        room = self.seq_len - (probe >= 0).sum(1) - longest  # a place begins before it
        probe_from = below(for_probe[0], room)

        sequence = np.full((n, self.seq_len + 1), self.vocab_size - 1, dtype=np.int64)
        asked = np.zeros_like(sequence, dtype=bool)
        rows, end, has_probe = np.arange(n), np.zeros(n, dtype=np.int64), np.zeros(n, dtype=bool)
        known_keys, known_values = np.full((n, places + 1), -1), np.full((n, places + 1, motif), -1)

        def append(place: int, pair: np.ndarray, key: np.ndarray, chosen: np.ndarray) -> None:
            """Append a key and its value to the rows `chosen`; mark values of known keys in `asked`."""
            nonlocal end
            same = known_keys == key[:, None]
            again = same.any(1)
            value = np.where(again[:, None], known_values[rows, same.argmax(1)], pair[:, motif:])
            known_keys[chosen, place], known_values[chosen, place] = key[chosen], value[chosen]
            for i, letter in enumerate(np.concatenate([pair[:, :motif], value], axis=1).T):
                has = chosen & (letter >= 0)
                sequence[rows[has], end[has]] = letter[has]
                asked[rows[has], end[has]] = again[has] & (i >= motif)
                end = end + has

        for place, (pair, key) in enumerate(pairs):
            unfinished = end < room
            # Insert the probe at the first place from `probe_from` on, or else at the last place.
            due = unfinished & ~has_probe & ((end >= probe_from) | (end + longest >= room))
            pair, key = np.where(due[:, None], probe, pair), np.where(due, probe_key, key)
            is_probe = key == probe_key  # also where its key was drawn by chance
            has_probe |= unfinished & is_probe
            pair[is_probe] = probe[is_probe]
            append(place, pair, key, unfinished)
        append(places, probe, probe_key, np.full(n, True))
        # Rotate every row so that it ends at the last token, with the blanks in front.
        rotated = (np.arange(self.seq_len + 1) + end[:, None]) % (self.seq_len + 1)
        sequence, asked = np.take_along_axis(sequence, rotated, 1), np.take_along_axis(asked, rotated, 1)
        labels = sequence[:, 1:] if self.training else np.where(asked, sequence, IGNORE)[:, 1:]
        return Batch.of(sequence[:, :-1].copy(), labels.copy(), length=self.seq_len)

    def _pair(self, draws: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Draw letters [n, 2 motif] of a key and a value, -1 behind their ends, and the key's number [n]."""
        sizes, for_key, for_value = np.split(draws, [2, 2 + self.motif])
        place = np.arange(self.motif)
        key_size = 1 + below(sizes[0], self.motif) if self.training else np.full(draws.shape[1], self.motif)
        key = np.where(place < key_size[:, None], without_replacement(for_key, self.half), -1)
        value = self.half + without_replacement(for_value, self.vocab_size - 1 - self.half)
        value = np.where(place <= below(sizes[1], self.motif)[:, None], value, -1)
        return np.concatenate([key, value], axis=1), (key + 1) @ (self.half + 1) ** place


class SelectiveCopying(Task):
    """Tokens scattered among blanks, which the model repeats in order after the copy token, one per blank.

    Ids: 0 .. V - 3 are tokens, V - 2 is the blank and V - 1 the copy token.
    """

    slice_key = "length"

    def __init__(self, vocab_size: int = 16, length: int = 256, copies: int = 16, **stream: Any):
        if vocab_size < 3 or copies < 1 or length < 2 * copies + 1:
            raise ValueError("selective copying needs 3 ids or more and a length of 2 copies + 1 or more")
        super().__init__(vocab_size=vocab_size, seq_len=length, **stream)
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
    """`length` tokens, then the compression token, then a query for each token, in random order.

    The label of a query is the token that it asks for.

    Ids: 0 .. V - 1 are tokens, V is the compression token and V + 1 + i the query for token i. seq_len is
    2 length + 1.
    """

    slice_key = "length"

    def __init__(self, vocab_size: int = 16, length: int = 32, **stream: Any):
        if vocab_size < 2 or length < 1:
            raise ValueError("compression needs 2 ids or more and a length of 1 or more")
        super().__init__(vocab_size=vocab_size + 1 + length, seq_len=2 * length + 1, **stream)
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
    """Keys, each followed by a blank whose label is the key's value; one map for all sequences and seeds.

    Ids: 0 .. K - 1 are keys, with K = (V - 1) // 2, K .. V - 2 are values, a different one for each key, and
    V - 1 is the blank.
    """

    slice_key = "length"

    def __init__(self, vocab_size: int = 256, length: int = 32, **stream: Any):
        if vocab_size < 3 or length < 2 or length % 2:
            raise ValueError("memorization needs 3 ids or more and an even length of 2 or more")
        super().__init__(vocab_size=vocab_size, seq_len=length, **stream)
        self.keys = (vocab_size - 1) // 2
        values = without_replacement(draw(stream_keys(_MAP_SEED, [0]), self.keys), vocab_size - 1 - self.keys)
        self.values = self.keys + values[0]

    def _generate(self, keys: np.ndarray) -> Batch:
        chosen = below(draw(keys, self.seq_len // 2), self.keys).T
        inputs = np.full((len(keys), self.seq_len), self.vocab_size - 1, dtype=np.int64)
        inputs[:, ::2] = chosen
        labels = np.full_like(inputs, IGNORE)
        labels[:, 1::2] = self.values[chosen]
        return Batch.of(inputs, labels, length=self.seq_len)


def _layout(noise: np.ndarray, choice: np.ndarray, pairs: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the first token of each place [n, m], and whether its pair came before. Noise is one token."""
    tokens = np.where(noise, 1, 2)
    return np.cumsum(tokens, axis=1) - tokens, _seen_before(np.where(noise, -1, choice), pairs)


def _seen_before(choice: np.ndarray, values: int) -> np.ndarray:
    """Return whether choice[i, j] occurs in choice[i, :j]: [n, m] bool; False for -1."""
    places = np.arange(choice.shape[1])
    first = np.full((len(choice), values + 1), len(places))  # the first place of each value; -1 is the last
    np.minimum.at(first, (np.arange(len(choice))[:, None], choice), places)
    return (choice >= 0) & (np.take_along_axis(first, choice, axis=1) < places)
