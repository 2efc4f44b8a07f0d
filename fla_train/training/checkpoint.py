"""Checkpoints that are complete or absent.

    checkpoints/.writing-step-0000100/    while it is written; never read
    checkpoints/step-0000100/
        manifest.json                     step, world size, versions; size and sha256 of every other file
        state.json                        TrainState
        rng-0.pt rng-1.pt ...             random states, one file per rank
        deepspeed/                        weights and the ZeRO-2 partition of each rank

`writer.py` writes them: each rank its files and their checksums, then rank 0 the manifest and the new name,
so a kill at any moment leaves either the whole new checkpoint or only the ones before it. Every rank calls
`load`.
"""

import json
import logging
import math
import os
import random
import re
import shutil
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

from fla_train.training.deepspeed_patches import files_through
from fla_train.utils.filesystem import find_damage, sync

logger = logging.getLogger(__name__)

MANIFEST = "manifest.json"
STATE = "state.json"
DEEPSPEED_TAG = "deepspeed"
WRITING = ".writing-"
DELETING = ".deleting-"
NAME = re.compile(r"step-\d{7,}")
VERSIONS = ("torch", "deepspeed", "accelerate", "transformers")


@dataclass
class TrainState:
    """What a run needs besides weights and optimizer to go on where it was."""

    step: int = 0  # optimizer steps taken, skipped ones included
    sequences: int = 0  # training sequences consumed by all ranks: the position in the data
    tokens: int = 0  # the same in tokens
    skipped_steps: int = 0  # steps without an update: loss or gradient not finite, or the loss a spike
    skipped_in_row: int = 0
    loss_statistics: list[float] = field(default_factory=lambda: [0.0, 0.0, 0.0])  # of `StepGuard`
    wandb_id: str | None = None
    data: str | None = None  # fingerprint of the prepared data
    commits: dict[str, str] = field(default_factory=dict)  # of the Hub's datasets, by part of a mixture


def folder_name(step: int) -> str:
    return f"step-{step:07d}"


def load(engine, folder: Path) -> TrainState:
    """Bring `engine` and this rank's random states to where `folder` was written.

    By as many ranks as wrote it, exactly. By another number the weights and moments are the same, the sums
    over ranks round otherwise, and a rank beyond the saved ones shares the random states of one of them.
    Weight decay, betas and the like stay those of `engine`: a config may change them.

    Raises:
        ValueError: it is of another model, or a file holds more than tensors and plain values.
    """
    # DeepSpeed takes seconds to import, and launchers do without it.
    from fla_train.training.reshard import load_optimizer
    from fla_train.training.safe_load import SafeCheckpointEngine, load_file

    saved = world_size(folder)
    same = saved == dist.get_world_size()
    settings = [{k: v for k, v in group.items() if k != "params"} for group in engine.optimizer.param_groups]
    try:
        with files_through(engine, SafeCheckpointEngine()):
            path, _ = engine.load_checkpoint(str(folder), tag=DEEPSPEED_TAG, load_optimizer_states=same)
    except RuntimeError as failure:
        heading, *keys = str(failure).splitlines()
        if "loading state_dict" not in heading:
            raise
        raise ValueError(f"{folder} is of another model: {keys[0].strip()}") from failure
    assert path is not None, f"DeepSpeed found nothing in {folder}"
    if not same:
        load_optimizer(engine, folder / DEEPSPEED_TAG, saved)
    for group, own in zip(engine.optimizer.param_groups, settings, strict=True):
        group.update(own)
    set_random_states(load_file(folder / f"rng-{dist.get_rank() % saved}.pt"))
    return read_state(folder)


def read_state(folder: Path) -> TrainState:
    """Raises `ValueError`: another version wrote it, with other fields."""
    try:
        return TrainState(**json.loads((folder / STATE).read_text()))
    except TypeError as failure:
        raise ValueError(f"{folder / STATE} is of another version: {failure}") from failure


def world_size(checkpoint: Path) -> int:
    """The number of ranks that wrote it."""
    return _manifest(checkpoint)["world_size"]


def _manifest(checkpoint: Path) -> dict:
    return json.loads((checkpoint / MANIFEST).read_text())


def step_of(name: str) -> int:
    """The step of a checkpoint folder's name."""
    return int(name.removeprefix("step-"))


def checkpoints(folder: Path) -> list[Path]:
    """Checkpoint folders, oldest first; not verified. A copy by another name is none of the run's."""
    present = (path for path in folder.glob("step-*") if NAME.fullmatch(path.name) and path.is_dir())
    return sorted(present, key=lambda path: step_of(path.name))


def newest_step(folder: Path) -> int:
    """The step of the newest checkpoint, not verified; 0 if there is none."""
    present = checkpoints(folder)
    return step_of(present[-1].name) if present else 0


def find_fault(checkpoint: Path) -> str | None:
    """Why a checkpoint can't be used, or None when every file is as its manifest says."""
    try:
        files = dict(_manifest(checkpoint)["files"])
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return f"{MANIFEST} is missing or unreadable"
    return find_damage(checkpoint, files)


def choose(resume: str, folder: Path) -> Path | None:
    """The checkpoint to start from, by `trainer.resume` (auto, none or a path); None: the beginning.

    Raises:
        ValueError: `none` where checkpoints exist, a path that does not verify.
    """
    present = checkpoints(folder)
    if resume == "none":
        if present:
            raise ValueError(
                f"{folder} holds {present[-1].name} and trainer.resume=none would write over it: "
                "use trainer.resume=auto to go on, or another run.dir"
            )
        return None
    if resume != "auto":
        if fault := find_fault(Path(resume)):
            raise ValueError(f"trainer.resume={resume} is not an intact checkpoint: {fault}")
        step = _manifest(Path(resume))["step"]
        later = [path.name for path in present if step_of(path.name) > step]
        if later:  # resume=auto would later take them for this run's
            raise ValueError(
                f"{folder} holds {later[-1]}, which comes after {resume}: use trainer.resume=auto to go on "
                "from it, or another run.dir"
            )
        return Path(resume)
    return newest_intact(folder)


def newest_intact(folder: Path, until: float = math.inf) -> Path | None:
    """The newest checkpoint up to step `until` that verifies; None if the folder holds no checkpoint at all.

    Raises:
        ValueError: none of those it holds will do.
    """
    present = checkpoints(folder)
    for checkpoint in reversed(present):
        if step_of(checkpoint.name) > until:
            continue
        fault = find_fault(checkpoint)
        if fault is None:
            return checkpoint
        logger.warning("checkpoint %s is corrupt (%s): trying the one before it", checkpoint, fault)
    if not present:
        return None
    which = "" if until == math.inf else f" up to step {until:,}"
    raise ValueError(f"no checkpoint in {folder}{which} is intact: delete the folder to start again")


def clean(folder: Path) -> None:
    """Delete what a killed run left half-written or half-deleted. Only with the run's lock held."""
    for pattern in (WRITING, DELETING):
        for path in folder.glob(pattern + "*"):
            shutil.rmtree(path, ignore_errors=True)


def prune(newest: Path, keep: int, keep_every: int = 0) -> None:
    """Of the checkpoints up to `newest`, keep the last `keep` (0: all) and those of each `keep_every` steps.

    Later ones stay: they are the corrupt remains of an earlier attempt, and must not count as the newest.
    """
    if not keep:
        return
    last = step_of(newest.name)
    for old in [path for path in checkpoints(newest.parent) if step_of(path.name) <= last][:-keep]:
        if not keep_every or step_of(old.name) % keep_every:
            remove(old)


def remove(checkpoint: Path) -> None:
    """Delete a checkpoint; renamed first, so that a kill leaves no folder that looks like one.

    What can't be deleted (NFS keeps a file that a reader has open) is no fault: `clean` tries again.
    """
    if checkpoint.exists():
        doomed = checkpoint.with_name(DELETING + checkpoint.name)
        shutil.rmtree(doomed, ignore_errors=True)
        os.rename(checkpoint, doomed)
        shutil.rmtree(doomed, ignore_errors=True)


def random_states() -> dict:
    """Random states of Python, numpy, torch and this rank's GPU, as tensors and plain values."""
    kind, keys, *rest = np.random.get_state()
    numpy_state = (kind, torch.from_numpy(keys), *rest)
    states = {"python": random.getstate(), "numpy": numpy_state, "torch": torch.get_rng_state()}
    if torch.cuda.is_available():
        states["cuda"] = torch.cuda.get_rng_state()
    return states


def set_random_states(states: dict) -> None:
    """Inverse of `random_states`."""
    random.setstate(states["python"])
    kind, keys, *rest = states["numpy"]
    np.random.set_state((kind, np.asarray(keys), *rest))  # the keys were an array in older checkpoints
    torch.set_rng_state(states["torch"])
    if "cuda" in states and torch.cuda.is_available():
        torch.cuda.set_rng_state(states["cuda"])


def write_manifest(folder: Path, state: TrainState, files: dict[str, dict]) -> None:
    """Vouch for the `files`, name to `describe`, that all ranks have put into `folder`."""
    manifest = {
        "step": state.step,
        "tokens": state.tokens,
        "world_size": dist.get_world_size(),
        "versions": {name: version(name) for name in VERSIONS},
        "files": dict(sorted(files.items())),
    }
    write_json(folder / MANIFEST, manifest)
    for path in [*folder.rglob("*"), folder]:
        if path.is_dir():
            sync(path)


def write_json(path: Path, content: dict) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n")
    sync(path)
