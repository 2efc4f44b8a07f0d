"""What a run tells about itself: where its records go, the card of its export, the summary at its end."""

import math
from dataclasses import asdict
from pathlib import Path

from fla_train.data import PreparedData
from fla_train.hub import CardInfo
from fla_train.hub.environment import git_commit
from fla_train.training.checkpoint import TrainState, folder_name
from fla_train.training.metrics import MetricsFile, Sink, Tensorboard, Wandb, last_losses
from fla_train.training.runfolder import RunFolder
from fla_train.training.schema import TrainConfig, to_yaml


def open_sinks(config: TrainConfig, folder: RunFolder, state: TrainState) -> list[Sink]:
    """metrics.jsonl and the views that the config asks for, continued after `state.step`.

    A W&B run keeps its id in `state`, and so over resumes.
    """
    sinks: list[Sink] = [MetricsFile(folder.metrics, state.step)]
    if config.logger.wandb.mode != "disabled":
        run = Wandb(config.logger, folder.root, asdict(config), state.wandb_id)
        state.wandb_id = run.id
        sinks.append(run)
    if config.logger.tensorboard:
        sinks.append(Tensorboard(folder.root / "tensorboard", state.step))
    return sinks


def model_card(config: TrainConfig, data: PreparedData, folder: RunFolder, state: TrainState) -> CardInfo:
    """What the card of an export says."""
    train, validation = last_losses(folder.metrics)
    losses = {"train": train, "validation": validation}
    return CardInfo(
        name=folder.root.name,
        data=data.manifest["source"]["kind"],
        tokenizer=data.manifest["tokenizer"]["name"],
        step=state.step,
        tokens=state.tokens,
        seq_len=config.trainer.seq_len,
        losses={name: loss for name, loss in losses.items() if loss is not None},
        config=to_yaml(config),
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
        lines.append(f"  validation loss   {validation:.4f}, perplexity {perplexity(validation):.2f}")
    if entropy is not None:
        lines.append(f"  unigram entropy   {entropy:.4f} (what token frequencies alone reach)")
    return [
        *lines,
        f"  metrics           {folder.metrics}",
        f"  loss curve        {folder.loss_plot}",
        f"  checkpoint        {folder.checkpoints / folder_name(state.step)}",
        f"  model             {export}",
        "Next:",
        f"  fla-generate checkpoint={export} prompt='def main('",
        f"  fla-eval checkpoint={export}",
        f"  train on: the same fla-train command with run.dir={folder.root} and a larger trainer.max_steps",
    ]


def finite(value: float) -> float | None:
    """JSON has no NaN."""
    return value if math.isfinite(value) else None


def perplexity(loss: float) -> float:
    return math.exp(loss) if loss < 700 else math.inf
