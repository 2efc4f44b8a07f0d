"""Spread ratio of a word problem's answers in the logits, by length, and where it predicts tracking to end.

After the distinguishability ratio of arXiv 2605.07755. Its abstract says that tracking is readable while the
spread within a class is small relative to the separation between classes, and ends where their ratio crosses
the trained decoder's readability threshold. Summaries by others write q(t) = R(t) / M(t), M the smallest
separation. The paper itself was not read: the space (logits), the norms and the way to find the threshold are
ours, and the numbers are not the paper's.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from fla_train.tasks import IGNORE

ACCURACY = 0.9  # tracking ends where fewer products are right
LARGEST = 1e4  # factor by which deviations are stretched at most


def length_windows(length: int) -> list[int]:
    """Edges of windows of lengths 1 .. `length`, four an octave: 1, 2, 3, 4, 5, 6, 7, 8, 10, 11, ..."""
    edges = {round(2 ** (i / 4)) for i in range(4 * length.bit_length())}
    return sorted({1, length + 1, *(edge for edge in edges if edge <= 0.9 * length)})


class SpreadTable:
    """Sums over words from which the spread ratio follows, by window of lengths and class.

    Args:
        edges: window w holds the lengths edges[w] <= t < edges[w + 1], t from 1.
        classes: C; labels are below it, and logits of other ids are left out.
        kept: length whose window's logits are kept for the threshold; that is where training ended.
    """

    def __init__(self, edges: Sequence[int], classes: int, kept: int):
        self.edges, self.classes = np.array(edges), classes
        windows = len(edges) - 1
        self.kept = int(np.searchsorted(self.edges, kept, side="right")) - 1
        self.counts = torch.zeros(windows, classes, dtype=torch.float64)
        self.sums = torch.zeros(windows, classes, classes, dtype=torch.float64)
        self.squares = torch.zeros(windows, dtype=torch.float64)
        self.right = torch.zeros(windows, dtype=torch.float64)
        self._samples: list[tuple[Tensor, Tensor]] = []

    def add(self, logits: Tensor, labels: Tensor) -> None:
        """Count `logits` [B, T, V] of the words' T first lengths and their `labels` [B, T]."""
        lengths = np.arange(1, labels.shape[1] + 1)
        window = torch.from_numpy(np.searchsorted(self.edges, lengths, side="right") - 1)
        window = window.expand(labels.shape)
        points = logits[..., : self.classes].double().cpu()
        points = points - points.mean(-1, keepdim=True)  # a shift of all logits is no answer
        labels = labels.cpu()
        known = labels != IGNORE
        points, window, labels = points[known], window[known], labels[known]
        cells = window * self.classes + labels
        self.counts.view(-1).index_add_(0, cells, torch.ones_like(points[:, 0]))
        self.sums.view(-1, self.classes).index_add_(0, cells, points)
        self.squares.index_add_(0, window, points.square().sum(-1))
        self.right.index_add_(0, window, (points.argmax(-1) == labels).double())
        self._samples.append((points[window == self.kept], labels[window == self.kept]))

    def ratio(self) -> Tensor:
        """[windows]: R / M of each window; inf where two classes have one mean.

        R is the root mean square distance of a word's logits from the mean of its class, M the smallest
        distance of two classes' means. Both are free of the bias that few words a class give.
        """
        counts = self.counts.clamp_min(1)
        means = self.sums / counts[..., None]
        words, present = self.counts.sum(1), (self.counts > 0).sum(1)
        within = self.squares - (self.sums.square().sum(-1) / counts).sum(1)
        within = within.clamp_min(0) / (words - present).clamp_min(1)
        noise = within[:, None, None] * (1 / counts[:, :, None] + 1 / counts[:, None, :])
        between = torch.cdist(means, means).square() - noise
        absent = (self.counts[:, :, None] == 0) | (self.counts[:, None, :] == 0)
        between = between.masked_fill(absent | torch.eye(self.classes, dtype=torch.bool), torch.inf)
        return (within / between.flatten(1).amin(1).clamp_min(0)).sqrt()

    def accuracy(self) -> Tensor:
        """[windows]: share of right answers."""
        return self.right / self.counts.sum(1)

    def threshold(self) -> float | None:
        """The ratio at which the decoder would have `ACCURACY`, if deviations at the end of training grew.

        The deviations of the kept window's words from their class's mean are stretched by one factor until
        so few are right; the threshold is the ratio there times that factor. None where fewer are right as
        they are, or no factor makes them wrong.
        """
        points, labels = (torch.cat(parts) for parts in zip(*self._samples, strict=True))
        means = (self.sums / self.counts.clamp_min(1)[..., None])[self.kept][labels]

        def right(factor: float) -> float:
            stretched = means + factor * (points - means)
            return (stretched.argmax(-1) == labels).double().mean().item()

        low, high = 1.0, LARGEST
        if right(low) < ACCURACY or right(high) >= ACCURACY:
            return None
        for _ in range(40):
            middle = (low * high) ** 0.5
            low, high = (middle, high) if right(middle) >= ACCURACY else (low, middle)
        return low * self.ratio()[self.kept].item()

    def report(self) -> dict:
        """All of it as plain numbers.

        By window: `lengths` (the middle), `ratio` (None: infinite), `accuracy`. Of all: `threshold`,
        `predicted_length` (the ratio crosses it) and `measured_length` (the accuracy falls below `ACCURACY`),
        None where that does not happen.
        """
        lengths = (self.edges[:-1] + self.edges[1:] - 1) / 2
        ratio, accuracy = self.ratio().numpy(), self.accuracy().numpy()
        threshold = self.threshold()
        return {
            "lengths": lengths.tolist(),
            "ratio": [value if np.isfinite(value) else None for value in ratio.tolist()],
            "accuracy": accuracy.tolist(),
            "threshold": threshold,
            "predicted_length": None if threshold is None else first_above(lengths, ratio, threshold),
            "measured_length": first_above(lengths, -accuracy, -ACCURACY),
        }


def first_above(lengths: np.ndarray, values: np.ndarray, limit: float) -> float | None:
    """The length at which `values` come to lie above `limit`, by linear interpolation; None: they do not."""
    above = np.flatnonzero(values > limit)
    if not len(above):
        return None
    i = above[0]
    if i == 0:
        return float(lengths[0])
    share = (limit - values[i - 1]) / (values[i] - values[i - 1])
    return float(lengths[i - 1] + share * (lengths[i] - lengths[i - 1]))
