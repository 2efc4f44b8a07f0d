"""Evaluation suites while training goes on: `fla-eval` on an export, in a process of its own.

lm-eval seeds the global generators and changes defaults of libraries; in another process, on exported
weights, it can not change the run by a bit, and a suite that fails costs a line. Training does not wait.
"""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from fla_train.utils.records import Record

# What torch.distributed and the launcher tell a rank; with it the process would take itself for one.
OF_A_RANK = (
    "RANK",
    "WORLD_SIZE",
    "MASTER_",
    "LOCAL_",
    "GROUP_",
    "ROLE_",
    "TORCHELASTIC_",
    "FLA_TRAIN_LAUNCHER",
    "FLA_TRAIN_STORE_PREFIX",
    "FLA_TRAIN_STORE_FILE",
)
POLL = 0.5  # seconds
# It ends with the rank that started it, or a trainer that starts again would find it on its GPU.
_BIND = "from fla_train.utils.processes import die_with_parent; die_with_parent({parent})"
_EVALUATE = "from fla_train.cli.eval import main; main()"


class SuiteRuns:
    """Starts one evaluation at a time and hands over what it found.

    Args:
        suite: name of a file of configs/suite.
        options: further overrides of `fla-eval`, such as `suite.limit=100` or `device=cpu`.
        folder: where each evaluation gets its `<suite>-step-XXXXXXX`.
        log: takes the results as a record for the metrics.
        say: takes a line for the user.
    """

    def __init__(
        self,
        suite: str,
        options: Sequence[str],
        folder: Path,
        *,
        log: Callable[[Record], None],
        say: Callable[[str], None],
    ) -> None:
        self._suite, self._options, self._folder = suite, list(options), folder
        self._log, self._say = log, say
        self._process: subprocess.Popen | None = None
        self._output, self._of_step = folder, 0
        self._left_out: tuple[Path, int] | None = None  # the newest export and its step, if it was

    def start(self, export: Path, step: int) -> None:
        """Evaluate the export of `step`, unless an earlier evaluation is still at it."""
        if self._process is not None:
            self._left_out = export, step
            self._say(
                f"step {step:,}: suite {self._suite} left out, that of step {self._of_step:,} still runs"
            )
            return
        self._left_out = None
        self._output, self._of_step = self._folder / f"{self._suite}-step-{step:07d}", step
        try:
            self._launch(export)
        except OSError as failure:
            self._say(f"step {step:,}: suite {self._suite} left out ({failure.strerror})")

    def _launch(self, export: Path) -> None:
        self._output.mkdir(parents=True, exist_ok=True)
        request = [f"checkpoint={export}", f"suite={self._suite}", f"output={self._output}", *self._options]
        environment = {key: value for key, value in os.environ.items() if not key.startswith(OF_A_RANK)}
        with (self._output / "eval.log").open("w") as file:
            self._process = subprocess.Popen(
                [sys.executable, "-c", f"{_BIND.format(parent=os.getpid())}; {_EVALUATE}", *request],
                stdout=file,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                env=environment,
            )

    def collect(self, step: int, tokens: int) -> None:
        """Log the results of an evaluation that has ended by now, if there is one.

        Args:
            step: of the training, under which they are recorded; `evaluated_step` says whose they are.
            tokens: trained on by then.
        """
        if self._process is None or self._process.poll() is None:
            return
        self._process = None
        metrics = _metrics(self._output / "results.json")
        if metrics is None:
            self._say(f"step {self._of_step:,}: suite {self._suite} failed, see {self._output / 'eval.log'}")
            return
        self._log({"step": step, "tokens": tokens, "evaluated_step": self._of_step, **metrics})
        self._say(f"step {self._of_step:,}: suite {self._suite} done, {self._output}")

    def finish(self, step: int, tokens: int, beat: Callable[[str], None]) -> None:
        """Log the evaluation that runs, then that of the newest export if it was left out: it is the result.

        Args:
            beat: hears that waiting for them is progress.
        """
        self._wait(step, tokens, beat)
        if self._left_out is not None:
            export, of_step = self._left_out
            self._say(f"step {of_step:,}: suite {self._suite} starts late")
            self.start(export, of_step)
            self._wait(step, tokens, beat)

    def _wait(self, step: int, tokens: int, beat: Callable[[str], None]) -> None:
        while self._process is not None:
            beat(f"waiting for suite {self._suite}")
            self.collect(step, tokens)
            if self._process is not None:
                time.sleep(POLL)

    def stop(self) -> None:
        """End the evaluation that runs, if one does."""
        if self._process is not None:
            self._process.terminate()
            self._process.wait()
            self._process = None


def _metrics(file: Path) -> dict[str, float | None] | None:
    """The flat results of a finished evaluation; None if it wrote none whole. Infinite ones become null."""
    if not file.is_file():
        return None
    try:
        found = json.loads(file.read_text())["metrics"]
    except ValueError:  # cut short by a full disk
        return None
    return {key: value if abs(value) < float("inf") else None for key, value in found.items()}
