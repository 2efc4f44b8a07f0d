"""The spread ratio against NumPy, and against words whose spread grows as is known."""

from itertools import pairwise

import numpy as np
import pytest
import torch

from fla_train.eval.separation import ACCURACY, SpreadTable, first_above, length_windows
from fla_train.tasks import IGNORE


def drifting(words: int, length: int, drift: float, classes: int = 4) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits that are one-hot plus noise of deviation `drift` t in every direction, and labels."""
    generator = torch.Generator().manual_seed(1)
    labels = torch.randint(classes, (words, length), generator=generator)
    noise = torch.randn(words, length, classes, generator=generator, dtype=torch.float64)
    steps = torch.arange(1, length + 1)[None, :, None]
    return torch.nn.functional.one_hot(labels, classes) + drift * steps * noise, labels


def test_windows_hold_every_length_once() -> None:
    for length in (1, 2, 5, 32, 513):
        edges = length_windows(length)
        assert edges[0] == 1 and edges[-1] == length + 1 and edges == sorted(set(edges))


def test_the_ratio_is_that_of_its_definition() -> None:
    logits, labels = drifting(words=40, length=12, drift=0.05)
    labels[3, 5] = IGNORE
    edges = [1, 4, 9, 13]
    table = SpreadTable(edges, classes=4, kept=3)
    extra = torch.full((40, 12, 1), 9.0)  # logits of ids that are no answers are left out
    for rows in (slice(0, 15), slice(15, 40)):
        table.add(torch.cat([logits, extra], -1)[rows], labels[rows])
    for window, (start, stop) in enumerate(pairwise(edges)):
        z = (logits - logits.mean(-1, keepdim=True))[:, start - 1 : stop - 1].reshape(-1, 4).numpy()
        y = labels[:, start - 1 : stop - 1].reshape(-1).numpy()
        z, y = z[y != IGNORE], y[y != IGNORE]
        means = np.array([z[y == c].mean(0) for c in range(4)])
        within = ((z - means[y]) ** 2).sum() / (len(y) - 4)
        between = min(
            ((means[a] - means[b]) ** 2).sum() - within * (1 / (y == a).sum() + 1 / (y == b).sum())
            for a in range(4) for b in range(a)
        )  # fmt: skip
        assert table.ratio()[window].item() == pytest.approx(np.sqrt(within / between))
        assert table.accuracy()[window].item() == pytest.approx((z.argmax(1) == y).mean())


def test_a_drift_that_keeps_its_form_ends_tracking_where_it_is_predicted() -> None:
    """The noise at the end of training is that of longer words but for its size, as the threshold assumes."""
    logits, labels = drifting(words=2000, length=128, drift=0.006)
    table = SpreadTable(length_windows(128), classes=4, kept=32)
    table.add(logits, labels)
    report = table.report()
    assert 40 < report["measured_length"] < 110
    assert report["predicted_length"] == pytest.approx(report["measured_length"], rel=0.1)
    assert report["accuracy"][-1] < ACCURACY < report["accuracy"][0]


def test_a_model_that_has_learnt_nothing_has_no_threshold() -> None:
    logits, labels = drifting(words=300, length=16, drift=3.0)
    table = SpreadTable(length_windows(16), classes=4, kept=8)
    table.add(logits, labels)
    report = table.report()
    assert report["threshold"] is None and report["predicted_length"] is None


def test_crossings_are_interpolated() -> None:
    lengths, values = np.array([1.0, 3.0, 7.0]), np.array([0.0, 1.0, 5.0])
    assert first_above(lengths, values, 3.0) == 5.0
    assert first_above(lengths, values, -1.0) == 1.0
    assert first_above(lengths, values, 5.0) is None
