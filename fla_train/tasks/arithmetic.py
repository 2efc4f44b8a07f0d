"""Write random expressions mod 5 and their values, a batch at a time (arXiv 2411.12537 appendix E.1.2).

`write_flat` and `write_brackets` have the same arguments and results.

Args:
    draws: [2, L, n] uint32.
    lengths: [n], tokens before "=", at most L.
    alphabet: the digits and operators to draw from.

Returns:
    Two arrays [n, L] int64, whose row i is meaningful up to lengths[i]: the token ids of the expression, and
    the answers. At a token that ends an expression, the answer is the token id of the value of the text so
    far, with its open brackets closed; elsewhere it is IGNORE.
"""

import numpy as np

from fla_train.tasks.draws import below
from fla_train.tasks.task import IGNORE

MODULUS = 5

OPERATORS = "+-*"

FLAT_TOKENS = ("[PAD]", "+", "-", "*", "=", "0", "1", "2", "3", "4")
_FLAT_OPERATOR, _FLAT_DIGIT = 1, 5  # ids of the first operator and the first digit

BRACKET_TOKENS = ("0", "1", "2", "3", "4", "+", "-", "*", "(", ")", "=", "[PAD]")
_OPERATOR, _MINUS, _OPEN, _CLOSE = 5, 6, 8, 9


def write_flat(draws: np.ndarray, lengths: np.ndarray, alphabet: str) -> tuple[np.ndarray, np.ndarray]:
    """Write digits joined by operators, without brackets. Lengths are odd, and * binds first.

    An expression ends at each digit.
    """
    drawn_digits, drawn_operators = split_alphabet(alphabet)
    text = np.empty((len(lengths), draws.shape[1]), dtype=np.int64)
    digits = drawn_digits[below(draws[0, ::2], len(drawn_digits))]  # [terms, n]
    operators = drawn_operators[below(draws[0, 1::2], len(drawn_operators))]
    text[:, ::2] = digits.T + _FLAT_DIGIT
    text[:, 1::2] = operators.T + _FLAT_OPERATOR

    # The value of the text so far is total + term; `term` is the product that a * would continue.
    total, term = np.zeros_like(digits[0]), digits[0]
    answers = np.full_like(text, IGNORE)
    answers[:, 0] = term + _FLAT_DIGIT
    for i in range(1, len(digits)):
        operator, digit = operators[i - 1], digits[i]
        times = operator == 2
        total = np.where(times, total, total + term) % MODULUS
        term = np.where(times, term * digit, np.where(operator == 1, -digit, digit)) % MODULUS
        answers[:, 2 * i] = (total + term) % MODULUS + _FLAT_DIGIT
    return text, answers


def write_brackets(draws: np.ndarray, lengths: np.ndarray, alphabet: str) -> tuple[np.ndarray, np.ndarray]:
    """Write nested expressions (L op R), whose leaves are d, -d, (d) and (-d).

    An expression ends at the last token of each leaf, and at each bracket that closes an (L op R). At its
    end, each bracket that is still open has contributed "L op", so the value of the text so far is an affine
    function of the expression's value: scale * value + shift.

    An expression of 5 tokens or more splits the tokens between its operands uniformly, as in Deletang et al.
    (arXiv 2207.02098). All expressions of the batch at one depth are written together. The row of an
    expression and the position where it starts identify it and choose its draws.
    """
    digits, operators = split_alphabet(alphabet)
    n = len(lengths)
    text = np.zeros((n, draws.shape[1]), dtype=np.int64)
    answers = np.full_like(text, IGNORE)
    values = np.zeros_like(text)  # each expression's value, at the position where it starts
    rows, starts, sizes = np.arange(n), np.zeros(n, dtype=np.int64), lengths
    splits, ends = [], []

    def write_leaves(rows: np.ndarray, starts: np.ndarray, sizes: np.ndarray) -> None:
        """Write d, -d, (d) and (-d), of sizes 1 to 4."""
        drawn = digits[below(draws[0, starts, rows], len(digits))]
        bracketed, negative = sizes >= 3, sizes % 2 == 0
        text[rows[bracketed], starts[bracketed]] = _OPEN
        text[rows[bracketed], (starts + sizes - 1)[bracketed]] = _CLOSE
        text[rows[negative], (starts + bracketed)[negative]] = _MINUS
        text[rows, starts + bracketed + negative] = drawn
        values[rows, starts] = np.where(negative, -drawn, drawn) % MODULUS

    while len(rows):
        leaf = sizes < 5
        ends.append((rows, starts, starts + sizes - 1))
        write_leaves(rows[leaf], starts[leaf], sizes[leaf])
        rows, starts, sizes = rows[~leaf], starts[~leaf], sizes[~leaf]
        left_sizes = 1 + below(draws[0, starts, rows], sizes - 4)
        chosen = operators[below(draws[1, starts, rows], len(operators))]
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

    scales, shifts = np.ones_like(text), np.zeros_like(text)  # where an expression starts
    for rows, starts, rights, chosen in splits:
        left, scale, shift = values[rows, starts + 1], scales[rows, starts], shifts[rows, starts]
        scales[rows, starts + 1], shifts[rows, starts + 1] = scale, shift
        scales[rows, rights] = np.choose(chosen, [scale, -scale, scale * left]) % MODULUS
        shifts[rows, rights] = np.where(chosen == 2, shift, scale * left + shift) % MODULUS
    for rows, starts, last in ends:
        answers[rows, last] = (scales * values + shifts)[rows, starts] % MODULUS
    return text, answers


def split_alphabet(alphabet: str) -> tuple[np.ndarray, np.ndarray]:
    """Return the values of the digits, and the indices of the operators in OPERATORS, as int64 arrays.

    Raises:
        ValueError: digits or operators are missing, or a character is neither.
    """
    digits = [int(token) for token in alphabet if token in "01234"]
    operators = [OPERATORS.index(token) for token in alphabet if token in OPERATORS]
    if not digits or not operators or len(digits) + len(operators) < len(alphabet):
        raise ValueError(f"alphabet={alphabet}: give one or more of 01234 and one or more of {OPERATORS}")
    return np.array(digits), np.array(operators)
