"""Recall against a dictionary filled while reading; draws without replacement against brute force."""

from collections import Counter
from itertools import permutations

import numpy as np
import pytest

from fla_train.tasks.draws import draw, stream_keys, weighted_without_replacement, without_replacement
from fla_train.tasks.mqar import MQAR, MQARSetting
from fla_train.tasks.task import IGNORE, tally_by

HARDEST = [MQARSetting(512, 64)]  # each as configs/experiment/mqar has it
BASED = [
    MQARSetting(*s) for s in ((64, 4, 1e5), (128, 8, 2e4), (256, 16, 2e4), (256, 32, 2e4), (256, 64, 2e4))
]
LARGER = [MQARSetting(64, 16), MQARSetting(128, 32), MQARSetting(1024, 256)]


@pytest.mark.parametrize("random_non_queries", [True, False])
@pytest.mark.parametrize("settings", [HARDEST, BASED, LARGER])
def test_each_query_is_answered_by_the_value_read_after_its_key(settings, random_non_queries: bool) -> None:
    batch = MQAR(settings, random_non_queries=random_non_queries, seed=5).batch(range(60))
    assert batch.input_ids.shape == (60, max(setting.seq_len for setting in settings))
    pairs, lengths = batch.metadata["num_kv_pairs"].tolist(), batch.metadata["length"].tolist()
    assert {(length, n) for length, n in zip(lengths, pairs, strict=True)} <= {
        (setting.seq_len, setting.num_kv_pairs) for setting in settings
    }
    for inputs, labels, n, length in zip(
        batch.input_ids.tolist(), batch.labels.tolist(), pairs, lengths, strict=True
    ):
        values = dict(zip(inputs[0 : 2 * n : 2], inputs[1 : 2 * n : 2], strict=True))
        assert len(values) == len(set(values.values())) == n
        assert all(1 <= key < 4096 <= value < 8192 for key, value in values.items())
        queried = [t for t, label in enumerate(labels) if label != IGNORE]
        assert sorted(inputs[t] for t in queried) == sorted(values)
        assert all(2 * n <= t < length and t % 2 == 0 and labels[t] == values[inputs[t]] for t in queried)
        rest = [inputs[t] for t in range(2 * n, length) if t not in queried]
        assert any(rest) if random_non_queries else not any(rest)
        assert not any(inputs[length:])


def test_mixtures_keep_their_shares() -> None:
    batch = MQAR(BASED).batch(range(1800))
    counts = Counter(batch.metadata["num_kv_pairs"].tolist())
    for pairs, expected in [(4, 1000), (8, 200), (16, 200), (32, 200), (64, 200)]:
        assert abs(counts[pairs] - expected) < 5 * np.sqrt(expected)


def test_queries_follow_the_power_law() -> None:
    """With one pair the place of its query has probability rank^(a - 1) / sum."""
    batch = MQAR([MQARSetting(12, 1)], vocab_size=64, power=0.5).batch(range(20000))
    places = (batch.labels != IGNORE).int().argmax(1).numpy()
    weights = np.arange(1, 6) ** -0.5
    for rank, weight in enumerate(weights):
        expected = 20000 * weight / weights.sum()
        assert abs((places == 2 + 2 * rank).sum() - expected) < 5 * np.sqrt(expected)


def test_samples_without_replacement_have_every_order_equally_often() -> None:
    drawn = without_replacement(draw(stream_keys(0, np.arange(12000)), 3), 4)
    counts = Counter(map(tuple, drawn.tolist()))
    assert set(counts) == set(permutations(range(4), 3))
    assert all(abs(count - 500) < 5 * np.sqrt(500) for count in counts.values())


def test_weighted_samples_have_the_probabilities_of_one_draw_after_another() -> None:
    weights = np.array([5.0, 2.0, 1.0])
    drawn = weighted_without_replacement(draw(stream_keys(1, np.arange(16000)), 3), weights, 2)
    counts = Counter(map(tuple, drawn.tolist()))
    for first, second in permutations(range(3), 2):
        expected = 16000 * weights[first] / 8 * weights[second] / (8 - weights[first])
        assert abs(counts[first, second] - expected) < 5 * np.sqrt(expected)


def test_accuracy_is_the_mean_over_sequences() -> None:
    task = MQAR([MQARSetting(16, 1), MQARSetting(16, 4)], vocab_size=32)
    batch = task.batch(range(40))
    ones = batch.metadata["num_kv_pairs"] == 1
    predictions = batch.labels.clone()
    predictions[~ones] = 0
    share = ones.double().mean().item()
    assert 0 < share < 1
    metrics = task.metrics(predictions, batch)
    assert metrics == pytest.approx({"accuracy": share, "sequence_accuracy": share})
    by_pairs = tally_by(predictions, batch, "num_kv_pairs")
    assert [by_pairs[n].mean_row_accuracy for n in (1, 4)] == [1.0, 0.0]


def test_settings_that_give_no_task() -> None:
    with pytest.raises(ValueError, match="num_kv_pairs"):
        MQAR([MQARSetting(64, 17)])
    with pytest.raises(ValueError, match="too few keys"):
        MQAR([MQARSetting(64, 16)], vocab_size=32)


def test_gaps_follow_the_power_law() -> None:
    """Of a lone pair: gap g = 1 .. 31 with a probability in proportion to g^(power - 1)."""
    for power in (0.01, 1.0):
        labels = MQAR([(64, 1)], power=power, seed=5).batch(range(8000)).labels
        gaps = (labels != IGNORE).int().argmax(1).numpy() // 2
        law = np.arange(1, 32) ** (power - 1)
        assert np.bincount(gaps, minlength=32)[1:] / 8000 == pytest.approx(law / law.sum(), abs=0.02)
