"""Each schedule against its closed form."""

import math

import pytest

from fla_train.training.config import ScheduleConfig
from fla_train.training.optimizer import learning_rate

PEAK, STEPS, WARMUP = 2.0, 110, 10
COSINE = ScheduleConfig("cosine", warmup_steps=WARMUP, min_ratio=0.1)


def rate(step: int, schedule: ScheduleConfig = COSINE, max_steps: int = STEPS) -> float:
    return learning_rate(step, peak=PEAK, max_steps=max_steps, schedule=schedule)


def curve(schedule: ScheduleConfig, steps: range) -> list[float]:
    return [rate(step, schedule) for step in steps]


@pytest.mark.parametrize("name", ["cosine", "linear", "wsd", "constant"])
@pytest.mark.parametrize("start", [0.0, 0.1])
def test_every_schedule_warms_up_on_a_line_to_the_peak(name: str, start: float):
    schedule = ScheduleConfig(name, warmup_steps=WARMUP, start_ratio=start, min_ratio=1.0)
    expected = [PEAK * (start + (1 - start) * step / WARMUP) for step in range(1, WARMUP + 1)]
    assert curve(schedule, range(1, WARMUP + 1)) == pytest.approx(expected)
    assert rate(WARMUP, schedule) == PEAK


def test_cosine_is_half_a_cosine_down_to_the_minimum():
    expected = [0.2 + 1.8 * (1 + math.cos(math.pi * (s - 10) / 100)) / 2 for s in range(11, 111)]
    assert curve(COSINE, range(11, 111)) == pytest.approx(expected)
    assert rate(110) == pytest.approx(0.2)


def test_linear_is_a_line_down_to_the_minimum():
    schedule = ScheduleConfig("linear", warmup_steps=WARMUP, min_ratio=0.1)
    expected = [2.0 - 1.8 * (s - 10) / 100 for s in range(11, 111)]
    assert curve(schedule, range(11, 111)) == pytest.approx(expected)


def test_wsd_stays_at_the_peak_and_falls_at_the_end():
    schedule = ScheduleConfig("wsd", warmup_steps=WARMUP, decay_steps=25, min_ratio=0.1)
    assert curve(schedule, range(10, 86)) == [PEAK] * 76
    expected = [0.2 + 1.8 * (1 - math.sqrt((s - 85) / 25)) for s in range(86, 111)]
    assert curve(schedule, range(86, 111)) == pytest.approx(expected)
    assert rate(110, schedule) == pytest.approx(0.2)


def test_wsd_decays_for_a_fifth_of_the_run_by_itself():
    schedule = ScheduleConfig("wsd", warmup_steps=WARMUP, min_ratio=0.0)
    assert rate(88, schedule) == PEAK > rate(89, schedule)
    short = ScheduleConfig("wsd", warmup_steps=100, min_ratio=0.0)  # the warm-up leaves less than a fifth
    assert (rate(100, short), rate(110, short)) == (PEAK, 0.0)


def test_a_longer_wsd_run_repeats_the_shorter_one_up_to_its_decay():
    schedule = ScheduleConfig("wsd", warmup_steps=WARMUP, decay_steps=20, min_ratio=0.0)
    assert [rate(s, schedule, 110) for s in range(1, 91)] == [rate(s, schedule, 500) for s in range(1, 91)]


def test_constant_stays_at_the_peak():
    constant = ScheduleConfig("constant", warmup_steps=2, min_ratio=1.0)
    assert [rate(step, constant) for step in (1, 2, 3, 110)] == pytest.approx([1.0, 2.0, 2.0, 2.0])


@pytest.mark.parametrize("name", ["cosine", "linear", "wsd"])
def test_a_longer_look_never_leaves_the_minimum(name: str):
    schedule = ScheduleConfig(name, warmup_steps=WARMUP, min_ratio=0.1)
    assert rate(500, schedule) == pytest.approx(0.2)


@pytest.mark.parametrize(("max_steps", "expected"), [(5, 0), (1000, 50), (66_758, 512)])
def test_default_warmup_is_a_share_of_the_run_up_to_the_papers_512(max_steps: int, expected: int):
    assert ScheduleConfig("cosine", None, min_ratio=0.1).warmup(max_steps) == expected


def test_without_warmup_the_first_step_is_the_first_of_the_cosine():
    bare = ScheduleConfig("cosine", warmup_steps=0, min_ratio=0.0)
    assert rate(1, bare, max_steps=4) == pytest.approx(1 + math.cos(math.pi / 4))
