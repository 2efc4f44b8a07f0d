"""Resume a run: agree on a checkpoint, and check that config and ranks match it."""

import json
import math
import socket
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch.distributed as dist

from fla_train.data.cache import PreparedData, prepared_folder
from fla_train.hub.checksums import CHECKSUMS, find_export_damage
from fla_train.training.checkpoint import CheckpointStore, TrainState, find_error
from fla_train.training.config import TrainConfig
from fla_train.training.run_folder import RunFolder
from fla_train.utils.keys import rule
from fla_train.utils.overrides import flatten, plain
from fla_train.utils.records import read_metrics

# Seconds within which a shared file system must show the files of another machine.
VISIBLE = 60.0
# Number of consecutive evaluations at `task.stop_at`. Accuracy fluctuates, so one could be luck.
EVALUATIONS_TO_STOP = 2
TEXT_CHANGED = "the text itself or the tokenizer has changed since"


def agree_on_checkpoint(store: CheckpointStore, resume: str, log: Callable[[str], None]) -> Path | None:
    """Return the checkpoint that all ranks start from; None: the beginning. All ranks call it.

    Rank 0 verifies and chooses it, because a shared file system may show the others an older state.

    Raises:
        ValueError: on rank 0 as `CheckpointStore.choose`; elsewhere if the checkpoint does not appear.
    """
    chosen: list[str | None] = [None]
    if dist.get_rank() == 0:
        store.clean()
        checkpoint = store.choose(resume, log)
        chosen = [None if checkpoint is None else str(checkpoint)]
    dist.broadcast_object_list(chosen)
    if chosen[0] is None:
        return None
    path = Path(chosen[0])
    deadline = time.monotonic() + VISIBLE
    while not path.is_dir():
        if time.monotonic() > deadline:
            raise ValueError(f"{socket.gethostname()} does not see {path}: do all machines share run.dir?")
        time.sleep(1.0)
    return path


def recorded(config: TrainConfig) -> dict[str, Any]:
    """Return a config's keys and values as its checkpoints record them, in JSON's types."""
    return json.loads(json.dumps(dict(flatten(asdict(config)))))


def is_complete(folder: RunFolder, config: TrainConfig, checkpoint: Path, state: TrainState) -> bool:
    """Return whether nothing is left to do after the newest checkpoint.

    A run that was killed shortly before its end still lacks an export or plot. A damaged export or checkpoint
    counts as missing, so the run resumes and writes it again.
    """
    target = config.task and config.task.stop_at
    if state.step < config.trainer.max_steps and not has_reached(target, folder, state.step):
        return False
    export = folder.export(state.step)
    written = folder.loss_plot.is_file() and (export / CHECKSUMS).is_file()
    return written and find_export_damage(export) is None and find_error(checkpoint) is None


def has_reached(stop_at: Iterable | None, folder: RunFolder, step: int) -> bool:
    """Return whether the last two evaluations up to `step` reached every metric of `task.stop_at`."""
    if not stop_at:
        return False
    tests = [r for r in read_metrics(folder.metrics) if "validation_loss" in r and r["step"] <= step]
    # A test set may be newer than an evaluation, which then has no result for it.
    return len(tests) >= EVALUATIONS_TO_STOP and all(
        record.get(metric, -math.inf) >= value
        for record in tests[-EVALUATIONS_TO_STOP:]
        for metric, value in stop_at
    )


def find_changes(config: TrainConfig, state: TrainState, kind: str | None) -> list[str]:
    """Return `KEY=VALUE (was VALUE)` for each key with the rule `resume=kind` that a checkpoint differs in.

    Args:
        config: resolved. Before the data are prepared only `kind=None` has values that are still open.
    """
    before, now = state.config, recorded(config)
    return [
        f"{key}={plain(now.get(key, 'unset'))} (was {plain(before.get(key, 'unset'))})"
        for key in sorted(before | now)
        if now.get(key) != before.get(key) and rule(TrainConfig, "resume", key) == kind
    ]


def check_same_run(config: TrainConfig, checkpoint: Path, state: TrainState) -> None:
    """Check before data are prepared that a checkpoint has the model and the token stream of this run.

    Raises:
        ValueError: names each key that differs and the value to use.
    """
    errors, of_data = (find_changes(config, state, kind) for kind in ("fixed", "data"))
    # Files may have changed under an equal path. The Hub is not asked, because a run keeps its commit.
    if state.data is not None and config.task is None and (of_data or config.data.source == "local"):
        folder = prepared_folder(config.data)
        # Before the tokenizer is fetched, only the keys can tell.
        changed = of_data if folder is None else folder.name != state.data
        if changed:
            errors += of_data or [TEXT_CHANGED]
    if errors:
        raise ValueError(f"{checkpoint} belongs to another run: {', '.join(errors)}; or use init_from=RUN")


def check_same_data(data: PreparedData, checkpoint: Path, state: TrainState) -> None:
    """Check that prepared data are a checkpoint's. `check_same_run` does not read the texts of a mixture.

    Raises:
        ValueError: they differ.
    """
    if state.data not in (None, data.folder.name):
        raise ValueError(f"{checkpoint} belongs to another run: {TEXT_CHANGED}; or use init_from=RUN")


def check_config_consistency(
    config: TrainConfig, data: PreparedData, resume: Path | None, folder: RunFolder
) -> None:
    """Check that all ranks have equal configs and data, which each machine composes and prepares by itself.

    Every rank calls it.

    Raises:
        ValueError: on all ranks, with the differences.
    """
    facts: dict[str, object] = {
        key: value
        for key, value in recorded(config).items()
        if key.startswith("model.") or rule(TrainConfig, "resume", key) in ("fixed", None)
    }
    facts["the prepared data"] = data.folder.name
    facts["the Hub's commit of the data"] = data.commits()
    facts["launch.context_parallel"] = config.launch.context_parallel
    facts["the checkpoint to resume"] = resume.name if resume else None
    # The first machine has written this file by now. Other content, or a missing file, means another folder.
    shared = folder.environment
    facts["run.dir (is it one shared folder?)"] = shared.read_text() if shared.is_file() else None
    everyone: list[dict[str, object]] = [{}] * dist.get_world_size()
    dist.all_gather_object(everyone, facts)
    names = dict.fromkeys(name for other in everyone for name in other)
    if differing := [n for n in names if any(other.get(n) != everyone[0].get(n) for other in everyone)]:
        raise ValueError(f"the machines differ in {', '.join(differing)}: give the same command on each")
