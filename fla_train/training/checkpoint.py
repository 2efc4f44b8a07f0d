"""The checkpoint format: folder layout, manifest, verification, choice of the newest intact one.

    checkpoints/.writing-step-0000100-.../  while it is written; never read
    checkpoints/step-0000100/
        manifest.json                       step, tokens, world size, versions; size and sha256 of each file
        state.json                          TrainState
        rng-0.pt rng-1.pt ...               random states, one file per rank
        features-0.pt ...                   state of each rank's features and callbacks
        deepspeed/                          weights and the ZeRO-2 partition of each rank

A checkpoint is complete or absent: `async_writer.py` renames the folder once every file is on the disk.

`manifest.json` is `{"version": 2, "sha256": ..., "content": ...}`, the sha256 being that of the content as
compact JSON with sorted keys. Version 1 is the content alone, without a checksum of its own. The two share no
key, so a damaged version 2 is never taken for a version 1. The world size determines the files of a
checkpoint; a manifest that lists any other file, or lacks one, is damaged.

This module imports neither torch nor numpy: the async writer's process does without them.
"""

import hashlib
import json
import logging
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fla_train.utils.filesystem import DELETING, delete, find_damage, reason, remove_folder, sync
from fla_train.utils.safe_files import read_dataclass, read_json

logger = logging.getLogger(__name__)

MANIFEST = "manifest.json"
MANIFEST_VERSION = 2
STATE = "state.json"
DEEPSPEED_TAG = "deepspeed"
MODEL_FILE = f"{DEEPSPEED_TAG}/mp_rank_00_model_states.pt"
OPTIMIZER_FILE = f"{DEEPSPEED_TAG}/zero_pp_rank_{{rank}}_mp_rank_00_optim_states.pt"
RANDOM_FILE = "rng-{rank}.pt"
FEATURES_FILE = "features-{rank}.pt"
# DeepSpeed's names in an optimizer file: a rank's ZeRO-2 state, and in it the fp32 partitions of the weights
SHARD, MASTERS = "optimizer_state_dict", "single_partition_of_fp32_groups"
WRITING = ".writing-"
NAME = re.compile(r"step-\d{7,}")


@dataclass
class TrainState:
    """What a run needs besides weights and optimizer to resume exactly."""

    step: int = 0  # optimizer steps taken, skipped ones included
    sequences: int = 0  # training sequences consumed by all ranks: the position in the data
    tokens: int = 0  # the same in tokens
    skipped_steps: int = 0  # steps without an update: loss or gradient not finite, or the loss a spike
    skipped_in_row: int = 0
    wandb_id: str | None = None
    run: str | None = None  # `RunFolder.id`
    config: dict[str, Any] = field(default_factory=dict)  # of the run: key -> value
    data: str | None = None  # fingerprint of the prepared data
    commits: dict[str, str] = field(default_factory=dict)  # of the Hub's datasets, by part of a mixture


def folder_name(step: int) -> str:
    return f"step-{step:07d}"


def read_state(folder: Path) -> TrainState:
    """Raises `ValueError`: it is damaged, or another version wrote it, with other fields."""
    return read_dataclass(TrainState, folder / STATE)


def world_size(checkpoint: Path) -> int:
    """The number of ranks that wrote it."""
    return read_manifest(checkpoint)["world_size"]


def rank_files(rank: int) -> list[str]:
    """Return the names of the files that `rank` writes, without the manifest, which rank 0 writes last."""
    files = [name.format(rank=rank) for name in (OPTIMIZER_FILE, RANDOM_FILE, FEATURES_FILE)]
    return [STATE, MODEL_FILE, *files] if rank == 0 else files


def read_manifest(checkpoint: Path) -> dict[str, Any]:
    """The validated content of a checkpoint's manifest, of either version.

    Returns:
        step, tokens, world_size; versions: package -> version; files: name -> what `describe` returns.

    Raises:
        ValueError: it is missing or damaged; one line says what is wrong.
    """
    try:
        content: Any = read_json(checkpoint / MANIFEST)
    except OSError as failure:
        raise ValueError(f"{MANIFEST} can't be read ({reason(failure)})") from failure
    if content.keys() == {"version", "sha256", "content"}:
        if content["version"] != MANIFEST_VERSION:
            raise ValueError(f"{MANIFEST} is of version {_brief(content['version'])}, which is unknown here")
        if content["sha256"] != _checksum(content["content"]):
            raise ValueError(f"{MANIFEST} has a wrong checksum")
        content = content["content"]
    if error := _manifest_error(content):
        raise ValueError(f"{MANIFEST} {error}")
    if NAME.fullmatch(checkpoint.name) and content["step"] != step_of(checkpoint.name):
        raise ValueError(f"{MANIFEST} is of step {content['step']}")
    return content


def write_manifest(folder: Path, content: Mapping[str, Any]) -> None:
    """Write `content`, as `read_manifest` returns it, as a manifest of version 2."""
    content = dict(content)
    error = _manifest_error(content)
    assert error is None, f"{MANIFEST} {error}"
    manifest = {"version": MANIFEST_VERSION, "sha256": _checksum(content), "content": content}
    (folder / MANIFEST).write_text(json.dumps(manifest, indent=2) + "\n")
    sync(folder / MANIFEST)


def _checksum(content: object) -> str:
    canonical = json.dumps(content, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(canonical.encode()).hexdigest()


def _manifest_error(content: Any) -> str | None:
    """What is wrong with a manifest's content, if anything is."""
    fields = ("step", "tokens", "world_size", "versions", "files")
    if not isinstance(content, dict) or content.keys() != set(fields):
        return f"has other fields than {', '.join(fields)}"
    for key, least in (("step", 0), ("tokens", 0), ("world_size", 1)):
        if type(content[key]) is not int or content[key] < least:
            return f"has {key} {_brief(content[key])}"
    versions, files, ranks = content["versions"], content["files"], content["world_size"]
    if not isinstance(versions, dict) or not all(isinstance(version, str) for version in versions.values()):
        return "has versions that are no text"
    if not isinstance(files, dict) or len(files) < ranks:
        return f"has world_size {ranks} and too few files"
    expected = {name for rank in range(ranks) for name in rank_files(rank)}
    for name in sorted(expected - files.keys()):
        return f"lacks {name}, which {ranks} rank(s) write"
    for name in sorted(files.keys() - expected):
        return f"lists {_brief(name)}, which {ranks} rank(s) do not write"
    for name, entry in files.items():
        if not isinstance(entry, dict) or entry.keys() != {"bytes", "sha256"}:
            return f"has other fields of {name} than bytes, sha256"
        size, digest = entry["bytes"], entry["sha256"]
        if type(size) is not int or size < 0:
            return f"has a size of {name} of {_brief(size)}"
        if not isinstance(digest, str) or not re.fullmatch("[0-9a-f]{64}", digest):
            return f"has a checksum of {name} that is no sha256"
    return None


def _brief(value: object) -> str:
    """A value as JSON, at most 40 characters of it."""
    return json.dumps(value)[:40]


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


def find_error(checkpoint: Path, run: str | None = None) -> str | None:
    """Return why a checkpoint can't be used, in one line; None: every file is as its manifest says.

    Args:
        run: id of the run that it must belong to; None: any.
    """
    try:
        manifest = read_manifest(checkpoint)
        if damage := find_damage(checkpoint, manifest["files"]):
            return damage
        state = read_state(checkpoint)
    except (OSError, ValueError) as failure:  # an OSError: it has been deleted meanwhile
        return str(failure)
    if (state.step, state.tokens) != (manifest["step"], manifest["tokens"]):
        return f"{MANIFEST} is of step {manifest['step']}, {STATE} of step {state.step}"
    return None if run in (None, state.run) else "another run has written it"


def choose(
    resume: str, folder: Path, warn: Callable[[str], None] = logger.warning, run: str | None = None
) -> Path | None:
    """The checkpoint to start from, by `trainer.resume` (auto, none or a path); None: the beginning.

    Args:
        warn: gets a line for each one that `auto` passes over.
        run: id of the run to resume; None: unknown.

    Raises:
        ValueError: `none` where checkpoints exist, a path that does not verify.
    """
    present = checkpoints(folder)
    if resume == "none":
        if present:
            raise ValueError(
                f"{folder} holds {present[-1].name} and trainer.resume=none would write over it: "
                "use trainer.resume=auto to resume it, or another run.dir"
            )
        return None
    if resume != "auto":
        if error := find_error(Path(resume)):
            raise ValueError(f"trainer.resume={resume} is not an intact checkpoint: {error}")
        step = read_manifest(Path(resume))["step"]
        later = [path.name for path in present if step_of(path.name) > step]
        if later:  # resume=auto would later take them for this run's
            raise ValueError(
                f"{folder} holds {later[-1]}, which comes after {resume}: use trainer.resume=auto to resume "
                "from it, or another run.dir"
            )
        return Path(resume)
    return newest_intact(folder, warn, run)


def newest_intact(
    folder: Path, warn: Callable[[str], None] = logger.warning, run: str | None = None
) -> Path | None:
    """The newest checkpoint that verifies; None if the folder holds no checkpoint at all.

    Args:
        warn: gets a line for each one that is passed over.
        run: id of the run that it must belong to; None: any.

    Raises:
        ValueError: none of those it holds will do.
    """
    present = checkpoints(folder)
    for checkpoint in reversed(present):
        error = find_error(checkpoint, run)
        if error is None:
            return checkpoint
        warn(f"checkpoint   {checkpoint} is not used ({error}): trying the one before it")
    if not present:
        return None
    raise ValueError(f"no checkpoint in {folder} is intact: delete the folder to start again")


def clean(folder: Path, keep: str = "") -> None:
    """Delete what was left half-written or half-deleted. Only with the run's lock held.

    Args:
        keep: name of the folder that is being written.
    """
    for pattern in (WRITING, DELETING):
        for path in folder.glob(pattern + "*"):
            if path.name != keep:
                delete(path)


def prune(newest: Path, keep: int, keep_every: int = 0) -> str | None:
    """Of the checkpoints up to `newest`, keep the last `keep` (0: all) and those of each `keep_every` steps.

    Later ones stay: they are the corrupt remains of an earlier attempt, and must not count as the newest.

    Returns:
        One line that names those that could not be deleted, and why; None: all were.
    """
    left: dict[str, str] = {}
    if not keep:
        return None
    last = step_of(newest.name)
    for old in [path for path in checkpoints(newest.parent) if step_of(path.name) <= last][:-keep]:
        if not keep_every or step_of(old.name) % keep_every:
            try:
                remove_folder(old)
            except OSError as failure:
                left[old.name] = reason(failure)
            else:
                if old.exists():
                    left[old.name] = "files stayed in it"
    return f"could not delete {', '.join(left)} ({', '.join(set(left.values()))})" if left else None
