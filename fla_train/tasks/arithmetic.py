"""Random expressions mod 5 and their values, for a whole batch at a time (arXiv 2411.12537 appendix E.1.2).

Both writers take draws [2, L, n] uint32 and lengths [n] (tokens before "=", at most L) and return the tokens
[n, L] int64, of which row i means its first lengths[i], and the value's token id [n] int64.
"""

import numpy as np

from fla_train.tasks.draws import below

MODULUS = 5

FLAT_TOKENS = ("[PAD]", "+", "-", "*", "=", "0", "1", "2", "3", "4")
_FLAT_OPERATOR, _FLAT_DIGIT = 1, 5  # ids of the first operator and the first digit

BRACKET_TOKENS = ("0", "1", "2", "3", "4", "+", "-", "*", "(", ")", "=", "[PAD]")
_OPERATOR, _MINUS, _OPEN, _CLOSE = 5, 6, 8, 9


def write_flat(draws: np.ndarray, lengths: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Digits joined by +, - and *, without brackets; * binds first. Lengths are odd."""
    text = np.empty((len(lengths), draws.shape[1]), dtype=np.int64)
    digits = below(draws[0, ::2], MODULUS)  # [terms, n]
    operators = below(draws[0, 1::2], 3)
    text[:, ::2] = digits.T + _FLAT_DIGIT
    text[:, 1::2] = operators.T + _FLAT_OPERATOR

    # The value of the text so far is total + term; `term` is the product that a * would go on with.
    total, term = np.zeros_like(digits[0]), digits[0]
    values = term.copy()
    for i in range(1, len(digits)):
        operator, digit = operators[i - 1], digits[i]
        times = operator == 2
        total = np.where(times, total, total + term) % MODULUS
        term = np.where(times, term * digit, np.where(operator == 1, -digit, digit)) % MODULUS
        values = np.where(lengths > 2 * i, (total + term) % MODULUS, values)
    return text, values + _FLAT_DIGIT


def write_brackets(
    draws: np.ndarray, lengths: np.ndarray, operators: int = 2
) -> tuple[np.ndarray, np.ndarray]:
    """Nested (L op R); the leaves are d, -d, (d) and (-d). Operators: 2 draws + and -, 3 also *.

    An expression of 5 tokens or more splits the tokens between its operands uniformly, as in Deletang et al.
    (arXiv 2207.02098). All expressions of the batch that lie at one depth are written together; an expression
    is known by its row and the place where it starts, which also picks its draws.
    """
    n = len(lengths)
    text = np.zeros((n, draws.shape[1]), dtype=np.int64)
    values = np.zeros_like(text)  # at the place where an expression starts, its value
    rows, starts, sizes = np.arange(n), np.zeros(n, dtype=np.int64), lengths
    splits = []
    while len(rows):
        leaf = sizes < 5
        _write_leaves(text, values, draws, rows[leaf], starts[leaf], sizes[leaf])
        rows, starts, sizes = rows[~leaf], starts[~leaf], sizes[~leaf]
        left_sizes = 1 + below(draws[0, starts, rows], sizes - 4)
        chosen = below(draws[1, starts, rows], operators)
        lefts, rights = starts + 1, starts + 2 + left_sizes
        text[rows, starts] = _OPEN
        text[rows, rights - 1] = _OPERATOR + chosen
        text[rows, starts + sizes - 1] = _CLOSE
        splits.append((rows, starts, rights, chosen))
        rows = np.concatenate([rows, rows])
        starts = np.concatenate([lefts, rights])
        sizes = np.concatenate([left_sizes, sizes - left_sizes - 3])
    for rows, starts, rights, chosen in reversed(splits):
        left, right = values[rows, starts + 1], values[rows, rights]
        values[rows, starts] = np.choose(chosen, [left + right, left - right, left * right]) % MODULUS
    return text, values[:, 0]


def _write_leaves(
    text: np.ndarray,
    values: np.ndarray,
    draws: np.ndarray,
    rows: np.ndarray,
    starts: np.ndarray,
    sizes: np.ndarray,
) -> None:
    """Sizes 1 to 4 are d, -d, (d) and (-d)."""
    digits = below(draws[0, starts, rows], MODULUS)
    bracketed, negative = sizes >= 3, sizes % 2 == 0
    text[rows[bracketed], starts[bracketed]] = _OPEN
    text[rows[bracketed], (starts + sizes - 1)[bracketed]] = _CLOSE
    text[rows[negative], (starts + bracketed)[negative]] = _MINUS
    text[rows, starts + bracketed + negative] = digits
    values[rows, starts] = np.where(negative, -digits, digits) % MODULUS
