"""Learning rate as a pure function of the step: nothing to save, nothing that a rank count could change."""

import math

from fla_train.training.schema import ScheduleConfig

# A share of the run, and never more than the papers' 512 steps.
WARMUP_SHARE = 0.05
WARMUP_CAP = 512


def warmup_steps(schedule: ScheduleConfig, max_steps: int) -> int:
    """Steps of linear warm-up: the configured number, or 5% of the run (at most 512) when it is null."""
    if schedule.warmup_steps is not None:
        return schedule.warmup_steps
    return min(WARMUP_CAP, int(WARMUP_SHARE * max_steps))


def learning_rate(step: int, *, peak: float, max_steps: int, schedule: ScheduleConfig) -> float:
    """Learning rate of optimizer step `step` (1-based), for a run of `max_steps`.

    Linear from peak / warm-up at step 1 to `peak` at the last warm-up step; then `constant` stays there and
    `cosine` falls to `peak * min_ratio`, which step `max_steps` uses.
    """
    assert step >= 1
    warmup = warmup_steps(schedule, max_steps)
    if step <= warmup:
        return peak * step / warmup
    if schedule.name == "constant":
        return peak
    progress = min(1.0, (step - warmup) / max(1, max_steps - warmup))
    share = 0.5 * (1 + math.cos(math.pi * progress))
    return peak * (schedule.min_ratio + (1 - schedule.min_ratio) * share)
