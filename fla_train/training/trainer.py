"""The training loop: one optimizer step after another, with evaluation, checkpoints and exports between."""

import gc
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TextIO

import torch
import torch.distributed as dist
from torch import Tensor
from transformers import PreTrainedModel

from fla_train.data.cache import PreparedData
from fla_train.data.sampler import BatchSampler, PrefetchLoader
from fla_train.hub.pushes import HubConfig, HubPushes
from fla_train.models.build import is_zoo
from fla_train.training.bad_steps import BadStepFilter
from fla_train.training.checkpoint import TrainState
from fla_train.training.checkpoint_manager import CheckpointManager
from fla_train.training.config import TrainConfig
from fla_train.training.cuda_graph import CudaGraphPass, records_graph
from fla_train.training.engine import Outcome, StepResult, build_engine, precompile_step, train_step
from fla_train.training.evaluator import SuiteRuns, make_evaluator
from fla_train.training.failures import TrainingStopped
from fla_train.training.initial_states import InitialStates
from fla_train.training.load_checkpoint import load_checkpoint
from fla_train.training.log import RunLogger
from fla_train.training.metrics import step_statistics, to_host
from fla_train.training.model import Exporter
from fla_train.training.optimizer import learning_rate
from fla_train.training.plan import training_flops
from fla_train.training.preemption import StopRequest
from fla_train.training.process_group import split_ranks
from fla_train.training.resume import check_config_consistency, recorded
from fla_train.training.run_data import open_training_data, to_batch
from fla_train.training.run_folder import RunFolder, RunLock
from fla_train.utils.processes import cores_of_rank
from fla_train.utils.profiling import profiled
from fla_train.utils.records import Record
from fla_train.utils.throughput import Throughput, peak_flops
from fla_train.utils.timeline import Timeline
from fla_train.utils.watchdog import Watchdog

READ_EVERY = 10  # steps within which outcomes are read, however seldom they are logged


class Trainer:
    """One rank of a run. Files and terminal belong to rank 0; everything else is done by all ranks.

    Args:
        data: prepared text, or a task's `TaskData`.
        model: with the weights to start from, on the CPU; on `resume` those of the checkpoint replace them.
        resume: checkpoint to start from; None: the beginning.
        stream: where rank 0 shows progress.
        watchdog: gets a beat with each progress.
        request: once made on any rank, all save a checkpoint and leave.
        lock: of the run's folder, on rank 0.
        timeline: of the start so far.
    """

    def __init__(
        self,
        config: TrainConfig,
        data: PreparedData,
        model: PreTrainedModel,
        resume: Path | None,
        stream: TextIO,
        watchdog: Watchdog,
        request: StopRequest,
        lock: RunLock | None = None,
        timeline: Timeline | None = None,
    ):
        trainer = config.trainer
        self.config, self.watchdog, self.request, self.lock = config, watchdog, request, lock
        self.folder = RunFolder(Path(config.run.dir))
        self.timeline = timeline or Timeline()  # of the start, then of the end
        self.engine = build_engine(model, config)
        self.timeline.mark("engine")
        self.rank, world = dist.get_rank(), dist.get_world_size()
        mesh = split_ranks(config.launch.context_parallel)
        self.context = mesh.context
        check_config_consistency(config, data, resume, self.folder)
        self.state = load_checkpoint(self.engine, resume) if resume else TrainState()
        self.timeline.mark("checkpoint")
        self.state.data, self.state.commits = data.folder.name, data.commits()
        self.state.config = recorded(config)
        self.state.run = self.folder.id() if self.rank == 0 else None  # rank 0 saves the state
        own = resume is not None and self.folder.owns(resume)
        if not own:  # a branch of another run, whose W&B run stays separate
            self.state.wandb_id = None
        self.batches = BatchSampler(
            global_batch=trainer.global_batch_tokens // trainer.seq_len,
            micro_batch=trainer.micro_batch_size,
            rank=mesh.data_rank,
            world=mesh.data_world,
        )
        self.train_data = open_training_data(config, data)
        self.evaluator = make_evaluator(config, data, self.folder, self.engine, mesh, watchdog.beat)
        self.logger = RunLogger(config, self.folder, self.state, stream, self.rank)
        self.states = InitialStates.of_run(config, self.batches, self.engine, resume, self.logger.log)
        device = self.engine.device
        self.bad_steps = BadStepFilter(
            device,
            max_grad_norm=config.optimizer.max_grad_norm,
            spike_deviations=trainer.spike_deviations,
            statistics=self.state.loss_statistics,
        )
        self.cuda_graph = None
        if records_graph(config):
            self.cuda_graph = CudaGraphPass(self.engine.module, bf16=trainer.autocasts)
        name = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
        peak = peak_flops(name, trainer.precision, config.launch.peak_tflops)
        self.throughput = Throughput(training_flops(config), None if peak is None else peak * world, device)
        self.checkpoints = CheckpointManager(
            self.engine,
            self.folder.checkpoints,
            keep=trainer.keep_checkpoints,
            keep_every=trainer.keep_every,
            log=self.logger.log,
            saved_step=self.state.step if own else -1,
        )
        self.exporter = Exporter(config, data, self.folder, self.engine, self.logger)
        self.suites: SuiteRuns | None = None
        if self.rank == 0 and trainer.suite_every:
            self.suites = SuiteRuns(
                trainer.suite,
                trainer.suite_options,
                self.folder.root / "eval",
                record=self.logger.record,
                log=self.logger.log,
            )
        self._first = True  # no step was launched yet
        self._first_read = True  # none was read
        hub = config.hub if self.rank == 0 else HubConfig()
        self.pushes = HubPushes(hub, self.folder.root, config.model.get("mixer"), self.logger.log)
        # Step, tokens so far, learning rate, outcome on the device.
        self.unread: list[tuple[int, int, float, Outcome]] = []
        self.statistics: dict[str, Tensor] = {}  # of the newest step
        self.stopping = False  # a rank got a request to stop
        self.reached = False  # the run's target, before its last step; the same on all ranks
        self.timeline.mark("evaluation and loggers")

    def run(self) -> bool:
        """Train to `trainer.max_steps`, or until the evaluator's target is reached.

        Leaves a checkpoint, an export and a plot of the last step.

        Returns:
            False when a request ended it earlier, with a checkpoint.
        """
        trainer, state = self.config.trainer, self.state
        self.reached = self.evaluator.has_reached(state.step)  # killed before it had written all its files
        if self.suites is not None and not self._finished():
            due = state.step // trainer.suite_every * trainer.suite_every
            self.suites.start_if_lost(self.folder.export(due), due, self.folder.metrics)
        self.pushes.resume(state.step)
        loader = PrefetchLoader(self.train_data, self.batches, state.step, trainer.max_steps)
        with loader, _existing_objects_not_collected():
            while not self._finished():
                self.throughput.start()
                tokens = self._step(loader)
                results = self._read(self._readable_outcomes())
                if any(result.stop for *_, result in results):
                    results += self._read(len(self.unread))
                self.throughput.stop(tokens)
                self._account(results)
                self.checkpoints.poll()
                if results and self.suites is not None:
                    self.suites.collect(state.step, state.tokens)
                if results:
                    self.pushes.poll()
                if self._due(trainer.eval_every):
                    self._evaluate()
                if self._finished():
                    break
                # The checkpoint last: whatever a kill leaves undone before it, the resumed run does again.
                suite_due = trainer.suite_every > 0 and self._due(trainer.suite_every)
                push_due = self._due(self.config.hub.push_every)
                if self._due(trainer.export_every) or suite_due or push_due:
                    export = self._export()
                    if suite_due and self.suites is not None and export is not None:
                        self.suites.start(export, state.step)
                    if push_due and export is not None:
                        self.pushes.add(state.step)
                if self._due(trainer.checkpoint_every) or self.stopping:
                    self._save()
                if self.stopping:
                    self._leave()
                    return False
        self._finish()
        return True

    def _step(self, loader: PrefetchLoader) -> int:
        """Launch the next optimizer step; its outcome stays on the device.

        Returns:
            Its tokens, over all ranks: fewer than a later step's while a task's curriculum has shorter words.
        """
        trainer, step, first = self.config.trainer, self.state.step + 1, self._first
        self._first = False
        self.watchdog.beat(f"waiting for the data of step {step}", "data")
        with self.throughput.waiting():
            device, count = self.engine.device, self.batches.accumulation
            batch = [to_batch(next(loader), device, self.context) for _ in range(count)]
        if first:
            self.timeline.mark("data")
            if self.engine.device.type == "cuda" and not is_zoo(self.config.model):
                self.watchdog.beat(f"compiling the kernels of step {step}")
                precompile_step(self.engine, batch[0], cores_of_rank(), self.states)
                self.timeline.mark("kernels")
        if self.states is not None:
            self.checkpoints.finish_copy()  # of the states, which `begin` changes
            self.states.prepare(self.engine, batch[0])
            self.states.begin(self.state.step, batch)
        rate = learning_rate(
            step, peak=self.config.optimizer.lr, max_steps=trainer.max_steps, schedule=self.config.schedule
        )
        self.statistics = {}
        observe = trainer.stats_every > 0 and step % trainer.stats_every == 0
        shapes = tuple(micro_batch.input_ids.shape for micro_batch in batch)
        kind = ("step", shapes, observe, step in trainer.profile_steps)  # each may compile other kernels
        self.watchdog.beat(f"in step {step}", kind)
        with ExitStack() as stack:
            if observe:
                stack.enter_context(step_statistics(self.engine, self.statistics, self.context))
            if step in trainer.profile_steps:
                stack.enter_context(profiled(self.folder.root / "profile", step, self.rank))
            outcome = train_step(
                self.engine,
                batch,
                rate,
                self.bad_steps,
                stop=self.request.made(),
                cuda_graph=None if observe else self.cuda_graph,  # a graph has no hooks
                states=self.states,
            )
        if first:
            self.timeline.mark(f"step {step}")
            self.logger.log(f"start        {self.timeline}")
            self.checkpoints.reserve()
        tokens = dist.get_world_size() * sum(micro_batch.input_ids.numel() for micro_batch in batch)
        self.state.step = step
        self.state.sequences += self.batches.global_batch
        self.state.tokens += tokens
        self.unread.append((step, self.state.tokens, rate, outcome))
        return tokens

    def _readable_outcomes(self) -> int:
        """How many outcomes, from the oldest on, are to be read now."""
        trainer = self.config.trainer
        readers = (trainer.eval_every, trainer.export_every, trainer.checkpoint_every, trainer.suite_every)
        if self.statistics or any(self._due(every) for every in (*readers, self.config.hub.push_every)):
            return len(self.unread)
        return readable_late([step for step, *_ in self.unread], trainer.log_every)

    def _read(self, count: int) -> list[tuple[int, int, float, StepResult]]:
        """Step, tokens so far, learning rate and result of the `count` oldest outcomes, which are dropped."""
        unread, self.unread = self.unread[:count], self.unread[count:]
        return [(*known, outcome.read()) for *known, outcome in unread]

    def _account(self, results: list[tuple[int, int, float, StepResult]]) -> None:
        """Count and log steps that have ended; the same on all ranks.

        Raises:
            TrainingStopped: too many in a row were skipped.
        """
        state, trainer = self.state, self.config.trainer
        speed: Record = {}
        if self._first_read and results and results[0][-1].loss == 0.0:
            self.logger.log("warning      the loss is 0: no token of the first step is a target")
        self._first_read &= not results
        for step, tokens, rate, result in results:
            state.skipped_steps += result.skipped
            state.skipped_in_row = state.skipped_in_row + 1 if result.skipped else 0
            self.stopping |= result.stop
            last = step == state.step and (self._finished() or self.statistics)
            if result.skipped or last or step % trainer.log_every == 0:
                speed = speed or self.throughput.read()
                record: Record = {
                    "step": step,
                    "tokens": tokens,
                    "loss": result.loss,
                    "lr": rate,
                    "grad_norm": result.grad_norm,
                    **speed,
                    "skipped_steps": state.skipped_steps,
                }
                if last:
                    record |= to_host(self.statistics)
                self.logger.step(record, skipped=result.skipped)
            if state.skipped_in_row >= trainer.max_skipped_steps:
                raise TrainingStopped(
                    f"the loss or its gradient was NaN, infinite or a spike in {state.skipped_in_row} "
                    f"steps in a row, up to step {step}: lower optimizer.lr, or raise schedule.warmup_steps"
                )

    def _due(self, every: int) -> bool:
        """Whether something done each `every` steps (0: never) and at the end is due after this step."""
        return self._finished() or (every > 0 and self.state.step % every == 0)

    def _finished(self) -> bool:
        return self.reached or self.state.step >= self.config.trainer.max_steps

    def _evaluate(self) -> None:
        """Evaluate, log the result, and see whether the target is reached."""
        state, self.timeline = self.state, Timeline()
        self.watchdog.beat(f"evaluating after step {state.step}")
        found = self.evaluator.evaluate(state.step)
        self.timeline.mark("validation")
        if found is None:
            return
        record, line = found
        self.logger.record({"step": state.step, "tokens": state.tokens, **record})
        self.logger.log(f"step {state.step:,}: {line}")
        self.reached = self.evaluator.has_reached(state.step)
        if self.reached:
            self.logger.log(f"step {state.step:,}: task.stop_at reached twice in a row; the run ends here")

    def _export(self, *, last: bool = False) -> Path | None:
        self.watchdog.beat(f"exporting step {self.state.step}")
        return self.exporter.export(self.state, last=last)

    def _save(self) -> None:
        self.watchdog.beat(f"copying a checkpoint of step {self.state.step}")
        if self.lock is not None:
            self.lock.check()
        self.state.loss_statistics = self.bad_steps.statistics()
        stall = self.checkpoints.save(self.state, None if self.states is None else self.states.saved())
        self.logger.record(
            {"step": self.state.step, "tokens": self.state.tokens, "checkpoint_stall_s": round(stall, 4)}
        )

    def _leave(self) -> None:
        """Close what is open, after a request to stop, once the checkpoint is on disk."""
        self.checkpoints.ensure_saved(self.state.step)
        self.checkpoints.close()
        self.logger.log(f"step {self.state.step:,}: stopped on request")
        if self.suites is not None:
            self.suites.stop()
        self.pushes.stop()
        self.logger.close()

    def _finish(self) -> None:
        """The last step's files, where a resumed or killed run still lacks them, and the summary.

        The writer's process writes the checkpoint while this one exports. The export is pushed after its
        evaluation, whose results then stand in its card.

        Raises:
            TrainingStopped: the last checkpoint or export could not be written.
        """
        state = self.state
        if not self.checkpoints.is_saved(state.step):
            self._save()
            self.checkpoints.finish_copy()
        self.timeline.mark("copy of the checkpoint")
        export = self._export(last=True)
        self.timeline.mark("export")
        self.checkpoints.ensure_saved(state.step)
        self.checkpoints.close()
        self.timeline.mark("rest of the checkpoint")
        if export is None:
            raise TrainingStopped(
                f"the model of step {state.step} could not be exported ({self.exporter.error}): remove the "
                "cause (free space on a full disk) and give the same command again, which only exports"
            )
        self.logger.log(f"end          {self.timeline}")
        if self.suites is not None:
            self.suites.start_if_lost(export, state.step, self.folder.metrics)
            self.suites.finish(state.step, state.tokens, self.watchdog.beat)
        self.pushes.add(state.step)
        self.pushes.finish(self.watchdog.beat)
        self.logger.close()
        if self.rank == 0:
            for line in self.evaluator.summary(state, export):
                self.logger.log(line)


def readable_late(steps: Sequence[int], log_every: int) -> int:
    """How many outcomes that are only logged are to be read now, of those of `steps`, which are unread.

    Reading waits for the device, and nothing else does. These are therefore read a step late, when the next
    step's work is in the device's queue; and no later than READ_EVERY steps on, since a request to stop comes
    with an outcome, and a batch system grants minutes.
    """
    before = len(steps) - 1
    return before if before and any(steps[-2] % every == 0 for every in (log_every, READ_EVERY)) else 0


@contextmanager
def _existing_objects_not_collected() -> Iterator[None]:
    """Inside, exclude existing objects from garbage collection.

    They are half a million by now: a full pass takes 0.3 s and stalls ranks at different steps.
    """
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
