"""The training loop: one optimizer step after another, with evaluation, checkpoints and exports between."""

import gc
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from functools import cached_property
from pathlib import Path
from typing import TextIO

import torch
import torch.distributed as dist
from torch import Tensor

from fla_train.data.cache import PreparedData
from fla_train.data.sampler import Batch, BatchSampler, PrefetchLoader
from fla_train.data.tokenizers import token_bytes
from fla_train.training import checkpoint, statistics
from fla_train.training.agreement import check_config_consistency, run_facts
from fla_train.training.bad_steps import BadStepFilter
from fla_train.training.build import build_model
from fla_train.training.checkpoint import TrainState
from fla_train.training.checkpoint_manager import CheckpointManager
from fla_train.training.config import TrainConfig
from fla_train.training.cuda_graph import CudaGraphPass
from fla_train.training.engine import Outcome, StepResult, build_engine, train_step
from fla_train.training.evaluator import PART_PERPLEXITY, validate_text
from fla_train.training.exports import Exporter
from fla_train.training.failures import TrainingStopped
from fla_train.training.metrics import last_losses
from fla_train.training.plan import training_flops
from fla_train.training.plots import plot_losses
from fla_train.training.preemption import StopRequest
from fla_train.training.profiling import profiled
from fla_train.training.report import Reporter, summary_lines
from fla_train.training.run_folder import RunFolder, RunLock
from fla_train.training.schedule import learning_rate
from fla_train.training.suites import SuiteRuns
from fla_train.training.text_data import open_text, to_batch
from fla_train.training.throughput import Meter, peak_flops
from fla_train.training.watchdog import Watchdog
from fla_train.utils.records import Record, read_metrics

READ_EVERY = 10  # steps within which outcomes are read, however seldom they are logged


class Trainer:
    """One rank of a run. Files and console belong to rank 0; everything else is done by all ranks.

    Args:
        resume: checkpoint to go on from.
        stream: where rank 0 shows progress.
        watchdog: hears of progress.
        request: once made on any rank, all save a checkpoint and leave.
        lock: of the run's folder, on rank 0.
    """

    def __init__(
        self,
        config: TrainConfig,
        data: PreparedData,
        resume: Path | None,
        stream: TextIO,
        watchdog: Watchdog,
        request: StopRequest,
        lock: RunLock | None = None,
    ):
        self.lock = lock
        self.config, self.data = config, data
        self.watchdog, self.request = watchdog, request
        self.folder = RunFolder(Path(config.run.dir))
        self.engine = build_engine(build_model(config, data, resumed=resume is not None), config)
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        check_config_consistency(run_facts(config, data, resume, self.folder))
        self.state = checkpoint.load(self.engine, resume) if resume else TrainState()
        self.state.data, self.state.commits = data.folder.name, data.commits()
        own = resume is not None and resume.resolve().parent == self.folder.checkpoints.resolve()
        if not own:  # a branch of another run, whose W&B run stays its own
            self.state.wandb_id = None
        trainer = config.trainer
        self.batches = BatchSampler(
            global_batch=trainer.global_batch_tokens // trainer.seq_len,
            micro_batch=trainer.micro_batch_size,
            rank=self.rank,
            world=self.world,
        )
        self.train_data, self.validation_data = self._open_data()
        self.reporter = Reporter(config, self.folder, self.state, stream, self.rank)
        self.guard = BadStepFilter(
            self.engine.device,
            max_grad_norm=config.optimizer.max_grad_norm,
            spike_deviations=trainer.spike_deviations,
            statistics=self.state.loss_statistics,
        )
        self.graphed = self._make_graph()
        self.meter = self._make_meter()
        self.checkpoints = CheckpointManager(
            self.engine,
            self.folder.checkpoints,
            keep=trainer.keep_checkpoints,
            keep_every=trainer.keep_every,
            say=self.reporter.say,
            saved_step=self.state.step if own else -1,
        )
        self.exporter = Exporter(config, data, self.folder, self.engine, self.reporter)
        self.suites = self._make_suites()
        self.rows: list[tuple[int, float, Outcome]] = []  # step, learning rate, and what is to be read
        self.observed: dict[str, Tensor] = {}  # statistics of the newest step
        self.leaving = False  # a rank has been asked to stop
        self.reached = False  # what the run was for, before its last step; all ranks decide alike

    def run(self) -> bool:
        """Train to `trainer.max_steps`, or until `reached`.

        Leaves a checkpoint, an export and a plot of the last step.

        Returns:
            False when a request ended it earlier, with a checkpoint.
        """
        trainer, state = self.config.trainer, self.state
        if self.suites is not None:
            self._make_up(self.suites)
        sequences = PrefetchLoader(self.train_data, self.batches, state.step, trainer.max_steps)
        with sequences as micro_batches, _left_out_of_collections():
            while not self._finished():
                self.meter.start()
                self._step(micro_batches)
                results = self._read(self._needed())
                if any(result.stop for *_, result in results):
                    results += self._read(len(self.rows))
                self.meter.stop(trainer.global_batch_tokens)
                self._account(results)
                self.checkpoints.poll()
                if results and self.suites is not None:
                    self.suites.collect(state.step, state.tokens)
                if self._due(trainer.eval_every):
                    self.watchdog.beat(f"evaluating after step {state.step}")
                    self._evaluate()
                # The checkpoint last: whatever a kill leaves undone before it, the resumed run does again.
                suite_due = trainer.suite_every > 0 and self._due(trainer.suite_every)
                if self._due(trainer.export_every) or suite_due:
                    self.watchdog.beat(f"exporting step {state.step}")
                    export = self.exporter.export(state)
                    if suite_due and self.suites is not None and export is not None:
                        self.suites.start(export, state.step)
                if self._due(trainer.checkpoint_every) or self.leaving:
                    self._save()
                if self.leaving and not self._finished():
                    self._leave()
                    return False
        self._finish()
        return True

    def _make_up(self, suites: SuiteRuns) -> None:
        """Start the newest suite again if its results are lost.

        They are logged under a later step, which a kill may forestall, and whose record a resume drops.
        """
        every, step = self.config.trainer.suite_every, self.state.step
        due = step if self._finished() else step // every * every
        export = self.folder.export(due)
        logged = (record.get("evaluated_step") for record in read_metrics(self.folder.metrics))
        if export.is_dir() and due not in logged:
            suites.start(export, due)

    def _step(self, micro_batches: PrefetchLoader) -> None:
        """Launch the next optimizer step; its outcome stays on the device."""
        trainer, step = self.config.trainer, self.state.step + 1
        self.watchdog.beat(f"waiting for the data of step {step}", "data")
        with self.meter.waiting():
            batch = [self._to_device(next(micro_batches)) for _ in range(self.batches.accumulation)]
        rate = learning_rate(
            step, peak=self.config.optimizer.lr, max_steps=trainer.max_steps, schedule=self.config.schedule
        )
        self.observed = {}
        observe = trainer.stats_every > 0 and step % trainer.stats_every == 0
        shapes = tuple(inputs.shape for inputs, *_ in batch)
        kind = ("step", shapes, observe, step in trainer.profile_steps)  # each may compile kernels of its own
        self.watchdog.beat(f"in step {step}", kind)
        with ExitStack() as stack:
            if observe:
                stack.enter_context(statistics.observed(self.engine, self.observed))
            if step in trainer.profile_steps:
                stack.enter_context(profiled(self.folder.root / "profile", step, self.rank))
            graphed = None if observe else self.graphed  # whose recording has no hooks
            outcome = train_step(
                self.engine, batch, rate, self.guard, stop=self.request.heard(), graphed=graphed
            )
        self.rows.append((step, rate, outcome))
        self.state.step = step
        self.state.sequences += self.batches.global_batch
        self.state.tokens += trainer.global_batch_tokens

    def _needed(self) -> int:
        """How many of `rows`, from the oldest on, something needs now.

        Reading waits for the device, and nothing else does. What is only logged is therefore read a step
        late, when the next step's work is in the device's queue; and no later than READ_EVERY steps on, since
        a request to stop comes with an outcome, and a batch system grants minutes.
        """
        trainer = self.config.trainer
        readers = (trainer.eval_every, trainer.export_every, trainer.checkpoint_every, trainer.suite_every)
        if self.observed or any(self._due(every) for every in readers):
            return len(self.rows)
        before = len(self.rows) - 1
        step = self.rows[before - 1][0]
        return before if before and 0 in (step % trainer.log_every, step % READ_EVERY) else 0

    def _read(self, count: int) -> list[tuple[int, float, StepResult]]:
        """Step, learning rate and outcome of the `count` oldest rows, which are dropped."""
        rows, self.rows = self.rows[:count], self.rows[count:]
        return [(step, rate, outcome.read()) for step, rate, outcome in rows]

    def _account(self, results: list[tuple[int, float, StepResult]]) -> None:
        """Count and log steps that have ended; all ranks decide alike.

        Raises:
            TrainingStopped: too many in a row were skipped.
        """
        state, trainer = self.state, self.config.trainer
        speed: Record = {}
        for step, rate, result in results:
            state.skipped_steps += result.skipped
            state.skipped_in_row = state.skipped_in_row + 1 if result.skipped else 0
            self.leaving |= result.stop
            last = step == state.step and (self._finished() or self.observed)
            if result.skipped or last or step % trainer.log_every == 0:
                speed = speed or self.meter.read()
                more = speed | {"skipped_steps": state.skipped_steps}
                if last:
                    more |= statistics.read(self.observed)
                self.reporter.step(step, rate, result, more)
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

    def _open_data(self) -> tuple:
        """What to train on, and what to validate on, empty or None for nothing."""
        return open_text(self.data, self.config)

    def _to_device(self, read: Tensor | Batch) -> Batch:
        return to_batch(read, self.engine.device)

    @cached_property
    def _token_sizes(self) -> Tensor | None:
        """Bytes of each token id, [ids] int64, if they are known."""
        sizes = token_bytes(self.data.tokenizer())
        return None if sizes is None else torch.from_numpy(sizes).to(self.engine.device)

    def _evaluate(self) -> None:
        """Log the validation of this step."""
        if not self.validation_data:
            return
        state = self.state

        def prepare(read: Iterable[Tensor | Batch]) -> Iterator[Batch]:
            for batch in map(self._to_device, read):
                kind = ("evaluation", batch.input_ids.shape)
                self.watchdog.beat(f"evaluating after step {state.step}", kind)
                yield batch

        found = validate_text(
            self.engine, self.validation_data, self.config.trainer, prepare, self._token_sizes
        )
        self.reporter.log({"step": state.step, "tokens": state.tokens, **found})
        loss, perplexity = found["validation_loss"], found["validation_perplexity"]
        parts = [
            f"{key.removeprefix(PART_PERPLEXITY)} {value:.2f}"
            for key, value in found.items()
            if key.startswith(PART_PERPLEXITY)
        ]
        of_parts = f" ({', '.join(parts)})" if parts else ""
        bits = found.get("validation_bits_per_byte")
        of_bits = "" if bits is None else f", {bits:.4f} bits per byte"
        self.reporter.say(
            f"step {state.step:,}: validation loss {loss:.4f}, perplexity {perplexity:.2f}{of_parts}{of_bits}"
        )

    def _save(self) -> None:
        self.watchdog.beat(f"copying a checkpoint of step {self.state.step}")
        if self.lock is not None:
            self.lock.check()
        self.state.loss_statistics = self.guard.statistics()
        stall = self.checkpoints.save(self.state)
        self.reporter.log(
            {"step": self.state.step, "tokens": self.state.tokens, "checkpoint_stall_s": round(stall, 4)}
        )

    def _leave(self) -> None:
        """Close what is open, after a request to stop, once the checkpoint is on disk."""
        self.checkpoints.ensure_saved(self.state.step)
        self.checkpoints.close()
        self.reporter.say(f"step {self.state.step:,}: asked to stop; the same command goes on from here")
        if self.suites is not None:
            self.suites.stop()
        self.reporter.close()

    def _finish(self) -> None:
        """The last step's files, where a resumed or killed run still lacks them, and the summary."""
        state = self.state
        if not self.checkpoints.is_saved(state.step):
            self._save()
        self.checkpoints.ensure_saved(state.step)
        self.checkpoints.close()
        self.watchdog.beat(f"exporting step {state.step}")
        export = self.exporter.export(state, last=True)
        if self.suites is not None:
            self.suites.finish(state.step, state.tokens, self.watchdog.beat)
        self.reporter.close()
        if self.rank == 0:
            if last_losses(self.folder.metrics)[0] is not None:
                plot_losses([self.folder.root], self.folder.loss_plot)
            for line in self._summary(export):
                self.reporter.say(line)

    def _summary(self, export: Path) -> list[str]:
        return summary_lines(self.data, self.folder, self.state, export)

    def _make_suites(self) -> SuiteRuns | None:
        trainer, reporter = self.config.trainer, self.reporter
        if self.rank != 0 or not trainer.suite_every:
            return None
        folder = self.folder.root / "eval"
        return SuiteRuns(trainer.suite, trainer.suite_options, folder, log=reporter.log, say=reporter.say)

    def _make_graph(self) -> CudaGraphPass | None:
        config = self.config
        if not config.trainer.cuda_graph or self.engine.device.type != "cuda" or config.baseline is not None:
            return None
        return CudaGraphPass(self.engine.module, bf16=config.trainer.precision == "bf16")

    def _make_meter(self) -> Meter:
        launch, device = self.config.launch, self.engine.device
        name = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
        peak = peak_flops(name, self.config.trainer.precision, launch.peak_tflops)
        return Meter(training_flops(self.config), None if peak is None else peak * self.world, device)


@contextmanager
def _left_out_of_collections() -> Iterator[None]:
    """Inside, Python's garbage collector leaves the objects that exist already alone.

    They are half a million by now. Going over them takes 0.3 s, and each rank would at another step.
    """
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
