"""Going on from a checkpoint: which one all machines take, and whether this config may."""

import json
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict
from itertools import count
from pathlib import Path
from typing import Any

from fla_train.data import PreparedData, prepared_name
from fla_train.hub import find_export_damage
from fla_train.training import checkpoint
from fla_train.training.machines import Machines
from fla_train.training.runfolder import RunFolder
from fla_train.training.schema import TrainConfig, load_config
from fla_train.training.task_data import has_reached

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
VISIBLE = 60  # times that a machine looks again, a second apart, for what another has written

Say = Callable[[str], None]


def agree_on_checkpoint(machines: Machines, folder: Path, own: Path | None, say: Say) -> Path | None:
    """The newest checkpoint of the run that every machine can read; all call it.

    Args:
        folder: the run's checkpoints.
        own: the newest one that this machine can read, or where the run begins without one of its own.

    Raises:
        AttemptEnded: a machine has gone.
        ValueError: this machine can read none of those that others can.
    """
    for look in count():
        within = own is not None and own.resolve().parent == folder.resolve()
        names = machines.gather(f"checkpoint {look}", own.name if within else None)
        readable = [name for name in names if name is not None]
        if len(set(names)) == 1:
            return own
        if len(readable) == len(names):
            oldest = min(readable, key=checkpoint.step_of)
            if own.name != oldest:
                say(f"resume       not all machines can read {own.name}: looking up to {oldest}")
                own = checkpoint.newest_intact(folder, until=checkpoint.step_of(oldest))
        elif look < VISIBLE:  # a shared file system may show it a while later
            time.sleep(1.0)
            own = own if within else checkpoint.newest_intact(folder) or own
        else:
            blind = ", ".join(str(machine) for machine, name in enumerate(names) if name is None)
            raise ValueError(
                f"machine {blind} sees no checkpoint in {folder}, where others see {readable[0]}: is run.dir "
                "one folder that all machines share?"
            )
    raise AssertionError("unreachable")


def where_to_begin(config: TrainConfig, folder: RunFolder) -> Path | None:
    """The checkpoint that this machine would go on from, by `trainer.resume`; None: the beginning.

    A run that was begun with the same path to a checkpoint goes on from its own: it is the same command
    again, as a batch system gives it.

    Raises:
        ValueError: as `checkpoint.choose`.
    """
    return checkpoint.choose(_asked(config, folder), folder.checkpoints)


def _asked(config: TrainConfig, folder: RunFolder) -> str:
    """`trainer.resume`, or auto for the same path again."""
    resume = config.trainer.resume
    earlier = folder.config(0)  # this machine may not have been one of the run's
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


def saved_commits(config: TrainConfig) -> dict[str, str]:
    """The commits of the Hub that the run to go on with was begun with, by part of a mixture."""
    for folder in reversed(_saved(config)):
        try:
            return checkpoint.read_state(folder).commits
        except (OSError, ValueError):  # a corrupt one: those of a run name the same commits
            continue
    return {}


def saved_sizes(config: TrainConfig) -> dict[str, Any]:
    """What `with_saved` takes from the run to continue; empty: there is none, or nothing tells.

    Raises:
        ValueError: that run's config is unreadable.
    """
    found = _saved(config)
    earlier = _run_of(found[-1]).config(0) if found else None
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


def is_complete(folder: RunFolder, resume: Path | None, config: TrainConfig) -> bool:
    """Whether nothing is left to do. A run killed in its last moments still lacks export or plot.

    A damaged export counts as none: the run goes on and writes it again.
    """
    if resume is None:
        return False
    step = checkpoint.read_state(resume).step
    if step < config.trainer.max_steps and not _has_reached(folder, step, config):
        return False
    return folder.loss_plot.is_file() and find_export_damage(folder.export(step)) is None


def completion_lines(folder: RunFolder, resume: Path, config: TrainConfig) -> list[str]:
    """What there is, and how to train on."""
    step = checkpoint.read_state(resume).step
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
    if not earlier.config(0).is_file():
        if data is None:
            return
        if _fingerprint(resume) not in (None, data.folder.name):
            raise ValueError(f"{resume} is of other prepared data: restore them or use another checkpoint")
        say(f"resume       {resume} lies in no run folder: its model and seed can't be compared")
        return
    before, now = dict(_flat(asdict(load_config(earlier.config(0))))), dict(_flat(asdict(config)))
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
