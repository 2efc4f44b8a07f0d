"""Record the seconds of each phase of a run's start or end, as one line for the log."""

import time

# Environment variable with the Unix time at which the command started.
BEGAN = "FLA_TRAIN_BEGAN"


class Timeline:
    """Record phases, each from the previous mark to the next.

    Args:
        began: Unix time of the first phase's start, perhaps in another process; None: now.
    """

    def __init__(self, began: float | None = None):
        self._began = self._last = time.time() if began is None else began
        self._phases: dict[str, float] = {}

    def mark(self, phase: str, at: float | None = None) -> None:
        """End a phase now, or at another Unix time."""
        now = time.time() if at is None else at
        self._phases[phase] = self._phases.get(phase, 0.0) + now - self._last
        self._last = now

    def __str__(self) -> str:
        phases = ", ".join(f"{phase} {seconds:.1f}" for phase, seconds in self._phases.items())
        return f"{self._last - self._began:.1f} s ({phases})"
