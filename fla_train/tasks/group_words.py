"""Group word problems: read group elements, output their running product.

They are used in DeltaProduct (arXiv 2502.10297), section 5.1 and appendix C.1, and by Grazzi et al. (arXiv
2411.12537), appendix E.2.
"""

from statistics import fmean
from typing import Any

import numpy as np

from fla_train.tasks.draws import below, draw
from fla_train.tasks.groups import generators_first, make_group
from fla_train.tasks.task import IGNORE, Batch, Tally, Task


class GroupWords(Task):
    """The word problem of a finite group.

    Elements x_1, x_2, ... are drawn uniformly. The label at x_t is the product y_t = x_1 x_2 ... x_t from
    left to right: y_t = y_(t-1) x_t, which for permutations means "first x_1, then x_2, ...". (The opposite
    order is the same task with every element renamed to its inverse.)

    If `tokens_per_element` = k > 1, each element is followed by k - 1 fillers, which gives the model k
    tokens for one transition. The product is the label of the last of them. The label of the tokens before
    is the product of the elements completed so far (the identity before the first), as in appendix E.2.1, or
    IGNORE with `label_incomplete=False`.

    Token ids: 0 .. |G| - 1 are the elements (0 is the identity), |G| is the filler and |G| + 1 the
    beginning-of-sequence token.

    Args:
        group: a name for `make_group`: "S3", "A5", "Z60", "D7", "Z2xS3".
        length: tokens per sequence without the beginning-of-sequence token; a multiple of tokens_per_element.
        stream: `seed` and `num_sequences`, see Task.
        max_moved: limit on the points that an element moves, for S and A groups. 2: swaps and the identity.
            3: also cycles of three. None: the whole group.
        elements: draw from this number of the allowed elements, generators first (`generators_first`), in
            the early stages of a curriculum. None: all.
        tokens_per_element: k.
        label_incomplete: also label the tokens at which an element is not complete yet.
        bos: begin each sequence with a beginning-of-sequence token, which has no label.

    Raises:
        ValueError: the group is unknown, or a setting gives no task.
    """

    headline = "sequence_accuracy"
    length_option = "length"

    def __init__(
        self,
        group: str,
        length: int,
        *,
        max_moved: int | None = None,
        elements: int | None = None,
        tokens_per_element: int = 1,
        label_incomplete: bool = True,
        bos: bool = True,
        **stream: Any,
    ):
        self.group = make_group(group)
        order = self.group.order
        if tokens_per_element < 1 or length < 1 or length % tokens_per_element:
            raise ValueError(f"length={length} must be a multiple of tokens_per_element={tokens_per_element}")
        super().__init__(vocab_size=order + 2, seq_len=length + bos, **stream)
        self.length = length
        self.tokens_per_element = tokens_per_element
        self.label_incomplete = label_incomplete
        # The first product is the first element. A guess of a later one is right once in `order` times.
        k = tokens_per_element
        guessed = [max(t // k - 1, 0) for t in range(1, length + 1)]  # products to guess up to token t
        labelled = guessed if label_incomplete else guessed[k - 1 :: k]
        self.chance = fmean(1 / order if products else 1.0 for products in labelled)
        self.chance_by_prefix = [float(order) ** -products for products in guessed]
        self.bos = bos
        self.filler_id = order
        self.bos_id = order + 1
        self.elements = self._drawn_elements(max_moved, elements)
        self._flat_table = self.group.table.ravel()

    def summary(self, tally: Tally) -> dict[str, float | list[float]]:
        """Return sequence_accuracy, token_accuracy and prefix_accuracy [length], of rows right up to t."""
        return {
            "sequence_accuracy": tally.sequence_accuracy,
            "token_accuracy": tally.token_accuracy,
            "prefix_accuracy": tally.prefix_accuracy[self.bos :],
        }

    def _drawn_elements(self, max_moved: int | None, count: int | None) -> np.ndarray:
        """Return the elements that inputs are drawn from, [m] int64."""
        group, allowed = self.group, np.arange(self.group.order)
        if max_moved is not None and group.moved is None:
            raise ValueError(f"max_moved counts permuted points: {group.name} is neither S<n> nor A<n>")
        if max_moved is not None:
            allowed = np.flatnonzero(group.moved <= max_moved)
            if len(allowed) < 2:
                raise ValueError(f"max_moved={max_moved} leaves the identity of {group.name} only: raise it")
        if count in (None, group.order):
            return allowed
        if not 1 <= count <= len(allowed):
            raise ValueError(f"elements={count}: choose 1 to {len(allowed)}, the elements that may be drawn")
        return generators_first(group, allowed)[:count]

    def _generate(self, keys: np.ndarray) -> Batch:
        k = self.tokens_per_element
        elements = self.elements[below(draw(keys, self.length // k), len(self.elements))]  # [length / k, b]
        products = self._running_products(elements).T
        input_ids = np.full((len(keys), self.seq_len), self.filler_id)
        labels = np.full_like(input_ids, IGNORE)
        if self.bos:
            input_ids[:, 0] = self.bos_id
        input_ids[:, self.bos :: k] = elements.T
        answers = labels[:, self.bos :]
        if self.label_incomplete:
            # Each product holds from the last token of its element to the one before the next is complete.
            answers[:, : k - 1] = 0
            answers[:, k - 1 :] = np.repeat(products, k, axis=1)[:, : self.length - k + 1]
        else:
            answers[:, k - 1 :: k] = products
        return Batch.of(input_ids, labels, length=self.length)

    def _running_products(self, elements: np.ndarray) -> np.ndarray:
        """Return the products of elements[: t + 1] for each t: [steps, b], one look-up per step for all b."""
        products = np.empty_like(elements)
        products[0] = elements[0]
        entry = np.empty_like(elements[0])
        for t in range(1, len(elements)):
            np.multiply(products[t - 1], self.group.order, out=entry)
            entry += elements[t]
            # "clip" never acts here; it spares numpy a buffered copy of the result.
            np.take(self._flat_table, entry, out=products[t], mode="clip")
        return products
