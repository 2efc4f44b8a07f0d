"""Run evaluation suites during training: `fla-eval` on exports, one at a time, in separate processes.

lm-eval seeds the global generators and changes defaults of libraries. In another process, on exported
weights, it cannot change the run by a bit. A suite that fails is only logged. Training does not wait for it.
"""

import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from fla_train.training.callback import Callback
from fla_train.utils.keys import key
from fla_train.utils.overrides import as_data, assign
from fla_train.utils.processes import POLL, start_command
from fla_train.utils.records import read_metrics
from fla_train.utils.safe_files import read_json


@dataclass
class SuiteKeys:
    suite_every: int = key(0, at_least=0, from_folder=())
    suite: str = key("perplexity", from_folder=())
    suite_options: list[str] = key(factory=list, from_folder=(), private=True)


class Suites(Callback):
    """Evaluate the export of every `trainer.suite_every`-th step, and the last one. Use it on rank 0.

    Each evaluation writes to `eval/SUITE-step-XXXXXXX` in the run folder. Its results are recorded under the
    training step at which they arrive; `evaluated_step` is the step of the export.
    """

    _process: subprocess.Popen | None = None
    _step = 0  # step of the export that is evaluated

    def attach(self, trainer) -> None:
        super().attach(trainer)
        self._suite, self._options = trainer.config.trainer.suite, trainer.config.trainer.suite_options
        if not trainer.finished:
            every = trainer.config.trainer.suite_every
            self._start_if_lost(trainer.state.step // every * every)

    def after_results(self, results: Sequence) -> None:
        self._collect()

    def due(self, step: int) -> bool:
        return not self.trainer.finished and self.trainer.is_due(self.trainer.config.trainer.suite_every)

    def between_steps(self, step: int) -> None:
        """Evaluate the export of `step`, unless an earlier evaluation still runs."""
        if not self.trainer.folder.export(step).is_dir():
            return
        if self._process is None:
            self._start(step)
            return
        self.trainer.log(f"step {step:,}: suite skipped, that of step {self._step:,} still runs")

    def finish(self) -> None:
        """Wait for the running evaluation, then evaluate the newest export, the result of the run."""
        self._wait()
        self._start_if_lost(self.trainer.state.step)
        self._wait()

    def stop(self) -> None:
        if self._process is not None:
            self._process.terminate()
            self._process.wait()
            self._process = None

    def _start_if_lost(self, step: int) -> None:
        """Evaluate the export of `step` if its results are not recorded.

        Results are recorded under a later step. A kill may prevent that, or a resume may drop that record.
        """
        records = read_metrics(self.trainer.folder.metrics)
        if step not in (record.get("evaluated_step") for record in records):
            self.between_steps(step)

    def _start(self, step: int) -> None:
        self._step = step
        output = self._output()
        request = {"checkpoint": self.trainer.folder.export(step), "suite": self._suite, "output": output}
        try:
            output.mkdir(parents=True, exist_ok=True)
            overrides = [*(assign(*item) for item in request.items()), *as_data(self._options)]
            self._process = start_command("eval", overrides, output / "eval.log")
        except OSError as failure:
            self.trainer.log(f"step {step:,}: suite {self._suite} can't start ({failure.strerror})")

    def _output(self) -> Path:
        return self.trainer.folder.root / "eval" / f"{self._suite}-step-{self._step:07d}"

    def _collect(self) -> None:
        """Record the results of an evaluation that has ended. Infinite results become null."""
        if self._process is None or self._process.poll() is None:
            return
        self._process, output = None, self._output()
        name, state = f"step {self._step:,}: suite {self._suite}", self.trainer.state
        try:
            metrics = read_json(output / "results.json")["metrics"]
        except (OSError, ValueError):  # the file is missing or truncated by a full disk
            self.trainer.log(f"{name} failed, see {output / 'eval.log'}")
            return
        record = {"step": state.step, "tokens": state.tokens, "evaluated_step": self._step}
        self.trainer.logger.record(record | metrics)
        self.trainer.log(f"{name} done, {output}")

    def _wait(self) -> None:
        while self._process is not None:
            self.trainer.watchdog.beat(f"waiting for suite {self._suite}")
            self._collect()
            if self._process is not None:
                time.sleep(POLL)
