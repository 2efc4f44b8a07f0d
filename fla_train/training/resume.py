"""Resume: which checkpoint all ranks start from, and whether this config may."""

import json
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch.distributed as dist

from fla_train.data.cache import PreparedData, prepared_name
from fla_train.hub import find_export_damage
from fla_train.training import checkpoint
from fla_train.training.config import TrainConfig, load_config
from fla_train.training.run_data import has_reached
from fla_train.training.run_folder import RunFolder

# These fix what a checkpoint holds and, with the prepared data, the stream of tokens: a resume keeps them.
FIXED_KEYS = (
    *("seed", "trainer.seq_len", "trainer.global_batch_tokens", "model.", "optimizer.name"),
    *("task.kind", "task.options", "task.train", "task.batch_size", "task.curriculum", "baseline."),
    "init_from",
)
SEQUENCE_KEYS = ("data.document_boundaries",)  # of the data keys, what no fingerprint covers
# These say where and how a run is carried out, not what it computes: nobody asks whether they changed.
FREE_KEYS = (
    *("run.", "launch.", "logger.", "data.", "trainer.resume", "trainer.target_batch_tokens", "dry_run"),
    *("model.backend", "model.recompute_operator"),
)
FREE_DATA_KEYS = ("data.cache_dir", "data.num_workers")  # of the data keys, what no token depends on
VISIBLE = 60.0  # seconds within which a shared file system must show what another machine has written

Say = Callable[[str], None]


def agree_on_checkpoint(config: TrainConfig, folder: RunFolder, say: Say) -> Path | None:
    """The checkpoint that all ranks start from, by `trainer.resume`; None: the beginning. All ranks call it.

    Rank 0 verifies and chooses it, since shared file systems may show the others less for a while.

    Raises:
        ValueError: on rank 0 as `checkpoint.choose`; elsewhere if the checkpoint does not show.
    """
    chosen: list[str | None] = [None]
    if dist.get_rank() == 0:
        checkpoint.clean(folder.checkpoints)
        found = where_to_begin(config, folder, say)
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


def where_to_begin(config: TrainConfig, folder: RunFolder, say: Say) -> Path | None:
    """The checkpoint to start from, by `trainer.resume`; None: the beginning.

    A run that was begun with the same path to a checkpoint goes on from its own: it is the same command
    again, as a batch system gives it.

    Raises:
        ValueError: as `checkpoint.choose`.
    """
    return checkpoint.choose(_asked(config, folder), folder.checkpoints, say)


def _asked(config: TrainConfig, folder: RunFolder) -> str:
    """`trainer.resume`, or auto for the same path again."""
    resume = config.trainer.resume
    earlier = folder.config
    if resume not in ("auto", "none") and checkpoint.checkpoints(folder.checkpoints) and earlier.is_file():
        if load_config(earlier).trainer.resume == resume:
            return "auto"
    return resume


def _saved(config: TrainConfig) -> list[Path]:
    """The checkpoints that the run may go on from, oldest first; not verified."""
    resume, own = config.trainer.resume, []
    if config.run.dir is not None:
        folder = RunFolder(Path(config.run.dir))
        resume, own = _asked(config, folder), checkpoint.checkpoints(folder.checkpoints)
    if resume == "auto":
        return own
    return [] if resume == "none" else [Path(resume)]


def _run_of(saved: Path) -> RunFolder:
    """The run that a checkpoint belongs to, if it lies where that wrote it."""
    return RunFolder(saved.resolve().parent.parent)


def has_checkpoint(config: TrainConfig) -> bool:
    """Whether there is a checkpoint that the run may go on from."""
    return bool(_saved(config))


def newest_readable(config: TrainConfig) -> Path | None:
    """The newest checkpoint whose state can be read, not verified further; None: there is none."""
    for folder in reversed(_saved(config)):
        try:
            checkpoint.read_state(folder)
        except (OSError, ValueError):  # a damaged one: those of a run are of the same text and settings
            continue
        return folder
    return None


def saved_commits(config: TrainConfig) -> dict[str, str]:
    """The commits of the Hub that the run to go on with was begun with, by part of a mixture."""
    found = newest_readable(config)
    return {} if found is None else checkpoint.read_state(found).commits


def saved_sizes(config: TrainConfig) -> dict[str, Any]:
    """What `with_saved` takes from the run to continue; empty: there is none, or nothing tells.

    Raises:
        ValueError: that run's config is unreadable.
    """
    found = _saved(config)
    earlier = _run_of(found[-1]).config if found else None
    if earlier is None or not earlier.is_file():
        return {}
    saved = load_config(earlier)
    return {
        "warmup_steps": saved.schedule.warmup_steps,
        "global_batch_tokens": saved.trainer.global_batch_tokens,
        "vocab_size": saved.model["vocab_size"],
    }


def check_before_preparing(config: TrainConfig) -> None:
    """Refuse what `check_same_run` would refuse, before hours of tokenizing, as far as settings show it.

    Raises:
        ValueError: as `check_same_run`.
    """
    if found := _saved(config):
        check_same_run(config, None, found[-1], lambda line: None)


def is_complete(folder: RunFolder, config: TrainConfig) -> bool:
    """Whether nothing is left to do. A run killed in its last moments still lacks export or plot.

    A damaged export or last checkpoint counts as none: the run goes on and writes it again.
    """
    newest = newest_readable(config)
    if newest is None or not folder.loss_plot.is_file():
        return False
    step = checkpoint.read_state(newest).step
    if step < config.trainer.max_steps and not _has_reached(folder, step, config):
        return False
    return find_export_damage(folder.export(step)) is None and checkpoint.find_error(newest) is None


def completion_lines(folder: RunFolder, config: TrainConfig) -> list[str]:
    """What there is, and how to train on."""
    newest = newest_readable(config)
    assert newest is not None
    step = checkpoint.read_state(newest).step
    more = f"a trainer.max_steps above {step}"
    if _has_reached(folder, step, config):
        more = "another task.stop_at"
    return [
        f"run          {folder.root} is complete: {step:,} steps, model in {folder.export(step)}",
        f"             to train on, give {more}",
    ]


def _has_reached(folder: RunFolder, step: int, config: TrainConfig) -> bool:
    return config.task is not None and has_reached(config.task, folder, step)


def check_same_run(config: TrainConfig, data: PreparedData | None, resume: Path, say: Say) -> None:
    """Refuse to go on from a checkpoint of another model or another stream of tokens; say what else changed.

    Args:
        data: None: they are not prepared yet. A change of settings that leads to other data is found all the
            same; a change of the text itself is not.

    Raises:
        ValueError: naming each key that differs and the value to use.
    """
    earlier = _run_of(resume)
    if not earlier.config.is_file():
        if data is None:
            return
        if _fingerprint(resume) not in (None, data.folder.name):
            raise ValueError(f"{resume} is of other prepared data: restore them or use another checkpoint")
        say(f"resume       {resume} lies in no run folder: its model and seed can't be compared")
        return
    before, now = dict(_flat(asdict(load_config(earlier.config)))), dict(_flat(asdict(config)))
    changed = {
        key: f"{key}={_plain(now.get(key))} (was {_plain(before.get(key))})"
        for key in sorted(before | now)
        if now.get(key) != before.get(key)
    }
    faults = [
        text
        for key, text in changed.items()
        if key in SEQUENCE_KEYS or (key.startswith(FIXED_KEYS) and not key.startswith(FREE_KEYS))
    ]
    of_data = [key for key in changed if key.startswith("data.") and key not in FREE_DATA_KEYS]
    if data is not None:
        name = data.folder.name
    else:
        name = prepared_name(config.data) if of_data and config.task is None else _fingerprint(resume)
    if _fingerprint(resume) not in (None, name):
        faults += [changed[key] for key in of_data if key not in SEQUENCE_KEYS] or [
            "the text itself or the tokenizer has changed since"
        ]
    if faults:
        raise ValueError(
            f"{resume} belongs to another run: {', '.join(faults)}; restore them or use another run.dir"
        )
    for key, text in changed.items():
        if not key.startswith(FREE_KEYS):
            say(f"changed      {text}")


def _fingerprint(resume: Path) -> str | None:
    """Name of the prepared data that a checkpoint is of, if anything tells."""
    return checkpoint.read_state(resume).data or _data_fingerprint(_run_of(resume))


def _data_fingerprint(earlier: RunFolder) -> str | None:
    """Name of the prepared data a run was begun with: it covers the text, the tokenizer and the split.

    For checkpoints that were written before they named it themselves.
    """
    try:
        return Path(json.loads(earlier.plan.read_text())["data_folder"]).name
    except (OSError, ValueError, KeyError):
        return None


def _plain(value: object) -> str:
    """A value as one writes it on the command line: null, true, 3, text."""
    return value if isinstance(value, str) else json.dumps(value)


def _flat(node: Mapping[str, object], prefix: str = "") -> Iterator[tuple[str, object]]:
    """(dotted key, value) of every leaf."""
    for key, value in node.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield prefix + key, value
