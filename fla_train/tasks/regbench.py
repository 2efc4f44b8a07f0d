"""RegBench (Akyurek et al., arXiv 2401.12973): learn a regular language from strings in the context."""

from typing import Any

import numpy as np
import torch

from fla_train.tasks.task import IGNORE, Batch, Tally, Task

SYMBOLS = 18
SEPARATOR, PAD = SYMBOLS, SYMBOLS + 1
NODES, ALPHABET, EDGES = (4, 12), (4, 18), (1, 3)  # each range with both ends
STRINGS, STRING_LENGTH = (10, 19), (1, 49)


class RegBench(Task):
    """Strings of one random automaton, joined by separators. The model predicts each next symbol.

    An automaton has 4 to 12 states, an alphabet of 4 to 18 of the 18 symbols, and 1 to 3 edges out of each
    state, with different symbols and different targets, none to the state itself. A string of 1 to 49 symbols
    walks from state 0 along edges drawn uniformly. A sequence is 10 to 19 strings, cut at `length`. Each
    sequence has a different automaton, so training and test sequences share none.

    A prediction is right if the automaton allows the symbol there (DFA accuracy). Separators have no label,
    because they may follow any string.

    Args:
        length: tokens, with padding; 950 holds every sequence.
        stream: `seed` and `num_sequences`, see Task.
    """

    headline = "dfa_accuracy"
    slice_key = "length"

    def __init__(self, length: int = 512, **stream: Any):
        if length < 3:
            raise ValueError(f"length {length} is too short for strings; use 3 or more")
        super().__init__(vocab_size=SYMBOLS + 2, seq_len=length, **stream)

    def judge(self, predictions: torch.Tensor, batch: Batch) -> torch.Tensor:
        """Return `predictions` with the label instead of each allowed symbol."""
        allowed = batch.metadata["allowed"]  # [B, T, SYMBOLS]
        inside = (predictions >= 0) & (predictions < SYMBOLS)
        right = allowed.gather(2, predictions.clamp(0, SYMBOLS - 1)[..., None])[..., 0] & inside
        return torch.where(right, batch.labels, predictions)

    def summary(self, tally: Tally) -> dict[str, float | list[float]]:
        """Return dfa_accuracy: the fraction of predicted symbols that the automaton allows."""
        return {"dfa_accuracy": tally.token_accuracy}

    def _generate(self, keys: np.ndarray) -> Batch:
        n, length = len(keys), self.seq_len
        inputs = np.full((n, length + 1), PAD, dtype=np.int64)
        allowed = np.zeros((n, length, SYMBOLS), dtype=bool)
        for row, key in enumerate(keys):
            _write_strings(np.random.default_rng(int(key)), inputs[row], allowed[row])
        following = inputs[:, 1:]
        labels = np.where(following < SYMBOLS, following, IGNORE)
        return Batch.of(inputs[:, :-1].copy(), labels, length=length, allowed=allowed)


def random_automaton(rng: np.random.Generator) -> list[dict[int, int]]:
    """Draw a deterministic automaton, all of whose states accept: for each state, next states by symbol."""
    states = int(rng.integers(*NODES, endpoint=True))
    alphabet = rng.permutation(SYMBOLS)[: int(rng.integers(*ALPHABET, endpoint=True))]
    edges = []
    for state in range(states):
        count = int(rng.integers(*EDGES, endpoint=True))
        targets = rng.permutation(np.delete(np.arange(states), state))[:count]
        symbols = rng.permutation(alphabet)[:count]
        edges.append(dict(zip(symbols.tolist(), targets.tolist(), strict=True)))
    return edges


def _write_strings(rng: np.random.Generator, tokens: np.ndarray, allowed: np.ndarray) -> None:
    """Fill tokens [T + 1]; allowed[t] marks the symbols that may follow tokens[t]."""
    automaton, at = random_automaton(rng), 0
    for number in range(int(rng.integers(*STRINGS, endpoint=True))):
        state = 0
        if number:
            if at >= len(tokens):
                return
            tokens[at] = SEPARATOR
            at += 1
        for _ in range(int(rng.integers(*STRING_LENGTH, endpoint=True))):
            if at >= len(tokens):
                return
            choices = automaton[state]
            if at:
                allowed[at - 1, list(choices)] = True
            symbol = list(choices)[int(rng.integers(len(choices)))]
            tokens[at], state = symbol, choices[symbol]
            at += 1
