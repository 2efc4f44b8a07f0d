"""Show progress of data preparation: a bar on a terminal, otherwise a log line every minute."""

import time
from collections.abc import Callable

from tqdm import tqdm

LINE_SECONDS = 60.0


class Progress:
    """Count and show completed work.

    Args:
        total: the amount of work; None if it is unknown.
        unit: "B", bytes of files, "tok", tokens, or "doc", documents.
        log: receives the lines without a terminal.
        show: False shows nothing.
    """

    def __init__(self, total: int | None, unit: str, log: Callable[[str], None], show: bool):
        self._log, self._show = log, show
        self._began = self._last_line = time.monotonic()
        self._first = self._first_tokens = 0
        # None shows the bar only on a terminal.
        disable = None if show else True
        self._bar = tqdm(total=total, unit=unit, unit_scale=True, desc="tokenizing", disable=disable)

    def update(self, done: int, tokens: int, *, resumed: bool = False) -> None:
        """Update the display: `done` units and `tokens` are complete.

        Args:
            resumed: an earlier process did the work so far, which does not count for the speed.
        """
        now = time.monotonic()
        if resumed:
            self._began, self._first, self._first_tokens = now, done, tokens
            self._bar.reset()
            self._bar.initial = self._bar.n = done
        seconds = now - self._began
        rate = (tokens - self._first_tokens) / max(seconds, 1e-9) / 1e6
        if not self._bar.disable:
            self._bar.update(done - self._bar.n)
            self._bar.set_postfix_str(f"{rate:.2f}M tokens/s", refresh=False)
        elif self._show and now - self._last_line >= LINE_SECONDS:
            self._last_line = now
            self._log(f"data: {tokens:,} tokens, {rate:.2f}M tokens/s{self._time_left(done, seconds)}")

    def close(self) -> None:
        self._bar.close()

    def _time_left(self, done: int, seconds: float) -> str:
        total = self._bar.total
        if total is None or done <= self._first:
            return ""
        left = (total - done) * seconds / (done - self._first)
        return f", {100 * done / total:.0f}%, {tqdm.format_interval(max(0, left))} left"
