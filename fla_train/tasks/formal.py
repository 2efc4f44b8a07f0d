"""Formal languages: read a word of random length, and give one answer at its end.

They are used in DeltaProduct (arXiv 2502.10297), section 5.2 and appendix C.2, and by Grazzi et al. (arXiv
2411.12537), section 5.1 and appendix E.1. The tasks are from Deletang et al. (arXiv 2207.02098).
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from fla_train.tasks.arithmetic import (
    BRACKET_TOKENS,
    FLAT_TOKENS,
    MODULUS,
    split_alphabet,
    write_brackets,
    write_flat,
)
from fla_train.tasks.draws import below, draw
from fla_train.tasks.task import IGNORE, Batch, Tally, Task

TRAIN_LENGTHS = (3, 40)

_BIT_TOKENS = ("[PAD]", "0", "1")
_CYCLE = 5
_CYCLE_TOKENS = ("[PAD]", "stay", "forward", "back", *map(str, range(_CYCLE)))


@dataclass(frozen=True)
class Language:
    """One formal language.

    Attributes:
        tokens: the token of each id. "[PAD]" fills up to the longest length. "=" ends the word, if the
            language has it.
        answers: number of possible answers; the papers' chance level is 1 / answers.
        write: (draws [2, L, n] uint32, lengths [n]) -> (words [n, L], answers [n, L]), both token ids. The
            answer at a token is that of the word so far, with its open brackets closed, or IGNORE if that is
            not a word. A language with an `alphabet` gets it as the third argument.
        odd_lengths: whether only odd lengths exist.
        alphabet: the tokens that words are drawn from, one character each; None: it can't be chosen.
    """

    tokens: tuple[str, ...]
    answers: int
    write: Callable[..., tuple[np.ndarray, np.ndarray]]
    odd_lengths: bool = False
    alphabet: str | None = None


class FormalLanguage(Task):
    """A formal language of LANGUAGES: padded words of uniformly drawn lengths, with one label each.

    The label is the token id of the answer. It is at the word's last token: the last bit or action, or "="
    for arithmetic.

    - `parity`: is the number of ones odd?
    - `even_pairs`: is the number of 01 and 10 together odd?
    - `cycle_navigation`: where on a cycle of 5 do the steps end?
    - `modular_arithmetic`: expressions mod 5 in which * binds first; only odd lengths.
    - `modular_arithmetic_brackets`: nested + and -, unary minus.
    - `modular_arithmetic_brackets_times`: the same with *.

    `alphabet` and `label_parts` are for the early stages of a curriculum.

    Args:
        language: a key of LANGUAGES.
        min_length, max_length: tokens of a word without "="; the papers train on 3 to 40 and test on 40 to
            256. seq_len is max_length, plus one for "=".
        stream: `seed` and `num_sequences`, see Task.
        alphabet: for arithmetic, draw only these digits and operators, such as "12+"; None: all.
        label_parts: also label each earlier token at which the word so far, with its open brackets closed,
            has an answer: every bit and action, every digit of flat arithmetic, and with brackets the last
            token of every sub-expression.

    Raises:
        ValueError: the language is unknown, or has no words of these lengths or with this alphabet.
    """

    headline = "scaled_accuracy"
    slice_key = "length"
    length_option = "max_length"

    def __init__(
        self,
        language: str,
        min_length: int = TRAIN_LENGTHS[0],
        max_length: int = TRAIN_LENGTHS[1],
        *,
        alphabet: str | None = None,
        label_parts: bool = False,
        **stream: Any,
    ):
        if language not in LANGUAGES:
            raise ValueError(f"unknown language '{language}'; choose one of {', '.join(LANGUAGES)}")
        self.language = LANGUAGES[language]
        self.lengths = np.arange(min_length, max_length + 1)
        if self.language.odd_lengths:
            self.lengths = self.lengths[self.lengths % 2 == 1]
        if min_length < 1 or len(self.lengths) == 0:
            raise ValueError(f"'{language}' has no words of {min_length} to {max_length} tokens (flat: odd)")
        if alphabet is not None and self.language.alphabet is None:
            raise ValueError(f"'{language}' has no other alphabet; leave out alphabet={alphabet}")
        if alphabet is not None:
            split_alphabet(alphabet)
        self.alphabet = alphabet or self.language.alphabet
        self.label_parts = label_parts
        tokens = self.language.tokens
        self.pad_id = tokens.index("[PAD]")
        self.equals_id = tokens.index("=") if "=" in tokens else None
        self.chance = 1 / self.language.answers
        seq_len = int(self.lengths[-1]) + (self.equals_id is not None)
        super().__init__(vocab_size=len(tokens), seq_len=seq_len, **stream)

    def summary(self, tally: Tally) -> dict[str, float | list[float]]:
        """Return accuracy, and scaled_accuracy (accuracy - c) / (1 - c), which is 0 at the chance level c."""
        accuracy = tally.token_accuracy
        return {"scaled_accuracy": (accuracy - self.chance) / (1 - self.chance), "accuracy": accuracy}

    def _generate(self, keys: np.ndarray) -> Batch:
        n, longest = len(keys), int(self.lengths[-1])
        draws = draw(keys, 1 + 2 * longest)
        lengths = self.lengths[below(draws[0], len(self.lengths))]
        alphabet = [] if self.alphabet is None else [self.alphabet]
        words, answers = self.language.write(draws[1:].reshape(2, longest, n), lengths, *alphabet)

        input_ids = np.full((n, self.seq_len), self.pad_id)
        inside = np.arange(longest) < lengths[:, None]
        input_ids[:, :longest][inside] = words[inside]
        last = lengths - 1
        if self.equals_id is not None:
            last = lengths
            input_ids[np.arange(n), last] = self.equals_id
        labels = np.full_like(input_ids, IGNORE)
        if self.label_parts:
            labels[:, :longest][inside] = answers[inside]
        labels[np.arange(n), last] = answers[np.arange(n), lengths - 1]
        return Batch.of(input_ids, labels, length=lengths)


def _write_parity(draws: np.ndarray, lengths: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    bits = below(draws[0], 2).T
    return bits + 1, bits.cumsum(1) % 2 + 1


def _write_even_pairs(draws: np.ndarray, lengths: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Write bits and answers. Each 01 or 10 changes the bit: their number is odd if the ends differ."""
    bits = below(draws[0], 2).T
    return bits + 1, (bits[:, :1] ^ bits) + 1


def _write_cycle_navigation(draws: np.ndarray, lengths: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    actions = below(draws[0], 3).T
    moves = np.array([0, 1, -1])[actions]
    return actions + 1, moves.cumsum(1) % _CYCLE + _CYCLE_TOKENS.index("0")


_FLAT = Language(FLAT_TOKENS, MODULUS, write_flat, odd_lengths=True, alphabet="01234+-*")
_BRACKETS = Language(BRACKET_TOKENS, MODULUS, write_brackets, alphabet="01234+-")
LANGUAGES = {
    "parity": Language(_BIT_TOKENS, 2, _write_parity),
    "even_pairs": Language(_BIT_TOKENS, 2, _write_even_pairs),
    "cycle_navigation": Language(_CYCLE_TOKENS, _CYCLE, _write_cycle_navigation),
    "modular_arithmetic": _FLAT,
    "modular_arithmetic_brackets": _BRACKETS,
    "modular_arithmetic_brackets_times": replace(_BRACKETS, alphabet="01234+-*"),
}
