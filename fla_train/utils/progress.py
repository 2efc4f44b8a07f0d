"""Progress of data preparation: a bar on a terminal, else a log line every minute."""

import time
from collections.abc import Callable

from tqdm import tqdm

LINE_SECONDS = 60.0


class Progress:
    """Counts the work done in `unit`: "B", bytes of text, "tok", tokens, or "doc", documents.

    Args:
        total: returns the amount of work; None while it is unknown, then it is called again at each update.
        log: receives the lines where there is no terminal.
        show: False shows nothing.
    """

    def __init__(self, total: Callable[[], int | None], unit: str, log: Callable[[str], None], show: bool):
        self._total, self.unit, self._log, self._show = total, unit, log, show
        self._bar: tqdm | None = None
        self.seconds = 0.0
        self.tokens = 0  # of this process, without those of an earlier one

    def start(self, done: int, tokens: int) -> None:
        """Start at `done` units and `tokens`, which an earlier process has reached."""
        self._began = self._said = time.monotonic()
        self._first, self._first_tokens = done, tokens
        self._bar = tqdm(
            total=self._total(),
            initial=done,
            unit=self.unit,
            unit_scale=True,
            desc="tokenizing",
            disable=None if self._show else True,  # None: only on a terminal
        )

    def update(self, done: int, tokens: int) -> None:
        now = time.monotonic()
        self.seconds, self.tokens = now - self._began, tokens - self._first_tokens
        rate = self.tokens / self.seconds
        if self._bar.total is None:
            self._bar.total = self._total()
        if not self._bar.disable:
            self._bar.update(done - self._bar.n)
            self._bar.set_postfix_str(f"{rate / 1e6:.2f}M tokens/s", refresh=False)
        elif self._show and now - self._said >= LINE_SECONDS:
            self._said = now
            self._log(f"data: {tokens:,} tokens, {rate / 1e6:.2f}M tokens/s{self._left(done)}")

    def close(self) -> None:
        self._bar.close()

    def _left(self, done: int) -> str:
        total = self._bar.total
        if total is None or done <= self._first:
            return ""
        seconds = (total - done) * self.seconds / (done - self._first)
        share = 100 * done / total
        return f", {share:.0f}%, {tqdm.format_interval(max(0, seconds))} left"
