"""Each schedule against its closed form."""

import math
from collections.abc import Callable

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


def cosine(fraction: float) -> float:
    return (1 + math.cos(math.pi * fraction)) / 2


@pytest.mark.parametrize(
    ("name", "decay", "form"),
    [
        ("cosine", 100, cosine),
        ("linear", 100, lambda fraction: 1 - fraction),
        ("wsd", 25, lambda fraction: 1 - math.sqrt(fraction)),
    ],
)
def test_the_decay_is_its_closed_form_down_to_the_minimum(name: str, decay: int, form: Callable):
    decay_steps = decay if name == "wsd" else None
    schedule = ScheduleConfig(name, warmup_steps=WARMUP, decay_steps=decay_steps, min_ratio=0.1)
    begin = STEPS - decay
    assert curve(schedule, range(WARMUP, begin + 1)) == [PEAK] * (begin + 1 - WARMUP)
    expected = [0.2 + 1.8 * form((step - begin) / decay) for step in range(begin + 1, STEPS + 1)]
    assert curve(schedule, range(begin + 1, STEPS + 1)) == pytest.approx(expected)
    assert rate(STEPS, schedule) == rate(5 * STEPS, schedule) == pytest.approx(0.2)


def test_wsd_decays_for_a_fifth_of_the_run_by_itself():
    schedule = ScheduleConfig("wsd", warmup_steps=WARMUP, min_ratio=0.0)
    assert rate(88, schedule) == PEAK > rate(89, schedule)
    short = ScheduleConfig("wsd", warmup_steps=100, min_ratio=0.0)  # the warm-up leaves less than a fifth
    assert curve(short, range(100, 111)) == pytest.approx([PEAK * (1 - math.sqrt(i / 10)) for i in range(11)])


def test_constant_stays_at_the_peak():
    constant = ScheduleConfig("constant", warmup_steps=2, min_ratio=1.0)
    assert [rate(step, constant) for step in (1, 2, 3, 110)] == pytest.approx([1.0, 2.0, 2.0, 2.0])


@pytest.mark.parametrize(("max_steps", "expected"), [(5, 0), (1000, 50), (66_758, 512)])
def test_default_warmup_is_a_share_of_the_run_up_to_the_papers_512(max_steps: int, expected: int):
    assert ScheduleConfig("cosine", None, min_ratio=0.1).warmup(max_steps) == expected


def test_without_warmup_the_first_step_is_the_first_of_the_cosine():
    bare = ScheduleConfig("cosine", warmup_steps=0, min_ratio=0.0)
    assert rate(1, bare, max_steps=4) == pytest.approx(1 + math.cos(math.pi / 4))
