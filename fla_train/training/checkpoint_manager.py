"""Save checkpoints in the background of training, and report which are on disk and which failed.

A save copies the rank's state to a `StagingBuffer` in host memory, which its async writer's process shares.
"""

import json
import secrets
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict
from itertools import count
from pathlib import Path
from typing import Any

import torch.distributed as dist

from fla_train.training.async_writer import AsyncWriter, Save
from fla_train.training.checkpoint import STATE, WEIGHTS, WRITING, TrainState, folder_name, rank_file
from fla_train.training.failures import TrainingStopped
from fla_train.training.load_checkpoint import fragments_of
from fla_train.utils.filesystem import reason
from fla_train.utils.random_states import random_states
from fla_train.utils.staging_buffer import StagingBuffer


class CheckpointManager:
    """Save the checkpoints of a run. All ranks construct it and call its methods alike, except `poll`.

    A save copies the state to a staging buffer, from which the rank's async writer writes it. On a GPU the
    copy overlaps with the forward and backward pass of the next step and ends before its update. A save that
    fails (disk full, writer process killed) is reported. The earlier checkpoints stay, and the next save
    tries again.

    Args:
        engine: DeepSpeed's engine.
        folder: folder that holds the checkpoints.
        keep: number of newest checkpoints to keep; 0: all.
        keep_every: keep checkpoints at multiples of this step forever; 0: none.
        log: receives one line on rank 0 when a save has ended.
        saved_step: step of the checkpoint in `folder` that the run resumes from, or -1.
    """

    def __init__(
        self, engine, folder: Path, *, keep: int, keep_every: int, log: Callable, saved_step: int = -1
    ):
        self._engine, self._folder, self._log = engine, folder, log
        self._keep, self._keep_every = keep, keep_every
        self._rank, self._world = dist.get_rank(), dist.get_world_size()
        folder.mkdir(parents=True, exist_ok=True)
        self._staging = StagingBuffer()
        self._writer: AsyncWriter | None = None
        self._pending: tuple[Save, bytes] | None = None  # passed to the writer once the copy is complete
        self._step = saved_step  # step of the newest save
        self._error: str | None = None  # why the newest save failed
        # Whether all ranks have agreed on the end of the newest save, and whether it has been logged.
        self._agreed = self._reported = True
        # Use a new folder for each attempt, so that no rank mistakes an earlier attempt's files for this
        # one's.
        self._run = self._gather(secrets.token_hex(4))[0]
        self._attempts = count()
        self._hook = engine.optimizer.optimizer.register_step_pre_hook(lambda *_: self.finish_copy())

    def save(self, state: TrainState, features: Mapping[str, Any] | None = None) -> float:
        """Start to save a checkpoint of the current state. Return the seconds for which training paused.

        It first waits for the end of the previous save.

        Args:
            features: this rank's state of each feature by name. Its tensors must not change before
                `finish_copy`.
        """
        begin = time.perf_counter()
        self._wait()
        self._step, self._error, self._agreed, self._reported = state.step, None, False, False
        attempt = f"{WRITING}{folder_name(state.step)}-{self._run}-{next(self._attempts)}"
        try:
            segments, unstaged = self._staging.stage(self._content(state, features or {}))
            content = {"step": state.step, "world_size": self._world}
            save = Save(self._folder, attempt, self._rank, segments, content, self._keep, self._keep_every)
            self._pending = save, unstaged
            if self._writer is None or self._writer.process.poll() is not None:
                self._writer = AsyncWriter(self._staging.descriptor, self._rank)
        except OSError as failure:
            self._error = f"rank {self._rank}: {reason(failure)}"
            self._pending = None
            self._report(self._error)
        if not self._staging.copying:
            self.finish_copy()
        return time.perf_counter() - begin

    def poll(self) -> None:
        """Report a save that has ended since the last call. Rank 0 may call it alone, at every step."""
        if not self._reported and self._pending is None and self._writer is not None and self._writer.done():
            self._report(*self._writer.result())

    def is_saved(self, step: int) -> bool:
        """Return whether a checkpoint of `step` is on disk, after waiting for the current save."""
        self._wait()
        return self._step == step and self._error is None

    def ensure_saved(self, step: int) -> None:
        """Wait until the checkpoint of `step` is on disk.

        Raises:
            TrainingStopped: it could not be written.
        """
        if not self.is_saved(step):
            raise TrainingStopped(f"step {step} has no checkpoint: {self._error}; free space and start again")

    def close(self) -> None:
        """End the writer's process. No save may be in progress."""
        self._hook.remove()
        if self._writer is not None:
            self._writer.close()
        self._staging.close()

    def _content(self, state: TrainState, features: Mapping[str, Any]) -> dict[str, object]:
        """Return this rank's files: name -> content, whose tensors are the engine's.

        The fp32 masters are left out, because the weights are fp32 too.
        """
        shard = {
            "optimizer": self._engine.optimizer.optimizer.state_dict(),
            "fragments": fragments_of(self._engine),
            "random": random_states(),
            "features": dict(features),
        }
        files: dict[str, object] = {rank_file(self._rank): shard}
        if self._rank == 0:
            files[STATE] = (json.dumps(asdict(state), indent=2) + "\n").encode()
            files[WEIGHTS] = self._engine.module.state_dict()
        return files

    def finish_copy(self) -> None:
        """Wait for the end of the copy and start the writer.

        Call it before the optimizer's step and before each wait for a save.
        """
        if self._pending is not None:
            self._staging.wait()
            self._writer.start(*self._pending)
            self._pending = None

    def _wait(self) -> None:
        """Wait for the end of the newest save, and agree with the other ranks on its error."""
        if self._agreed:
            return
        self.finish_copy()
        error = self._error
        if self._rank and error is None:
            error = self._writer.result().error
        others = next((other for other in self._gather(error) if other is not None), None)
        if self._rank == 0 and error is None:
            if self._world > 1:
                self._writer.others_are_done(others)
            result = self._writer.result()
            self._report(*result)
            error = result.error
        self._error = self._gather(error)[0]
        self._agreed = True

    def _gather(self, value: str | None) -> list[str | None]:
        """Return the values of all ranks. A single rank does not wait for its GPU."""
        values = [value] * self._world
        if self._world > 1:
            dist.all_gather_object(values, value)
        return values

    def _report(self, error: str | None, seconds: float = 0.0, warning: str | None = None) -> None:
        if self._rank or self._reported:
            return
        self._reported = True
        outcome = f"NO CHECKPOINT, {error}; the earlier ones are untouched"
        if error is None:
            path = self._folder / folder_name(self._step)
            outcome = f"checkpoint {path}, written in {seconds:.1f} s" + (f"; {warning}" if warning else "")
        self._log(f"step {self._step:,}: {outcome}")
