"""The training loop: one optimizer step after another, with evaluation, checkpoints and exports between."""

from contextlib import ExitStack
from pathlib import Path
from typing import TextIO

import torch
import torch.distributed as dist
from torch import Tensor, nn

from fla_train.data import (
    Batch,
    BatchPlan,
    DocumentSequences,
    MicroBatches,
    PreparedData,
    Sequences,
    open_train,
    open_validation,
    sequential_batches,
)
from fla_train.hub import export_model
from fla_train.training import checkpoint, statistics
from fla_train.training.agreement import check_agreement, run_facts
from fla_train.training.build import build_model
from fla_train.training.checkpoint import TrainState
from fla_train.training.console import Console
from fla_train.training.engine import StepResult, build_engine, train_step
from fla_train.training.evaluation import evaluate, weighted
from fla_train.training.guard import StepGuard
from fla_train.training.metrics import Record, last_losses
from fla_train.training.plan import training_flops
from fla_train.training.plots import plot_losses
from fla_train.training.preemption import StopRequest
from fla_train.training.profiling import profiled
from fla_train.training.report import finite, model_card, open_sinks, perplexity, summary_lines
from fla_train.training.runfolder import RunFolder
from fla_train.training.schedule import learning_rate
from fla_train.training.schema import TrainConfig
from fla_train.training.suites import SuiteRuns
from fla_train.training.throughput import Meter, peak_flops
from fla_train.training.watchdog import Watchdog
from fla_train.training.writer import CheckpointWriter, Written


class TrainingStopped(RuntimeError):
    """Training can't go on; the message is one line for the user."""


class Trainer:
    """One rank of a run. Files and console belong to rank 0; everything else is done by all ranks.

    Args:
        resume: checkpoint to go on from.
        stream: where rank 0 shows progress.
        watchdog: hears of progress.
        request: once made on any rank, all save a checkpoint and leave.
    """

    def __init__(
        self,
        config: TrainConfig,
        data: PreparedData,
        resume: Path | None,
        stream: TextIO,
        watchdog: Watchdog,
        request: StopRequest,
    ):
        self.config, self.data = config, data
        self.watchdog, self.request = watchdog, request
        self.folder = RunFolder(Path(config.run.dir))
        self.engine = build_engine(build_model(config, data), config)
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        check_agreement(run_facts(config, data, resume, self.folder))
        self.state = checkpoint.load(self.engine, resume) if resume else TrainState()
        own = resume is not None and resume.resolve().parent == self.folder.checkpoints.resolve()
        self.saved_step = self.state.step if own else -1
        if not own:  # a branch of another run, whose W&B run stays its own
            self.state.wandb_id = None
        trainer = config.trainer
        self.batches = BatchPlan(
            global_batch=trainer.global_batch_tokens // trainer.seq_len,
            micro_batch=trainer.micro_batch_size,
            rank=self.rank,
            world=self.world,
        )
        self.train_data, self.validation_data = self._open_data()
        self.console = (
            Console(stream, total=trainer.max_steps, done=self.state.step) if self.rank == 0 else None
        )
        self.sinks = open_sinks(config, self.folder, self.state) if self.rank == 0 else []
        self.guard = StepGuard(
            self.engine.device,
            max_grad_norm=config.optimizer.max_grad_norm,
            spike_deviations=trainer.spike_deviations,
            statistics=self.state.loss_statistics,
        )
        self.meter = self._make_meter()
        self.writer = CheckpointWriter(
            self.folder.checkpoints,
            keep=trainer.keep_checkpoints,
            keep_every=trainer.keep_every,
            tell=self._tell_written,
        )
        self.suites = self._make_suites()
        self.rows: list[tuple[int, float, Tensor]] = []  # steps whose outcome is still on the device
        self.observed: dict[str, Tensor] = {}  # statistics of the newest step
        self.leaving = False  # a rank has been asked to stop

    def run(self) -> bool:
        """Train to `trainer.max_steps`; leaves a checkpoint, an export and a plot of the last step.

        Returns:
            False when a request ended it earlier, with a checkpoint.
        """
        trainer, state = self.config.trainer, self.state
        with MicroBatches(self.train_data, self.batches, state.step, trainer.max_steps) as micro_batches:
            while state.step < trainer.max_steps:
                self.meter.start()
                self._step(micro_batches)
                results = self._results()
                self.meter.stop(trainer.global_batch_tokens)
                self._account(results)
                if results and self.suites is not None:
                    self.suites.collect(state.step, state.tokens)
                if self._due(trainer.eval_every):
                    self.watchdog.beat(f"evaluating after step {state.step}")
                    self._evaluate()
                # The checkpoint last: whatever a kill leaves undone before it, the resumed run does again.
                suite_due = trainer.suite_every > 0 and self._due(trainer.suite_every)
                if self._due(trainer.export_every) or suite_due:
                    self._export()
                if suite_due and self.suites is not None:
                    self.suites.start(self.folder.export(state.step), state.step)
                if self._due(trainer.checkpoint_every) or self.leaving:
                    self._save()
                if self.leaving and state.step < trainer.max_steps:
                    self._leave()
                    return False
        self._finish()
        return True

    def _step(self, micro_batches: MicroBatches) -> None:
        """Launch the next optimizer step; its outcome stays on the device."""
        trainer, step = self.config.trainer, self.state.step + 1
        self.watchdog.beat(f"waiting for the data of step {step}")
        with self.meter.waiting():
            batch = [self._to_device(next(micro_batches)) for _ in range(self.batches.accumulation)]
        self.watchdog.beat(f"in step {step}")
        rate = learning_rate(
            step, peak=self.config.optimizer.lr, max_steps=trainer.max_steps, schedule=self.config.schedule
        )
        self.observed = {}
        with ExitStack() as stack:
            if trainer.stats_every and step % trainer.stats_every == 0:
                stack.enter_context(statistics.observed(self.engine, self.observed))
            if step in trainer.profile_steps:
                stack.enter_context(profiled(self.folder.root / "profile", step, self.rank))
            row = train_step(self.engine, batch, rate, self.guard, stop=self.request.made)
        self.rows.append((step, rate, row))
        self.state.step = step
        self.state.sequences += self.batches.global_batch
        self.state.tokens += trainer.global_batch_tokens

    def _results(self) -> list[tuple[int, float, StepResult]]:
        """Step, learning rate and outcome of the steps since the last call, when something needs them now.

        Waits for the device; in between nothing does.
        """
        trainer = self.config.trainer
        readers = (
            *(trainer.log_every, trainer.eval_every, trainer.export_every, trainer.checkpoint_every),
            trainer.suite_every,
        )
        if not self.observed and not any(self._due(every) for every in readers):
            return []
        rows, self.rows = self.rows, []
        outcomes = StepResult.read([row for *_, row in rows])
        return [(step, rate, result) for (step, rate, _), result in zip(rows, outcomes, strict=True)]

    def _account(self, results: list[tuple[int, float, StepResult]]) -> None:
        """Count and log steps that have ended; all ranks decide alike.

        Raises:
            TrainingStopped: too many in a row were skipped.
        """
        state, trainer = self.state, self.config.trainer
        due = self.observed or self._due(trainer.log_every)
        speed: Record = {}
        for step, rate, result in results:
            state.skipped_steps += result.skipped
            state.skipped_in_row = state.skipped_in_row + 1 if result.skipped else 0
            self.leaving |= result.stop
            if result.skipped or (due and step == state.step):
                speed = speed or self.meter.read()
                self._log_step(step, rate, result, speed)
            if state.skipped_in_row >= trainer.max_skipped_steps:
                raise TrainingStopped(
                    f"the loss or its gradient was NaN, infinite or a spike in {state.skipped_in_row} "
                    f"steps in a row, up to step {step}: lower optimizer.lr, or raise schedule.warmup_steps"
                )

    def _due(self, every: int) -> bool:
        """Whether something done each `every` steps (0: never) and at the end is due after this step."""
        step = self.state.step
        return step == self.config.trainer.max_steps or (every > 0 and step % every == 0)

    def _open_data(self) -> tuple[Sequences | DocumentSequences, dict]:
        """The sequences to train on; the parts to validate on, {name: (sequences, weight)}, perhaps none."""
        folder, seq_len = self.data.folder, self.config.trainer.seq_len
        train, validation = open_train(folder, seq_len, self.config.seed), open_validation(folder, seq_len)
        if not self.config.data.document_boundaries:
            return train, validation
        parts = {name: (DocumentSequences(part), weight) for name, (part, weight) in validation.items()}
        return DocumentSequences(train), parts

    def _to_device(self, read: Tensor | Batch) -> Batch:
        if isinstance(read, Batch):
            return read.to(self.engine.device)
        ids = read.to(self.engine.device)  # [B, T]
        return Batch(ids, ids)

    def _evaluate(self) -> None:
        if not self.validation_data:
            return
        trainer, parts = self.config.trainer, {}
        limit = max(1, trainer.eval_tokens // len(self.validation_data) // trainer.seq_len)
        for name, (part, weight) in self.validation_data.items():
            batches = sequential_batches(
                part, trainer.micro_batch_size, limit=limit, rank=self.rank, world=self.world
            )
            watched = self.watchdog.over(batches, f"evaluating after step {self.state.step}")
            on_device = (self._to_device(read) for read in watched)
            result = evaluate(self.engine, on_device, seq_len=trainer.seq_len, buckets=trainer.eval_buckets)
            parts[name] = result, weight
        whole = weighted(list(parts.values()))
        loss = whole.loss
        record: Record = {
            "step": self.state.step,
            "tokens": self.state.tokens,
            "validation_loss": finite(loss),
            "validation_perplexity": finite(perplexity(loss)),
        }
        if len(self.data.parts()) > 1:  # a mixture
            record |= {f"validation_loss/{name}": finite(part.loss) for name, (part, _) in parts.items()}
        if trainer.eval_buckets > 1:
            record |= {f"validation_loss_at/{k}": finite(v) for k, v in whole.by_context.items()}
        self._log(record)
        self._say(f"step {self.state.step:,}: validation loss {loss:.4f}, perplexity {perplexity(loss):.2f}")

    def _save(self) -> None:
        """Start to write a checkpoint of this step; training goes on once its content has been copied."""
        self.watchdog.beat(f"copying a checkpoint of step {self.state.step}")
        self.state.loss_statistics = self.guard.statistics()
        stall = self.writer.save(self.engine, self.state)
        self._log(
            {"step": self.state.step, "tokens": self.state.tokens, "checkpoint_stall_s": round(stall, 4)}
        )

    def _tell_written(self, written: Written) -> None:
        step = int(written.path.name.removeprefix("step-"))
        if written.fault is None:
            self._say(f"step {step:,}: checkpoint {written.path}, written in {written.seconds:.1f} s")
        else:
            self._say(f"step {step:,}: NO CHECKPOINT, {written.fault}; the earlier ones are untouched")

    def _written(self) -> bool:
        """Whether a checkpoint of this very step is on disk; waits for the one under way."""
        written = self.writer.wait()
        if written is not None and written.path.name == checkpoint.folder_name(self.state.step):
            return written.fault is None
        return self.saved_step == self.state.step

    def _leave(self) -> None:
        """Close what is open, after a request to stop.

        Raises:
            TrainingStopped: the checkpoint could not be written.
        """
        if not self._written():
            raise TrainingStopped(self._unwritten())
        self._say(f"step {self.state.step:,}: asked to stop; the same command goes on from here")
        if self.suites is not None:
            self.suites.stop()
        for sink in self.sinks:
            sink.close()
        if self.console is not None:
            self.console.close()

    def _unwritten(self) -> str:
        return (
            f"the checkpoint of step {self.state.step} could not be written ({self.writer.wait().fault}): "
            "free space and give the same command again; it goes on from the last intact checkpoint"
        )

    def _export(self) -> None:
        self.watchdog.beat(f"exporting step {self.state.step}")
        if self.rank == 0:
            self._write_export()
        dist.barrier()

    def _write_export(self) -> None:
        card = model_card(self.config, self.data, self.folder, self.state)
        module: nn.Module = self.engine.module
        path = export_model(module, self.data.tokenizer(), self.folder.export(self.state.step), card)
        self._say(f"step {self.state.step:,}: exported {path}")

    def _log_step(self, step: int, rate: float, result: StepResult, speed: Record) -> None:
        record: Record = {
            "step": step,
            "tokens": step * self.config.trainer.global_batch_tokens,
            "loss": finite(result.loss),
            "lr": rate,
            "grad_norm": finite(result.grad_norm),
            **speed,
            "skipped_steps": self.state.skipped_steps,
        }
        if step == self.state.step:
            record |= {key: finite(value) for key, value in statistics.read(self.observed).items()}
        self._log(record)
        if result.skipped:
            self._say(f"step {step:,}: skipped, loss {result.loss:.4g}, gradient norm {result.grad_norm:.4g}")
        elif self.console is not None:
            self.console.progress(record)

    def _finish(self) -> None:
        """The last step's files, where a resumed or killed run still lacks them, and the summary."""
        if not self._written():
            self._save()
        if not self._written():
            raise TrainingStopped(self._unwritten())
        self.watchdog.beat(f"exporting step {self.state.step}")
        export = self.folder.export(self.state.step)
        if self.rank == 0 and not export.is_dir():  # other machines may see a shared folder late
            self._write_export()
        dist.barrier()
        if self.suites is not None:
            self.suites.finish(self.state.step, self.state.tokens, self.watchdog.beat)
        if self.rank == 0:
            for sink in self.sinks:
                sink.close()
            if last_losses(self.folder.metrics)[0] is not None:
                plot_losses([self.folder.root], self.folder.loss_plot)
            self.console.close()
            for line in self._summary(export):
                self.console.line(line)

    def _summary(self, export: Path) -> list[str]:
        return summary_lines(self.data, self.folder, self.state, export)

    def _make_suites(self) -> SuiteRuns | None:
        trainer = self.config.trainer
        if self.rank != 0 or not trainer.suite_every:
            return None
        folder = self.folder.root / "eval"
        return SuiteRuns(trainer.suite, trainer.suite_options, folder, log=self._log, say=self._say)

    def _make_meter(self) -> Meter:
        launch, device = self.config.launch, self.engine.device
        name = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
        peak = peak_flops(name, self.config.trainer.precision, launch.peak_tflops)
        return Meter(training_flops(self.config), None if peak is None else peak * self.world, device)

    def _log(self, record: Record) -> None:
        for sink in self.sinks:
            sink.log(record)

    def _say(self, text: str) -> None:
        if self.console is not None:
            self.console.line(text)
