"""Pushes of a run's exports to the Hub, beside training."""

import json
import os
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from fla_train.hub.saved_config import assign
from fla_train.utils.hub_names import is_hub_name
from fla_train.utils.keys import key
from fla_train.utils.processes import POLL, start_command
from fla_train.utils.records import drop_records_after, read_metrics

DTYPES = ("auto", "float32", "bfloat16")
NICENESS = 10  # of the process: data workers and ranks come first
WRONG_REQUEST = 2  # exit status of a command that would fail in the same way again
# The process never touches the GPU, and its log holds no progress bars.
ENVIRONMENT = {"CUDA_VISIBLE_DEVICES": "", "HF_HUB_DISABLE_PROGRESS_BARS": "1"}


@dataclass
class HubConfig:
    """The `hub` section of `fla-train`."""

    repo_id: str | None = None
    push_every: int = key(0, at_least=0)
    private: bool = True
    dtype: str = key("auto", choices=DTYPES)
    license: str | None = None
    language: str | None = None
    timeout: float = key(600.0, at_least=0)

    def check(self) -> Iterator[str]:
        if self.repo_id is not None and not is_hub_name(self.repo_id):
            yield f"repo_id={self.repo_id} is not a name of the form user/model"
        if self.repo_id is None and self.push_every:
            yield "repo_id must be set with hub.push_every: the model's name on the Hub, user/model"


class HubPushes:
    """Pushes on rank 0, each by `fla-export` in another process, one after another in the order of steps.

    A push makes a commit of the repository's default branch, with a tag of the export's name. `pushes.jsonl`
    in the run folder records what has arrived; `fla-export` asks the Hub, too, so that a kill between the two
    costs nothing. What fails is a line, and is tried again at the next push and after a restart.

    Args:
        config: nothing is pushed without a `repo_id`.
        run: the run folder.
        mixer: import path of the model's mixer, if it is not ours.
        log: takes a line for the user.
    """

    def __init__(self, config: HubConfig, run: Path, mixer: str | None, log: Callable[[str], None]):
        self._config, self._mixer, self._log = config, mixer, log
        self._run, self._record, self._output = run, run / "pushes.jsonl", run / "logs/push.log"
        self._process: subprocess.Popen | None = None
        self._pushed: set[int] = set()
        self._waiting: list[int] = []  # steps, ascending; the process pushes the first

    def resume(self, step: int) -> None:
        """Take up the pushes up to `step`, from which training starts, that have not arrived."""
        if self._config.repo_id is None:
            return
        with suppress(OSError):
            drop_records_after(self._record, step)  # their models will be trained again
        records = read_metrics(self._record)
        self._pushed = {int(r["step"]) for r in records if r.get("repo_id") == self._config.repo_id}
        every = self._config.push_every
        for exported in range(every, step + 1, every) if every else ():
            if self._export(exported).is_dir():
                self.add(exported)

    def add(self, step: int) -> None:
        """Push the export of `step` after those that wait, unless it has arrived."""
        if self._config.repo_id is not None and step not in (*self._pushed, *self._waiting):
            self._waiting.append(step)
        self._start()

    def poll(self) -> None:
        """Log a push that has ended by now, and start the next; never waits."""
        if self._process is None or self._process.poll() is None:
            return
        status, self._process = self._process.returncode, None
        step = self._waiting[0]
        if status == 0:
            self._waiting.remove(step)
            self._pushed.add(step)
            self._log(f"step {step:,}: pushed to {self._config.repo_id}")
            record = {"step": step, "repo_id": self._config.repo_id}
            with suppress(OSError), self._record.open("a") as file:
                file.write(json.dumps(record) + "\n")
            self._start()
            return
        errors = []
        with suppress(OSError):
            errors = [line for line in self._output.read_text().splitlines() if line.startswith("error: ")]
        reason = errors[-1].removeprefix("error: ") if errors else f"see {self._output}"
        self._log(f"step {step:,}: NOT PUSHED, {reason}")
        if status == WRONG_REQUEST:  # a damaged export, say, which must not keep back the others
            self._waiting.remove(step)
            self._start()

    def finish(self, beat: Callable[[str], None]) -> None:
        """Wait for the pushes that are left, `hub.timeout` seconds at most.

        Args:
            beat: called while waiting, which is progress.
        """
        deadline = time.monotonic() + self._config.timeout
        if self._waiting:
            self._log(f"waiting up to {self._config.timeout:g} s for the push of step {self._waiting[-1]:,}")
        for _ in range(2):  # what fails is tried once more
            self._start()
            while self._process is not None and time.monotonic() < deadline:
                beat("waiting for a push to the Hub")
                time.sleep(POLL)
                self.poll()
        self.stop()
        if self._waiting:
            steps = ", ".join(f"{step:,}" for step in self._waiting)
            self._log(f"not on the Hub: step {steps}; the same command again pushes what is left")

    def stop(self) -> None:
        """End the push that runs, if one does; a restart takes it up."""
        if self._process is not None:
            self._process.terminate()
            self._process.wait()
            self._process = None

    def _export(self, step: int) -> Path:
        return self._run / "hf" / f"step-{step:07d}"

    def _start(self) -> None:
        """Start the first push that waits, if none runs."""
        if self._process is not None or not self._waiting:
            return
        config, export = self._config, self._export(self._waiting[0])
        given = {
            "checkpoint": export,
            "dtype": config.dtype,
            "mixer": self._mixer,
            "hub.repo_id": config.repo_id,
            "hub.tag": export.name,
            "hub.private": config.private,
            "hub.license": config.license,
            "hub.language": config.language,
        }
        try:
            self._output.parent.mkdir(exist_ok=True)
            overrides = [assign(name, value) for name, value in given.items() if value is not None]
            self._process = start_command("export", overrides, self._output, **ENVIRONMENT)
            os.setpriority(os.PRIO_PROCESS, self._process.pid, NICENESS)
        except OSError as failure:
            self._log(f"step {self._waiting[0]:,}: NOT PUSHED, {failure.strerror}")
