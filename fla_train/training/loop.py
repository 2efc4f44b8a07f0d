"""The training loop: one optimizer step after another, with evaluation, checkpoints and exports between."""

import math
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TextIO

import torch
import torch.distributed as dist
from torch import Tensor, nn

from fla_train.data import BatchPlan, MicroBatches, PreparedData, TokenDataset, sequential_batches
from fla_train.hub import CardInfo, export_model
from fla_train.hub.environment import git_commit
from fla_train.models import DeltaProductForCausalLM, build_config
from fla_train.training import checkpoint
from fla_train.training.agreement import check_agreement, run_facts
from fla_train.training.checkpoint import TrainState
from fla_train.training.console import Console
from fla_train.training.engine import StepResult, build_engine, mean_loss, train_step
from fla_train.training.metrics import MetricsFile, Record, Sink, Tensorboard, Wandb, last_losses
from fla_train.training.plots import plot_losses
from fla_train.training.runfolder import RunFolder
from fla_train.training.schedule import learning_rate
from fla_train.training.schema import TrainConfig, to_yaml


class TrainingStopped(RuntimeError):
    """Training can't go on; the message is one line for the user."""


def build_model(config: TrainConfig, data: PreparedData) -> DeltaProductForCausalLM:
    """The model with the tokenizer's special ids; its fresh fp32 weights depend on `seed` only."""
    settings = build_config(config.model)
    for key in ("bos_token_id", "eos_token_id", "pad_token_id"):
        if getattr(settings, key) is None:
            setattr(settings, key, data.manifest["tokenizer"][key])
    torch.manual_seed(config.seed)
    model = DeltaProductForCausalLM(settings).float()
    if config.trainer.activation_checkpointing:
        model.gradient_checkpointing_enable()
    return model


@dataclass
class Clock:
    """Seconds and tokens of training since the last reading; evaluation and checkpoints don't count."""

    seconds: float = 0.0
    tokens: int = 0

    def read(self) -> float:
        """Tokens per second since the last call."""
        rate = self.tokens / self.seconds if self.seconds else 0.0
        self.seconds, self.tokens = 0.0, 0
        return rate


class Trainer:
    """One rank of a run. Files and console belong to rank 0; everything else is done by all ranks."""

    def __init__(self, config: TrainConfig, data: PreparedData, resume: Path | None, stream: TextIO):
        self.config, self.data = config, data
        self.folder = RunFolder(Path(config.run.dir))
        self.engine = build_engine(build_model(config, data), config)
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        check_agreement(run_facts(config, data, resume, self.folder))
        self.state = checkpoint.load(self.engine, resume) if resume else TrainState()
        self.saved_step = self.state.step if resume else -1
        trainer = config.trainer
        self.batches = BatchPlan(
            global_batch=trainer.global_batch_tokens // trainer.seq_len,
            micro_batch=trainer.micro_batch_size,
            rank=self.rank,
            world=self.world,
        )
        self.train_data = TokenDataset(data.folder, "train", trainer.seq_len, seed=config.seed)
        self.validation_data = None
        if data.manifest["splits"]["validation"]["tokens"] >= trainer.seq_len:
            self.validation_data = TokenDataset(data.folder, "validation", trainer.seq_len)
        self.console = (
            Console(stream, total=trainer.max_steps, done=self.state.step) if self.rank == 0 else None
        )
        self.sinks = self._open_sinks() if self.rank == 0 else []

    def run(self) -> None:
        """Train to `trainer.max_steps`; leaves a checkpoint, an export and a plot of the last step."""
        trainer, state = self.config.trainer, self.state
        clock = Clock()
        with MicroBatches(self.train_data, self.batches, state.step, trainer.max_steps) as micro_batches:
            while state.step < trainer.max_steps:
                begin = time.perf_counter()
                batch = [self._to_device(next(micro_batches)) for _ in range(self.batches.accumulation)]
                rate = learning_rate(
                    state.step + 1,
                    peak=self.config.optimizer.lr,
                    max_steps=trainer.max_steps,
                    schedule=self.config.schedule,
                )
                result = train_step(self.engine, batch, rate)
                self._advance(result)
                clock.seconds += time.perf_counter() - begin
                clock.tokens += trainer.global_batch_tokens
                if result.skipped or _due(state.step, trainer.log_every, trainer.max_steps):
                    self._log_step(result, rate, clock.read())
                self._stop_if_diverged()
                if _due(state.step, trainer.eval_every, trainer.max_steps):
                    self._evaluate()
                # The checkpoint last: whatever a kill leaves undone before it, the resumed run does again.
                if _due(state.step, trainer.export_every, trainer.max_steps):
                    self._export()
                if _due(state.step, trainer.checkpoint_every, trainer.max_steps):
                    self._save()
        self._finish()

    def _advance(self, result: StepResult) -> None:
        state = self.state
        state.step += 1
        state.sequences += self.batches.global_batch
        state.tokens += self.config.trainer.global_batch_tokens
        if result.skipped:
            state.skipped_steps += 1
            state.skipped_in_row += 1
        else:
            state.skipped_in_row = 0

    def _stop_if_diverged(self) -> None:
        limit = self.config.trainer.max_skipped_steps
        if self.state.skipped_in_row >= limit:
            raise TrainingStopped(
                f"the loss or its gradient was NaN or infinite in {limit} steps in a row, up to step "
                f"{self.state.step}: lower optimizer.lr, or raise schedule.warmup_steps"
            )

    def _to_device(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        ids = ids.to(self.engine.device)  # [B, T]
        return ids, ids

    def _evaluate(self) -> None:
        if self.validation_data is None:
            return
        trainer = self.config.trainer
        limit = max(1, trainer.eval_tokens // trainer.seq_len)
        batches = sequential_batches(
            self.validation_data, trainer.micro_batch_size, limit=limit, rank=self.rank, world=self.world
        )
        loss = mean_loss(self.engine, (self._to_device(ids) for ids in batches))
        self._log(
            {
                "step": self.state.step,
                "tokens": self.state.tokens,
                "validation_loss": _finite(loss),
                "validation_perplexity": _finite(_perplexity(loss)),
            }
        )
        self._say(f"step {self.state.step:,}: validation loss {loss:.4f}, perplexity {_perplexity(loss):.2f}")

    def _save(self) -> None:
        keep = self.config.trainer.keep_checkpoints
        path = checkpoint.save(self.engine, self.state, self.folder.checkpoints, keep=keep)
        self.saved_step = self.state.step
        self._say(f"step {self.state.step:,}: checkpoint {path}")

    def _export(self) -> None:
        if self.rank == 0:
            train, validation = last_losses(self.folder.metrics)
            losses = {"train": train, "validation": validation}
            card = CardInfo(
                name=self.folder.root.name,
                data=self.data.manifest["source"]["kind"],
                tokenizer=self.data.manifest["tokenizer"]["name"],
                step=self.state.step,
                tokens=self.state.tokens,
                seq_len=self.config.trainer.seq_len,
                losses={name: loss for name, loss in losses.items() if loss is not None},
                config=to_yaml(self.config),
                commit=git_commit(),
            )
            module: nn.Module = self.engine.module
            path = export_model(module, self.data.tokenizer(), self.folder.export(self.state.step), card)
            self._say(f"step {self.state.step:,}: exported {path}")
        dist.barrier()

    def _log_step(self, result: StepResult, rate: float, tokens_per_second: float) -> None:
        record: Record = {
            "step": self.state.step,
            "tokens": self.state.tokens,
            "loss": _finite(result.loss),
            "lr": rate,
            "grad_norm": _finite(result.grad_norm),
            "tokens_per_second": round(tokens_per_second, 1),
            "skipped_steps": self.state.skipped_steps,
        }
        self._log(record)
        if result.skipped:
            self._say(f"step {self.state.step:,}: skipped, the loss or its gradient is not finite")
        elif self.console is not None:
            self.console.progress(record)

    def _finish(self) -> None:
        """The last step's files, where a resumed or killed run still lacks them, and the summary."""
        if self.saved_step != self.state.step:
            self._save()
        export = self.folder.export(self.state.step)
        missing = not export.is_dir()
        dist.barrier()  # all ranks have looked before rank 0 writes it
        if missing:
            self._export()
        if self.rank == 0:
            for sink in self.sinks:
                sink.close()
            if last_losses(self.folder.metrics)[0] is not None:
                plot_losses([self.folder.root], self.folder.loss_plot)
            self.console.close()
            for line in self._summary(export):
                self.console.line(line)

    def _summary(self, export: Path) -> list[str]:
        entropy = self.data.manifest["splits"]["validation"]["unigram_entropy"]
        lines = ["", f"Trained {self.state.step:,} steps, {self.state.tokens:,} tokens."]
        if self.state.skipped_steps:
            lines.append(f"  skipped steps     {self.state.skipped_steps}")
        train, validation = last_losses(self.folder.metrics)
        if train is not None:
            lines.append(f"  training loss     {train:.4f}")
        if validation is not None:
            lines.append(f"  validation loss   {validation:.4f}, perplexity {_perplexity(validation):.2f}")
        if entropy is not None:
            lines.append(f"  unigram entropy   {entropy:.4f} (what token frequencies alone reach)")
        root = self.folder.root
        return [
            *lines,
            f"  metrics           {self.folder.metrics}",
            f"  loss curve        {self.folder.loss_plot}",
            f"  checkpoint        {self.folder.checkpoints / checkpoint.folder_name(self.state.step)}",
            f"  model             {export}",
            "Next:",
            f"  fla-generate checkpoint={export} prompt='def main('",
            f"  fla-eval checkpoint={export}",
            f"  train on: the same fla-train command with run.dir={root} and a larger trainer.max_steps",
        ]

    def _open_sinks(self) -> list[Sink]:
        logger = self.config.logger
        sinks: list[Sink] = [MetricsFile(self.folder.metrics, self.state.step)]
        if logger.wandb.mode != "disabled":
            run = Wandb(logger, self.folder.root, asdict(self.config), self.state.wandb_id)
            self.state.wandb_id = run.id
            sinks.append(run)
        if logger.tensorboard:
            sinks.append(Tensorboard(self.folder.root / "tensorboard", self.state.step))
        return sinks

    def _log(self, record: Record) -> None:
        for sink in self.sinks:
            sink.log(record)

    def _say(self, text: str) -> None:
        if self.console is not None:
            self.console.line(text)


def _due(step: int, every: int, last: int) -> bool:
    """Whether something done each `every` steps (0: never) and at the end is due after `step`."""
    return step == last or (every > 0 and step % every == 0)


def _finite(value: float) -> float | None:
    """JSON has no NaN."""
    return value if math.isfinite(value) else None


def _perplexity(loss: float) -> float:
    return math.exp(loss) if loss < 700 else math.inf
