"""Learning rate as a pure function of the step: nothing to save, nothing that a rank count could change."""

import math
from collections.abc import Callable

from fla_train.training.config import ScheduleConfig

# A share of the run, and never more than the papers' 512 steps.
WARMUP_SHARE = 0.05
WARMUP_CAP = 512
DECAY_SHARE = 0.2  # of the run, for `wsd`

# Height between the minimum (0) and the peak (1), while `progress` runs over (0, 1] and the rate falls.
SHAPES: dict[str, Callable[[float], float]] = {
    "constant": lambda progress: 1.0,
    "cosine": lambda progress: 0.5 * (1 + math.cos(math.pi * progress)),
    "linear": lambda progress: 1 - progress,
    "wsd": lambda progress: 1 - math.sqrt(progress),
}


def warmup_steps(schedule: ScheduleConfig, max_steps: int) -> int:
    """Steps of linear warm-up: the configured number, or 5% of the run (at most 512) when it is null."""
    if schedule.warmup_steps is not None:
        return schedule.warmup_steps
    return min(WARMUP_CAP, int(WARMUP_SHARE * max_steps))


def decay_steps(schedule: ScheduleConfig, max_steps: int) -> int:
    """Steps in which the rate falls: all after the warm-up, but for `wsd` the last ones only.

    `wsd` (warm-up, stable, decay) takes the configured number, or 20% of the run when it is null.
    """
    after_warmup = max_steps - warmup_steps(schedule, max_steps)
    if schedule.name != "wsd":
        return after_warmup
    wanted = schedule.decay_steps
    return min(after_warmup, int(DECAY_SHARE * max_steps) if wanted is None else wanted)


def learning_rate(step: int, *, peak: float, max_steps: int, schedule: ScheduleConfig) -> float:
    """Learning rate of optimizer step `step` (1-based), for a run of `max_steps`.

    With W warm-up and D decay steps, s the step and d = (s - (max_steps - D)) / D:

        s <= W                 peak (start_ratio + (1 - start_ratio) s / W)
        s <= max_steps - D     peak
        else                   peak (min_ratio + (1 - min_ratio) shape(d))

    shape(d) is (1 + cos(pi d)) / 2 for cosine, 1 - d for linear and 1 - sqrt(d) for wsd (Haegele et al.,
    arXiv 2405.18392); `constant` stays at the peak. The last step uses `peak * min_ratio`, later ones too.
    """
    assert step >= 1
    warmup = warmup_steps(schedule, max_steps)
    if step <= warmup:
        return peak * (schedule.start_ratio + (1 - schedule.start_ratio) * step / warmup)
    decay = decay_steps(schedule, max_steps)
    stable = max_steps - decay
    if step <= stable:
        return peak
    share = SHAPES[schedule.name](min(1.0, (step - stable) / max(1, decay)))
    return peak * (schedule.min_ratio + (1 - schedule.min_ratio) * share)
