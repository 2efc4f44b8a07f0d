"""What a run tells about itself: where its records go, the card of its export, the summary at its end."""

from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import TextIO

from fla_train.data.cache import PreparedData
from fla_train.hub import CardInfo
from fla_train.hub.paths import public_name
from fla_train.training.checkpoint import TrainState, folder_name
from fla_train.training.config import TrainConfig
from fla_train.training.engine import StepResult
from fla_train.training.evaluator import perplexity
from fla_train.training.log import Console
from fla_train.training.metrics import (
    MetricsFile,
    Sink,
    Tensorboard,
    Wandb,
    checkpoint_seconds,
    finite,
    last_losses,
    last_value,
)
from fla_train.training.public import public_config
from fla_train.training.run_folder import RunFolder
from fla_train.utils.environment import git_commit
from fla_train.utils.filesystem import reason
from fla_train.utils.records import Record


class Reporter:
    """What a run tells while it trains. Rank 0 does; the others call the same methods and stay silent.

    Args:
        state: the records after its step are written anew.
        stream: the terminal, or what stands in for it.
    """

    def __init__(self, config: TrainConfig, folder: RunFolder, state: TrainState, stream: TextIO, rank: int):
        self._batch_tokens = config.trainer.global_batch_tokens
        self._console = (
            Console(stream, total=config.trainer.max_steps, done=state.step) if rank == 0 else None
        )
        self._sinks = open_sinks(config, folder, state, self.say) if rank == 0 else []
        self._refused: set[Sink] = set()  # sinks that could not write their last record

    def log(self, record: Record) -> None:
        """A record for metrics.jsonl and its views. A full disk is told of and does not end the run."""
        record = finite(record)
        for sink in self._sinks:
            try:
                sink.log(record)
                self._refused.discard(sink)
            except OSError as failure:
                if sink not in self._refused:
                    self.say(f"step {record['step']:,}: {sink.name} can't be written ({reason(failure)})")
                self._refused.add(sink)

    def say(self, text: str) -> None:
        """A line for a reader."""
        if self._console is not None:
            self._console.line(text)

    def step(self, step: int, rate: float, result: StepResult, more: Record) -> None:
        """An optimizer step that has ended, with the learning rate it had and `more` to log of it."""
        record: Record = {
            "step": step,
            "tokens": step * self._batch_tokens,
            "loss": result.loss,
            "lr": rate,
            "grad_norm": result.grad_norm,
            **more,
        }
        self.log(record)
        if result.skipped:
            self.say(f"step {step:,}: skipped, loss {result.loss:.4g}, gradient norm {result.grad_norm:.4g}")
        elif self._console is not None:
            self._console.progress(record)

    def close(self) -> None:
        """The last record has been logged; lines can still follow. What a sink has lost is told of."""
        for sink in self._sinks:
            try:
                sink.close()
            except OSError as failure:
                self.say(f"{sink.name} can't be closed ({reason(failure)})")
        if self._console is not None:
            self._console.close()


def open_sinks(
    config: TrainConfig, folder: RunFolder, state: TrainState, say: Callable[[str], None]
) -> list[Sink]:
    """metrics.jsonl and the views that the config asks for, continued after `state.step`.

    A W&B run keeps its id in `state`, and so over resumes. A view that can't be opened is left out until the
    next start, with a line.

    Raises:
        ValueError: a new run asks for a view whose package or login is missing.
        OSError: metrics.jsonl can't be written.
    """
    sinks: list[Sink] = [MetricsFile(folder.metrics, state.step)]

    def add(name: str, make: Callable[[], Sink]) -> None:
        try:
            sinks.append(make())
        except (OSError, ValueError) as failure:
            if isinstance(failure, ValueError) and not state.step:
                raise
            say(f"{name} is left out until the next start ({reason(failure)})")

    def wandb() -> Wandb:
        run = Wandb(config.logger, folder.root, asdict(config), state.wandb_id)
        state.wandb_id = run.id
        return run

    if config.logger.wandb.mode != "disabled":
        add(Wandb.name, wandb)
    if config.logger.tensorboard:
        add(Tensorboard.name, lambda: Tensorboard(folder.root / "tensorboard", state.step))
    return sinks


def model_card(config: TrainConfig, data: PreparedData, folder: RunFolder, state: TrainState) -> CardInfo:
    """What the card of an export says: nothing that tells of this machine, since exports are published."""
    train, validation = last_losses(folder.metrics)
    losses = {"train": train, "validation": validation}
    tokenizer = data.manifest["tokenizer"]["name"]
    return CardInfo(
        name=folder.name,
        data=data.manifest["source"]["kind"],
        tokenizer=tokenizer and public_name(tokenizer),  # models of tasks have none
        init_from=config.init_from and public_name(config.init_from),
        step=state.step,
        tokens=state.tokens,
        seq_len=config.trainer.seq_len,
        losses={name: loss for name, loss in losses.items() if loss is not None},
        config=public_config(config),
        commit=git_commit(),
    )


def summary_lines(data: PreparedData, folder: RunFolder, state: TrainState, export: Path) -> list[str]:
    """The end of a run, for a reader."""
    entropy = data.manifest["splits"]["validation"]["unigram_entropy"]
    lines = ["", f"Trained {state.step:,} steps, {state.tokens:,} tokens."]
    if state.skipped_steps:
        lines.append(f"  skipped steps     {state.skipped_steps}")
    train, validation = last_losses(folder.metrics)
    if train is not None:
        lines.append(f"  training loss     {train:.4f}")
    if validation is not None:
        bits = last_value(folder.metrics, "validation_bits_per_byte")
        of_bits = "" if bits is None else f", {bits:.4f} bits per byte"
        lines.append(
            f"  validation loss   {validation:.4f}, perplexity {perplexity(validation):.2f}{of_bits}"
        )
    if entropy is not None:
        lines.append(f"  unigram entropy   {entropy:.4f} (what token frequencies alone reach)")
    stood, trained = checkpoint_seconds(folder.metrics)
    if trained:
        lines.append(
            f"  time              {trained:.0f} s; {stood / trained:.2%} more stood still for checkpoints"
        )
    return [
        *lines,
        f"  metrics           {folder.metrics}",
        f"  loss curve        {folder.loss_plot}",
        f"  checkpoint        {folder.checkpoints / folder_name(state.step)}",
        f"  model             {export}",
        "Next:",
        f"  fla-generate checkpoint={export} prompt='def main('",
        f"  fla-eval checkpoint={export}",
        f"  fla-train run.dir={folder.root} trainer.max_steps={2 * state.step}",
    ]
