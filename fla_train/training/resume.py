"""Resume: which checkpoint all ranks start from, and whether config and ranks agree with it."""

import json
import math
import socket
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch.distributed as dist

from fla_train.data.cache import PreparedData, prepared_name
from fla_train.data.config import absolute
from fla_train.hub.checksums import find_export_damage
from fla_train.tasks import TaskConfig
from fla_train.training import checkpoint
from fla_train.training.config import AUTO, TrainConfig, load_config, with_model
from fla_train.training.run_folder import RunFolder
from fla_train.utils.keys import resume_rule
from fla_train.utils.overrides import flat, plain
from fla_train.utils.records import read_metrics

VISIBLE = 60.0  # seconds within which a shared file system must show what another machine has written
EVALUATIONS_TO_STOP = 2  # in a row at `task.stop_at`: one could be luck, where accuracy swings

Log = Callable[[str], None]


def agree_on_checkpoint(config: TrainConfig, folder: RunFolder, log: Log) -> Path | None:
    """The checkpoint that all ranks start from, by `trainer.resume`; None: the beginning. All ranks call it.

    Rank 0 verifies and chooses it, since shared file systems may show the others less for a while.

    Raises:
        ValueError: on rank 0 as `checkpoint.choose`; elsewhere if the checkpoint does not show.
    """
    chosen: list[str | None] = [None]
    if dist.get_rank() == 0:
        checkpoint.clean(folder.checkpoints)
        found = choose_checkpoint(config, folder, log)
        chosen = [None if found is None else str(found)]
    dist.broadcast_object_list(chosen)
    if chosen[0] is None:
        return None
    path = Path(chosen[0])
    deadline = time.monotonic() + VISIBLE
    while not path.is_dir():
        if time.monotonic() > deadline:
            raise ValueError(
                f"{socket.gethostname()} does not see {path}, from which rank 0 starts: is run.dir one "
                "folder that all machines share?"
            )
        time.sleep(1.0)
    return path


def choose_checkpoint(config: TrainConfig, folder: RunFolder, log: Log) -> Path | None:
    """The checkpoint to start from, by `trainer.resume`; None: the beginning.

    A run that was begun with the same path to a checkpoint resumes from its newest: it is the same command
    again, as a batch system gives it.

    Raises:
        ValueError: as `checkpoint.choose`.
    """
    return checkpoint.choose(_resume_setting(config, folder), folder.checkpoints, log, folder.id())


def _resume_setting(config: TrainConfig, folder: RunFolder) -> str:
    """`trainer.resume`, or auto for the same path again."""
    resume = config.trainer.resume
    earlier = folder.config
    if resume not in ("auto", "none") and checkpoint.checkpoints(folder.checkpoints) and earlier.is_file():
        if absolute(load_config(earlier).trainer.resume) == absolute(resume):
            return "auto"
    return resume


def _saved(config: TrainConfig) -> list[Path]:
    """Return the checkpoints that the run may resume from, oldest first; not verified.

    Raises:
        ValueError: trainer.resume names something else.
    """
    resume, own = config.trainer.resume, []
    if config.run.dir is not None:
        folder = RunFolder(Path(config.run.dir))
        resume, own = _resume_setting(config, folder), checkpoint.checkpoints(folder.checkpoints)
    if resume == "auto":
        return own
    if resume != "none" and not (Path(resume) / checkpoint.MANIFEST).is_file():
        raise ValueError(
            f"trainer.resume={resume} is not a checkpoint: give a folder checkpoints/step-N of a run; to "
            "begin with the weights of an exported model give init_from"
        )
    return [] if resume == "none" else [Path(resume)]


def recorded(config: TrainConfig) -> dict[str, Any]:
    """Return the keys and values of a config as its checkpoints record them, in JSON's types."""
    return json.loads(json.dumps(dict(flat(asdict(config)))))


def has_checkpoint(config: TrainConfig) -> bool:
    """Whether there is a checkpoint that the run may resume from."""
    return bool(_saved(config))


def newest_readable(config: TrainConfig) -> Path | None:
    """Return the run's newest checkpoint whose state can be read, not verified further, or None."""
    auto = config.trainer.resume == "auto" and config.run.dir is not None
    run = RunFolder(Path(config.run.dir)).id() if auto else None
    for folder in reversed(_saved(config)):
        try:
            state = checkpoint.read_state(folder)
        except (OSError, ValueError):  # a damaged one: those of a run are of the same text and settings
            continue
        if run in (None, state.run):
            return folder
    return None


def saved_commits(config: TrainConfig) -> dict[str, str]:
    """The Hub commits of the data that the run to resume was begun with, by part of a mixture."""
    found = newest_readable(config)
    return {} if found is None else checkpoint.read_state(found).commits


def with_saved_sizes(config: TrainConfig) -> TrainConfig:
    """`config` with batch, warm-up and vocabulary, where it leaves them open, of the run that it resumes.

    The batch would change with the number of processes, and the warm-up with trainer.max_steps.

    Raises:
        ValueError: that run's sequences have another length.
    """
    found = newest_readable(config)
    if found is None or not (saved := checkpoint.read_state(found).config):
        return config
    trainer, schedule, length = config.trainer, config.schedule, saved["trainer.seq_len"]
    if config.task is None and trainer.seq_len != length:  # before the batch, which follows it
        raise ValueError(
            f"{found} belongs to another run: trainer.seq_len={trainer.seq_len} (was {length}); for another "
            f"length begin with the weights: init_from={found.resolve().parent.parent}, with a new run.dir"
        )
    if trainer.global_batch_tokens == AUTO:
        trainer = replace(trainer, global_batch_tokens=saved["trainer.global_batch_tokens"])
    if schedule.warmup_steps is None:
        schedule = replace(schedule, warmup_steps=saved["schedule.warmup_steps"])
    config = replace(config, trainer=trainer, schedule=schedule)
    return with_model(config, vocab_size=config.model["vocab_size"] or saved["model.vocab_size"])


def check_before_preparing(config: TrainConfig) -> None:
    """Refuse what `check_same_run` would refuse, before hours of tokenizing, as far as settings show it.

    Raises:
        ValueError: as `check_same_run`.
    """
    if newest := newest_readable(config):
        check_same_run(config, None, newest)


def check_steps_left(config: TrainConfig, folder: RunFolder) -> None:
    """Refuse a checkpoint beyond the last step: no step would be left to evaluate and to lower the rate in.

    Raises:
        ValueError: naming `trainer.max_steps` that would do.
    """
    newest = newest_readable(config)
    if newest is None or checkpoint.read_state(newest).step <= config.trainer.max_steps:
        return
    start = choose_checkpoint(config, folder, lambda line: None)
    if start is not None and (step := checkpoint.read_state(start).step) > config.trainer.max_steps:
        raise ValueError(
            f"trainer.max_steps={config.trainer.max_steps} is below the {step} steps of {start}: give "
            f"{step} or more, or another run.dir"
        )


def is_complete(folder: RunFolder, config: TrainConfig) -> bool:
    """Whether nothing is left to do. A run killed in its last moments still lacks export or plot.

    A damaged export or last checkpoint counts as none: the run resumes and writes it again.
    """
    newest = newest_readable(config)
    if newest is None or not folder.loss_plot.is_file():
        return False
    step = checkpoint.read_state(newest).step
    if step < config.trainer.max_steps and not has_reached(config.task, folder, step):
        return False
    return find_export_damage(folder.export(step)) is None and checkpoint.find_error(newest) is None


def completion_lines(folder: RunFolder, config: TrainConfig) -> list[str]:
    """Where the results of a complete run are, and how to train it further."""
    newest = newest_readable(config)
    assert newest is not None
    step = checkpoint.read_state(newest).step
    further = f"a trainer.max_steps above {step}"
    if has_reached(config.task, folder, step):
        further = "another task.stop_at"
    return [
        f"run          {folder.root} is complete: {step:,} steps, model in {folder.export(step)}",
        f"             to train on, give {further}",
    ]


def has_reached(config: TaskConfig | None, folder: RunFolder, step: int) -> bool:
    """Whether the last two evaluations up to `step` had every metric of `stop_at` at its value or above."""
    if config is None or not config.stop_at:
        return False
    tests = [r for r in read_metrics(folder.metrics) if "validation_loss" in r and r["step"] <= step]
    # A test set may be newer than an evaluation, which then says nothing of it.
    return len(tests) >= EVALUATIONS_TO_STOP and all(
        record.get(metric, -math.inf) >= value
        for record in tests[-EVALUATIONS_TO_STOP:]
        for metric, value in config.stop_at
    )


def check_same_run(config: TrainConfig, data: PreparedData | None, resume: Path) -> list[str]:
    """Refuse to resume from a checkpoint of another model or stream of tokens, by the config it records.

    Args:
        data: None: they are not prepared yet. A change of settings that leads to other data is found all the
            same; a change of the text itself is not.

    Returns:
        What else changed: `KEY=VALUE (was VALUE)`.

    Raises:
        ValueError: naming each key that differs and the value to use.
    """
    state = checkpoint.read_state(resume)
    before, now = state.config, recorded(config)
    changed = {
        key: f"{key}={plain(now.get(key))} (was {plain(before.get(key))})"
        for key in sorted(before | now)
        if now.get(key) != before.get(key)
    }
    rules = {key: resume_rule(TrainConfig, key) for key in changed}
    errors = [text for key, text in changed.items() if rules[key] == "fixed"]
    of_data = [key for key in changed if rules[key] == "data"]
    if data is not None:
        name = data.folder.name
    else:
        # Files may have changed under the same path. The Hub is not asked: a run keeps its commit.
        asked = config.task is None and (of_data or config.data.source == "local")
        name = prepared_name(config.data) if asked else state.data
        if name is None and not of_data:  # the tokenizer has to be fetched first
            name = state.data
    if state.data not in (None, name):
        errors += [changed[key] for key in of_data] or ["the text itself or the tokenizer has changed since"]
    if errors:
        raise ValueError(
            f"{resume} belongs to another run: {', '.join(errors)}; restore them or use another run.dir"
        )
    return [text for key, text in changed.items() if rules[key] == "logged"]


def check_config_consistency(
    config: TrainConfig, data: PreparedData, resume: Path | None, folder: RunFolder
) -> None:
    """Check that all ranks train the same: each machine composes its config and prepares its data by itself.

    Every rank calls it.

    Raises:
        ValueError: on all ranks, naming what differs.
    """
    compared = ("fixed", "logged")
    facts: dict[str, object] = {
        key: value for key, value in recorded(config).items() if resume_rule(TrainConfig, key) in compared
    }
    facts["the prepared data"] = data.folder.name
    facts["the Hub's commit of the data"] = data.commits()
    facts["launch.context_parallel"] = config.launch.context_parallel
    facts["the checkpoint to resume"] = resume.name if resume else None
    # The first machine has written it by now. Another content, or none, means another folder.
    shared = folder.environment
    facts["run.dir (is it one shared folder?)"] = shared.read_text() if shared.is_file() else None
    everyone: list[dict[str, object]] = [{}] * dist.get_world_size()
    dist.all_gather_object(everyone, facts)
    names = dict.fromkeys(name for other in everyone for name in other)
    if differing := [n for n in names if any(other.get(n) != everyone[0].get(n) for other in everyone)]:
        raise ValueError(f"the machines differ in {', '.join(differing)}: give the same command on each")
