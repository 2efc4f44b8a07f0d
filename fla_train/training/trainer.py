"""Run the training loop: optimizer steps, with evaluation, checkpoints and exports between them."""

import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

import torch
import torch.distributed as dist
from torch import Tensor
from transformers import PreTrainedModel

from fla_train.data.cache import PreparedData
from fla_train.data.sampler import Batch, BatchSampler, PrefetchLoader
from fla_train.models.build import is_zoo
from fla_train.training.callback import Callback, make_callbacks
from fla_train.training.checkpoint import TrainState
from fla_train.training.checkpoint_manager import CheckpointManager
from fla_train.training.checks import features_of
from fla_train.training.engine import HostTransfer, StepResult, build_engine, precompile_step, train_step
from fla_train.training.failures import TrainingStopped
from fla_train.training.features.bad_steps import BadSteps
from fla_train.training.features.evaluation import TaskEvaluation, TextEvaluation
from fla_train.training.features.exports import Exports
from fla_train.training.features.profile import Profile
from fla_train.training.features.pushes import Pushes
from fla_train.training.features.statistics import Statistics
from fla_train.training.features.suites import Suites
from fla_train.training.load_checkpoint import is_loadable, load_checkpoint, load_features, load_random_states
from fla_train.training.log import RunLogger
from fla_train.training.optimizer import make_schedule
from fla_train.training.plan import RunPlan
from fla_train.training.preemption import StopRequest
from fla_train.training.process_group import RankMesh
from fla_train.training.resume import check_config_consistency, recorded
from fla_train.training.run_data import open_training_data, to_batch
from fla_train.training.run_folder import RunFolder, RunLock
from fla_train.utils.processes import cores_of_rank
from fla_train.utils.records import Record
from fla_train.utils.throughput import Throughput, peak_flops
from fla_train.utils.timeline import Timeline
from fla_train.utils.watchdog import Watchdog

# Steps within which results are read, even if they are rarely logged.
READ_EVERY = 10


@dataclass
class FinishedStep:
    """Hold the results of an optimizer step on the host. All but `metrics` are equal on all ranks."""

    step: int
    tokens: int  # tokens of the run so far
    rate: float  # learning rate
    result: StepResult
    metrics: dict[str, float]


class Trainer:
    """Train one rank of a run. Rank 0 writes files and terminal; everything else runs on all ranks.

    Args:
        data: prepared text, or a task's `TaskData`.
        model: model with initial weights on the CPU; on `resume` the checkpoint's weights replace them.
        resume: checkpoint to start from; None: the beginning.
        stream: terminal where rank 0 shows progress.
        watchdog: receives a beat with each progress.
        request: request to stop; once it arrives on any rank, all ranks save a checkpoint and leave.
        lock: lock of the run's folder, on rank 0.
        timeline: phases of the start so far.
    """

    def __init__(
        self,
        plan: RunPlan,
        data: PreparedData,
        model: PreTrainedModel,
        resume: Path | None,
        stream: TextIO,
        watchdog: Watchdog,
        request: StopRequest,
        lock: RunLock | None,
        timeline: Timeline,
    ):
        config, trainer = plan.config, plan.config.trainer
        self.config, self.data, self.watchdog, self.request, self.lock = config, data, watchdog, request, lock
        self.folder = RunFolder(Path(config.run.dir))
        self.timeline = timeline  # phases of the start, later of the end
        self.engine = build_engine(model, config)
        self.model = self.engine.module
        self.timeline.mark("engine")
        self.rank, self.mesh = dist.get_rank(), RankMesh(config.launch.context_parallel)

        # Restore weights, optimizer and position.
        continued = resume is not None and self.folder.owns(resume)
        self.state = self._restore(resume, continued)
        self.first_step = self.state.step + 1

        # Set up data, loggers and checkpoints of the loop.
        rows = trainer.global_batch_tokens // trainer.seq_len
        self.batches = BatchSampler(rows, trainer.micro_batch_size, self.mesh.data_rank, self.mesh.data_world)
        self.train_data = open_training_data(config, data)
        self.schedule = make_schedule(config)
        self.logger = RunLogger(config, self.folder, self.state, stream, self.rank)
        self.log = self.logger.log
        device = self.engine.device
        gpu = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
        peak = peak_flops(gpu, trainer.precision, config.launch.peak_tflops)
        all_peaks = None if peak is None else peak * dist.get_world_size()
        self.throughput = Throughput(plan.flops_per_token, all_peaks, device)
        keep = {"keep": trainer.keep_checkpoints, "keep_every": trainer.keep_every}
        saved, folder = (self.state.step if continued else -1), self.folder.checkpoints
        self.checkpoints = CheckpointManager(self.engine, folder, **keep, log=self.log, saved_step=saved)
        # Launched steps by number, each with the function that waits for its end and returns its results.
        self.unread: list[tuple[int, Callable[[], FinishedStep]]] = []
        self.stopping = False  # whether a rank was asked to stop
        self.reached = False  # whether the run ends before its last step; equal on all ranks
        self._unlogged: Record | None = None  # record of the newest step, if it was not to be logged

        # Attach features last, because they read all of the above. Set random states after that, because
        # features may draw numbers until then.
        clip, deviations = config.optimizer.max_grad_norm, trainer.spike_deviations
        self.bad_steps = BadSteps(self.engine.device, max_grad_norm=clip, spike_deviations=deviations)
        self.features = build_features(self)
        for feature in self.features:
            feature.attach(self)
        if resume is not None:
            load_features(self.features, resume, self.log)
            load_random_states(resume)
        self.timeline.mark("evaluation and loggers")

    def _restore(self, resume: Path | None, continued: bool) -> TrainState:
        """Load the checkpoint, if any. Return its state as the state of this run.

        Args:
            continued: whether the checkpoint is in this run's folder. A branch gets a separate W&B run.
        """
        check_config_consistency(self.config, self.data, resume, self.folder)
        state = load_checkpoint(self.engine, resume) if resume else TrainState()
        self.timeline.mark("checkpoint")
        state.data, state.commits = self.data.folder.name, self.data.commits()
        state.config = recorded(self.config)
        state.run = self.folder.id() if self.rank == 0 else None  # only rank 0 saves the state
        state.wandb_id = state.wandb_id if continued else None
        return state

    @property
    def finished(self) -> bool:
        """Return whether the run's last step is done."""
        return self.reached or self.state.step >= self.config.trainer.max_steps

    def is_due(self, every: int) -> bool:
        """Return whether work that runs each `every` steps (0: never) and at the end is due now."""
        return self.finished or _divides(every, self.state.step)

    def is_observed(self, step: int) -> bool:
        """Return whether `step` gets statistics."""
        return _divides(self.config.trainer.stats_every, step)

    def run(self) -> bool:
        """Train to `trainer.max_steps`, or until a feature sets `reached`.

        It writes a checkpoint, an export and a plot of the last step.

        Returns:
            False if a request to stop ended it earlier, with a checkpoint.
        """
        loader = PrefetchLoader(self.train_data, self.batches, self.state.step, self.config.trainer.max_steps)
        with loader, _existing_objects_not_collected():
            while not self.finished:
                self.throughput.start()
                tokens = self._step(loader)
                finished = self._read_results()
                self.throughput.stop(tokens)
                self._report(finished)
                self.checkpoints.poll()
                # A feature may have just ended the run.
                if self.finished:
                    self._report(self._read(len(self.unread)))
                self._between_steps()
                if self.stopping and not self.finished:
                    # Close everything once the checkpoint is on disk.
                    self.ensure_saved()
                    self.log(f"step {self.state.step:,}: stopped on request")
                    for feature in self.features:
                        feature.stop()
                    self.logger.close()
                    return False
        self._finish()
        return True

    def _step(self, loader: PrefetchLoader) -> int:
        """Launch the next optimizer step and return its tokens over all ranks.

        In a task's curriculum, an early step has shorter sequences and fewer tokens than a later one.
        """
        step, trainer = self.state.step + 1, self.config.trainer
        first = step == self.first_step

        # Read the data.
        self.watchdog.beat(f"waiting for the data of step {step}", "data")
        with self.throughput.waiting():
            device, count = self.engine.device, self.batches.accumulation
            micro_batches = [to_batch(next(loader), device, self.mesh.context) for _ in range(count)]
        if first:
            self.timeline.mark("data")
            self._precompile(micro_batches[0])

        # Launch the step. Each combination of shapes and observations may compile other kernels.
        shapes = tuple(batch.input_ids.shape for batch in micro_batches)
        kind = ("step", shapes, self.is_observed(step), step in trainer.profile_steps)
        self.watchdog.beat(f"in step {step}", kind)
        if any(feature.changes_in_place for feature in self.features):
            self.checkpoints.finish_copy()
        for feature in self.features:
            feature.before_step(step, micro_batches)
        rate, stop, features = self.schedule(step), self.request.arrived(), self.features
        outcome = train_step(self.engine, micro_batches, rate, self.bad_steps, stop=stop, features=features)
        metrics: dict[str, Tensor | float] = {}
        for feature in self.features:
            feature.after_step(step, metrics)

        # Update the counters, which do not depend on the results. The results stay on the device.
        if first:
            self.timeline.mark(f"step {step}")
            self.log(f"start        {self.timeline}")
        tokens = dist.get_world_size() * sum(shape.numel() for shape in shapes)
        self.state.step = step
        self.state.sequences += self.batches.global_batch
        self.state.tokens += tokens
        self._queue(rate, outcome.read, metrics)
        return tokens

    def _queue(self, rate: float, wait: Callable[[], StepResult], metrics: dict[str, Tensor | float]) -> None:
        """Add the newest step to the unread ones, and start to copy its metrics to the host.

        Args:
            wait: waits for the end of the step and returns its result.
        """
        # A blocking copy of a number to the device would wait for the step.
        values = [torch.as_tensor(value).detach().double() for value in metrics.values()]
        values = [value.to(self.engine.device, non_blocking=True) for value in values]
        copied = HostTransfer(torch.stack(values) if values else torch.empty(0))
        names, step, tokens = list(metrics), self.state.step, self.state.tokens

        def read() -> FinishedStep:
            named = dict(zip(names, copied.read(), strict=True))
            return FinishedStep(step, tokens, rate, wait(), named)

        self.unread.append((step, read))

    def _precompile(self, batch: Batch) -> None:
        if self.engine.device.type == "cuda" and not is_zoo(self.config.model):
            self.watchdog.beat("compiling the kernels of the first step")
            # Custom callbacks may count the calls of `model_inputs`, so only this package's are called.
            features = [x for x in self.features if type(x).__module__.startswith("fla_train.")]
            precompile_step(self.engine, batch, cores_of_rank(), features)
            self.timeline.mark("kernels")

    def _read_results(self) -> list[FinishedStep]:
        """Read the results that are needed now, oldest first. After a request to stop, read all of them."""
        trainer, step = self.config.trainer, self.state.step
        if self.is_due(trainer.checkpoint_every) or any(feature.due(step) for feature in self.features):
            return self._read(len(self.unread))
        periods = (trainer.log_every, trainer.stats_every, READ_EVERY)
        finished = self._read(readable_late([step for step, _ in self.unread], periods))
        if any(entry.result.stop for entry in finished):
            finished += self._read(len(self.unread))
        return finished

    def _read(self, count: int) -> list[FinishedStep]:
        """Remove the `count` oldest unread steps from the queue and wait for their results."""
        launched, self.unread = self.unread[:count], self.unread[count:]
        return [read() for _, read in launched]

    def _report(self, finished: Sequence[FinishedStep]) -> None:
        """Count and log finished steps, equally on all ranks, and pass them to the features.

        Raises:
            TrainingStopped: too many consecutive steps were skipped.
        """
        state, trainer = self.state, self.config.trainer
        speed: Record = {}
        for entry in finished:
            step, result = entry.step, entry.result
            state.skipped_steps += result.skipped
            state.skipped_in_row = state.skipped_in_row + 1 if result.skipped else 0
            self.stopping |= result.stop
            if step == self.first_step and not result.targets:
                self.log("warning      the loss is 0: no token of the first step is a target")
            last = self.finished and step == state.step
            self._unlogged = {
                "step": step,
                "tokens": entry.tokens,
                "loss": result.loss,
                "lr": entry.rate,
                "grad_norm": result.grad_norm,
                "skipped_steps": state.skipped_steps,
                **entry.metrics,
            }
            if result.skipped or last or self.is_observed(step) or _divides(trainer.log_every, step):
                speed = speed or self.throughput.read()
                self.logger.step(self._unlogged | speed, skipped=result.skipped)
                self._unlogged = None
            if state.skipped_in_row >= trainer.max_skipped_steps:
                cause = f"the last {state.skipped_in_row} steps were skipped (NaN, infinity or a spike)"
                raise TrainingStopped(f"{cause}: lower optimizer.lr, or raise schedule.warmup_steps")
        if finished:
            for feature in self.features:
                feature.after_results(finished)

    def _between_steps(self) -> None:
        """Run the features that are due, then save the checkpoint.

        The checkpoint comes last, so a resumed run repeats work that a kill interrupted before it.
        """
        for feature in self.features:
            if feature.due(self.state.step):
                feature.between_steps(self.state.step)
        if not self.finished and (self.stopping or self.is_due(self.config.trainer.checkpoint_every)):
            self._save()

    def _save(self) -> None:
        state = self.state
        self.watchdog.beat(f"copying a checkpoint of step {state.step}")
        if self.lock is not None:
            self.lock.check()
        states = {feature.name: feature.state_dict() for feature in self.features}
        # With other types no checkpoint could be read again.
        for name, content in states.items():
            if not is_loadable(content):
                raise TrainingStopped(f"the state of {name} holds more than tensors and plain values")
        stall = self.checkpoints.save(state, {name: content for name, content in states.items() if content})
        self.logger.record(
            {"step": state.step, "tokens": state.tokens, "checkpoint_stall_s": round(stall, 4)}
        )

    def ensure_saved(self) -> None:
        """Wait until the newest step's checkpoint, the last of this process, is on disk.

        Raises:
            TrainingStopped: it could not be written.
        """
        self.checkpoints.ensure_saved(self.state.step)
        self.checkpoints.close()
        self.timeline.mark("rest of the checkpoint")

    def _finish(self) -> None:
        """Write the last step's files that a resumed or killed run still lacks, and the summary.

        Raises:
            TrainingStopped: the last checkpoint or export could not be written.
        """
        if self._unlogged is not None:  # a feature has ended the run after this step's report
            self.logger.step(self._unlogged | self.throughput.read(), skipped=False)
        if not self.checkpoints.is_saved(self.state.step):
            self._save()
            self.checkpoints.finish_copy()
        self.timeline.mark("copy of the checkpoint")
        for feature in self.features:
            feature.finish()
        self.log(f"end          {self.timeline}")
        self.logger.close()
        for feature in self.features if self.rank == 0 else ():
            for line in feature.summary():
                self.log(line)


def build_features(trainer: Trainer) -> list[Callback]:
    """Return the features of a run in the order in which each hook calls them.

    Features that read a step come after those that change it. Between steps, an evaluation comes before the
    export, whose card shows its results. Exports come before the suites and pushes that read them.
    """
    config = trainer.config
    features = [trainer.bad_steps, *features_of(config), *make_callbacks(config.trainer.callbacks)]
    features += [Statistics(), Profile()]
    features += [TextEvaluation() if config.task is None else TaskEvaluation(), Exports()]
    if trainer.rank == 0 and config.trainer.suite_every:
        features.append(Suites())
    if trainer.rank == 0 and config.hub.repo_id is not None:
        features.append(Pushes(config, trainer.folder, trainer.log))
    return features


def readable_late(steps: Sequence[int], periods: Sequence[int]) -> int:
    """Return how many of the unread `steps`, oldest first, to read now only for the log.

    Reading waits for the device, and nothing else does. So results are read one step late, when the next
    step's kernels are queued. They are read at most READ_EVERY steps late, because a request to stop arrives
    with a result and a batch system grants only minutes.
    """
    before = len(steps) - 1
    return before if before and any(_divides(every, steps[-2]) for every in periods) else 0


def _divides(every: int, step: int) -> bool:
    return every > 0 and step % every == 0


@contextmanager
def _existing_objects_not_collected() -> Iterator[None]:
    """Exclude existing objects from garbage collection inside the `with` block.

    There are about half a million: a full collection takes 0.3 s and stalls ranks at different steps.
    """
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
