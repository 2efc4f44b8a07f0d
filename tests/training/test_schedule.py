import math

import pytest

from fla_train.training.schedule import learning_rate, warmup_steps
from fla_train.training.schema import ScheduleConfig

COSINE = ScheduleConfig("cosine", warmup_steps=10, min_ratio=0.1)


def rate(step: int, schedule: ScheduleConfig = COSINE, max_steps: int = 110) -> float:
    return learning_rate(step, peak=2.0, max_steps=max_steps, schedule=schedule)


def test_warmup_is_linear_and_reaches_the_peak():
    assert [rate(step) for step in (1, 5, 10)] == pytest.approx([0.2, 1.0, 2.0])


def test_cosine_ends_at_the_minimum_and_is_half_way_in_the_middle():
    assert rate(60) == pytest.approx((2.0 + 0.2) / 2)
    assert rate(110) == pytest.approx(0.2)
    quarter = 0.2 + 1.8 * (1 + math.cos(math.pi / 4)) / 2
    assert rate(35) == pytest.approx(quarter)


def test_a_longer_look_never_leaves_the_minimum():
    assert rate(500) == pytest.approx(0.2)


def test_constant_stays_at_the_peak():
    constant = ScheduleConfig("constant", warmup_steps=2, min_ratio=1.0)
    assert [rate(step, constant) for step in (1, 2, 3, 110)] == pytest.approx([1.0, 2.0, 2.0, 2.0])


@pytest.mark.parametrize(("max_steps", "expected"), [(5, 0), (1000, 50), (66_758, 512)])
def test_default_warmup_is_a_share_of_the_run_up_to_the_papers_512(max_steps: int, expected: int):
    assert warmup_steps(ScheduleConfig("cosine", None, 0.1), max_steps) == expected


def test_without_warmup_the_first_step_is_the_first_of_the_cosine():
    bare = ScheduleConfig("cosine", warmup_steps=0, min_ratio=0.0)
    assert rate(1, bare, max_steps=4) == pytest.approx(1 + math.cos(math.pi / 4))
