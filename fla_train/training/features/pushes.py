"""Push exports to the Hub during training.

Each push is `fla-export` in its own process, so uploads and conversions can neither slow nor stop training.
"""

import json
import os
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING

from fla_train.training.callback import Callback
from fla_train.training.run_folder import RunFolder
from fla_train.utils.hub_names import HubRepository
from fla_train.utils.keys import key
from fla_train.utils.overrides import assign
from fla_train.utils.processes import POLL, start_command
from fla_train.utils.records import drop_records_after, read_metrics

if TYPE_CHECKING:
    from fla_train.training.config import TrainConfig

NICENESS = 10  # lets ranks and data workers run before the process
WRONG_REQUEST = 2  # exit status of a push that would fail again, for example of a damaged export
# The process never uses the GPU, and its log contains no progress bars.
ENVIRONMENT = {"CUDA_VISIBLE_DEVICES": "", "HF_HUB_DISABLE_PROGRESS_BARS": "1"}


@dataclass
class HubConfig(HubRepository):
    push_every: int = key(0, at_least=0)
    dtype: str = key("auto", choices=("auto", "float32", "bfloat16"))
    timeout: float = key(600.0, at_least=0)

    def check(self) -> Iterator[str]:
        yield from super().check()
        if self.repo_id is None and self.push_every:
            yield "repo_id must be set with hub.push_every: the model's name on the Hub, user/model"


class Pushes(Callback):
    """Push every `hub.push_every`-th step's export and the last one, one at a time. Use it on rank 0.

    A push makes a commit on the repository's default branch and a tag with the export's name. `pushes.jsonl`
    in the run folder records the finished pushes. A failed push is logged as one line, and tried again with
    the next export, at the end of the run and after a restart.

    Args:
        config: config with `hub.repo_id`.
        folder: the run folder.
        log: writes one line for the user.
    """

    def __init__(self, config: "TrainConfig", folder: RunFolder, log: Callable[[str], None]) -> None:
        self._config, self._mixer = config.hub, config.model.get("mixer")
        self._folder, self._log = folder, log
        self._record, self._output = folder.root / "pushes.jsonl", folder.root / "logs/push.log"
        self._scratch = folder.root / ".push"  # temporary files of the process, also of one that was killed
        self._process: subprocess.Popen | None = None
        self._pushed: set[int] = set()
        self._waiting: list[int] = []  # steps in ascending order; the process pushes the first

    def attach(self, trainer) -> None:
        super().attach(trainer)
        self.resume(trainer.state.step)

    def after_results(self, results: Sequence) -> None:
        self.poll()

    def due(self, step: int) -> bool:
        return not self.trainer.finished and self.trainer.is_due(self._config.push_every)

    def between_steps(self, step: int) -> None:
        if self._folder.export(step).is_dir():
            self.add(step)

    def finish(self) -> None:
        """Push the last export after its evaluation, because the card contains the results."""
        self.add(self.trainer.state.step)
        self.wait(self.trainer.watchdog.beat)

    def stop(self) -> None:
        """End the running push; a restart repeats it."""
        if self._process is not None:
            self._process.terminate()
            self._process.wait()
            self._process = None
        shutil.rmtree(self._scratch, ignore_errors=True)

    def resume(self, step: int) -> None:
        """Queue the exports up to `step`, where training starts, that are newer than the last push."""
        with suppress(OSError):
            drop_records_after(self._record, step)  # training will write these exports again
        records = read_metrics(self._record)
        self._pushed = {int(r["step"]) for r in records if r.get("repo_id") == self._config.repo_id}
        every, last = self._config.push_every, max(self._pushed, default=0)
        for exported in range(every, step + 1, every) if every else ():
            # An older export would replace a newer one on the default branch.
            if exported > last and self._folder.export(exported).is_dir():
                self.add(exported)

    def add(self, step: int) -> None:
        """Queue the export of `step`, unless it is queued or pushed already."""
        if step not in (*self._pushed, *self._waiting):
            self._waiting.append(step)
        self._start()

    def poll(self) -> None:
        """Log a push that has ended and start the next one. Never waits."""
        if self._process is None or self._process.poll() is None:
            return
        status, self._process, step = self._process.returncode, None, self._waiting[0]
        if status == 0:
            self._pushed.add(step)
            self._log(f"step {step:,}: pushed to {self._config.repo_id}")
            with suppress(OSError), self._record.open("a") as file:
                file.write(json.dumps({"step": step, "repo_id": self._config.repo_id}) + "\n")
        else:
            errors = []
            with suppress(OSError):
                errors = [x for x in self._output.read_text().splitlines() if x.startswith("error: ")]
            reason = errors[-1].removeprefix("error: ") if errors else f"see {self._output}"
            self._log(f"step {step:,}: NOT PUSHED, {reason}")
        # Other failures stay first in the queue, so that exports arrive in order.
        if status in (0, WRONG_REQUEST):
            self._waiting.remove(step)
            self._start()

    def wait(self, beat: Callable[[str], None]) -> None:
        """Wait for the queued pushes, at most `hub.timeout` seconds, and try failed ones once more.

        Args:
            beat: called while waiting, to report progress.
        """
        deadline = time.monotonic() + self._config.timeout
        if self._waiting:
            self._log(f"waiting up to {self._config.timeout:g} s for the push of step {self._waiting[-1]:,}")
        for _ in range(2):
            self._start()
            while self._process is not None and time.monotonic() < deadline:
                beat("waiting for a push to the Hub")
                time.sleep(POLL)
                self.poll()
        self.stop()
        if self._waiting:
            steps = ", ".join(f"{step:,}" for step in self._waiting)
            self._log(f"not on the Hub: step {steps}; run the same command again to push the rest")

    def _start(self) -> None:
        """Start the first queued push, if none runs."""
        if self._process is not None or not self._waiting:
            return
        config, export = self._config, self._folder.export(self._waiting[0])
        options = {"checkpoint": export, "dtype": config.dtype, "mixer": self._mixer, "hub.tag": export.name}
        options |= {f"hub.{entry.name}": getattr(config, entry.name) for entry in fields(HubRepository)}
        try:
            for folder in (self._output.parent, self._scratch):
                folder.mkdir(exist_ok=True)
            overrides = [assign(name, value) for name, value in options.items() if value is not None]
            variables = ENVIRONMENT | {"TMPDIR": str(self._scratch)}
            self._process = start_command("export", overrides, self._output, **variables)
            os.setpriority(os.PRIO_PROCESS, self._process.pid, NICENESS)
        except OSError as failure:
            self._log(f"step {self._waiting[0]:,}: NOT PUSHED, {failure.strerror}")
