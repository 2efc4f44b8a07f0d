"""Define the checkpoint format (folder layout, manifest), verify checkpoints, and choose one to resume.

    checkpoints/.writing-step-0000100-.../  while it is written; never read
    checkpoints/step-0000100/
        manifest.json                       step, world size; size and sha256 of each file
        state.json                          TrainState
        weights.pt                          the model's state dict
        rank-0.pt rank-1.pt ...             of each rank: its ZeRO-2 partition of the optimizer state, its
                                            random states, and the states of its features and callbacks

A checkpoint is complete or absent: `async_writer.py` renames the folder once every file is on disk.

`manifest.json` is `{"version": 1, "sha256": ..., "content": ...}` with the sha256 of the content as compact
JSON with sorted keys. The world size determines the files of a checkpoint. A manifest that lists other files
is damaged.

This module imports neither torch nor numpy, because the async writer's process does not need them.
"""

import hashlib
import json
import logging
import re
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, get_type_hints

from fla_train.utils.errors import described
from fla_train.utils.filesystem import DELETING, delete, find_damage, reason, remove_folder, sync
from fla_train.utils.safe_files import check_fields, read_json

logger = logging.getLogger(__name__)

MANIFEST = "manifest.json"
MANIFEST_VERSION = 1
MANIFEST_FIELDS = {"step": int, "world_size": int, "files": dict[str, dict[str, int | str]]}
STATE, WEIGHTS = "state.json", "weights.pt"
WRITING = ".writing-"
NAME = re.compile(r"step-\d{7,}")


@dataclass
class TrainState:
    """Hold the state, besides weights and optimizer, that a run needs to resume exactly."""

    step: int = 0  # number of optimizer steps, including skipped ones
    sequences: int = 0  # number of training sequences read by all ranks: the position in the data
    tokens: int = 0  # number of training tokens read by all ranks
    # Number of steps without an update, because loss or gradient was not finite or the loss spiked.
    skipped_steps: int = 0
    skipped_in_row: int = 0
    wandb_id: str | None = None
    run: str | None = None  # `RunFolder.id`
    config: dict[str, Any] = field(default_factory=dict)  # config of the run: key -> value
    data: str | None = None  # fingerprint of the prepared data
    commits: dict[str, str] = field(default_factory=dict)  # the Hub's commit of each corpus of a mixture


def folder_name(step: int) -> str:
    return f"step-{step:07d}"


def read_state(folder: Path) -> TrainState:
    """Read the state. Raise `ValueError` if it is damaged or has fields of another version."""
    content = read_json(folder / STATE)
    check_fields(content, get_type_hints(TrainState), folder / STATE)
    return TrainState(**content)


def world_size(checkpoint: Path) -> int:
    """Return the number of ranks that wrote the checkpoint."""
    return read_manifest(checkpoint)["world_size"]


def rank_file(rank: int) -> str:
    """Return the name of the file that each rank writes. Rank 0 also writes STATE, WEIGHTS and MANIFEST."""
    return f"rank-{rank}.pt"


def read_manifest(checkpoint: Path) -> dict[str, Any]:
    """Return the validated content of a checkpoint's manifest, which may come from a stranger.

    Returns:
        step, world_size; files: name -> its size in bytes and its sha256.

    Raises:
        ValueError: the manifest is missing or damaged; one line names the problem.
    """
    try:
        manifest = read_json(checkpoint / MANIFEST)
        if manifest["version"] != MANIFEST_VERSION:
            raise ValueError(f"{MANIFEST} is not of version {MANIFEST_VERSION}")
        content = manifest["content"]
        if manifest["sha256"] != _checksum(content):
            raise ValueError(f"{MANIFEST} has a wrong checksum")
        check_fields(content, MANIFEST_FIELDS, MANIFEST)
        step, ranks, files = content["step"], content["world_size"], content["files"]
    except OSError as failure:
        raise ValueError(f"{MANIFEST} can't be read ({reason(failure)})") from failure
    except (AttributeError, KeyError, TypeError) as error:
        raise ValueError(f"{MANIFEST} is damaged: {described(error)}") from error
    if not 1 <= ranks <= len(files):  # also bounds the work for a stranger's number
        raise ValueError(f"{MANIFEST} is damaged: world_size is {ranks}, with {len(files)} files")
    expected = {STATE, WEIGHTS, *map(rank_file, range(ranks))}
    if differing := sorted(expected ^ files.keys()):
        raise ValueError(f"{MANIFEST} does not list what {ranks} rank(s) write: {differing[0][:40]!r}")
    if NAME.fullmatch(checkpoint.name) and step != step_of(checkpoint.name):
        raise ValueError(f"{MANIFEST} is of step {step}")
    return content


def write_manifest(folder: Path, content: Mapping[str, Any]) -> None:
    """Write `content`, as returned by `read_manifest`, as a manifest."""
    manifest = {"version": MANIFEST_VERSION, "sha256": _checksum(content), "content": content}
    (folder / MANIFEST).write_text(json.dumps(manifest, indent=2) + "\n")
    sync(folder / MANIFEST)


def _checksum(content: object) -> str:
    canonical = json.dumps(content, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(canonical.encode()).hexdigest()


def step_of(name: str) -> int:
    """Return the step in a checkpoint folder's name."""
    return int(name.removeprefix("step-"))


def find_error(checkpoint: Path, run: str | None = None) -> str | None:
    """Return why a checkpoint can't be used; None: every file matches its manifest.

    Args:
        run: id of the run that must have written it; None: any.
    """
    try:
        manifest = read_manifest(checkpoint)
        if damage := find_damage(checkpoint, manifest["files"]):
            return damage
        state = read_state(checkpoint)
    except (KeyError, OSError, ValueError) as failure:
        return str(failure)
    if state.step != manifest["step"]:
        return f"{MANIFEST} is of step {manifest['step']}, {STATE} of step {state.step}"
    return None if run in (None, state.run) else "another run has written it"


class CheckpointStore:
    """Manage the checkpoints of one run.

    Args:
        folder: the run's `checkpoints/`.
        run: id of the run that must have written them; None: any.
    """

    def __init__(self, folder: Path, run: str | None = None):
        self.folder, self._run = folder, run

    def list(self) -> list[Path]:
        """Return the checkpoint folders, oldest first, without verifying them. Renamed copies are ignored."""
        present = (path for path in self.folder.glob("step-*") if NAME.fullmatch(path.name) and path.is_dir())
        return sorted(present, key=lambda path: step_of(path.name))

    def newest_state(self, resume: str = "auto") -> tuple[Path, TrainState] | None:
        """Return the checkpoint that `choose` probably returns, with its state. Verify nothing else.

        Raises:
            ValueError: `resume` is not a checkpoint.
        """
        if resume == "none":
            return None
        for checkpoint in reversed(self.list()):
            with suppress(OSError, ValueError):
                state = read_state(checkpoint)
                if self._run in (None, state.run) and resume in ("auto", state.config.get("trainer.resume")):
                    return checkpoint, state
        if resume == "auto":
            return None
        if not (Path(resume) / MANIFEST).is_file():
            raise ValueError(f"trainer.resume={resume} is not a checkpoint (init_from reads an export)")
        return Path(resume), read_state(Path(resume))

    def choose(self, resume: str, warn: Callable[[str], None] = logger.warning) -> Path | None:
        """Return the verified checkpoint to start from; None: the beginning.

        Args:
            resume: `trainer.resume`: auto, none or a path. A run that started from this path continues from
                its newest checkpoint, so that a batch system may repeat the same command.
            warn: receives one line for each checkpoint that `auto` skips.

        Raises:
            ValueError: `none` although checkpoints exist, a path that fails verification, or no intact
                checkpoint.
        """
        present = self.list()
        if resume == "none":
            if present:
                raise ValueError(f"{present[-1]} exists: use trainer.resume=auto, or another run.dir")
            return None
        if resume != "auto" and self.newest_state(resume)[0] == Path(resume):
            if error := find_error(Path(resume)):
                raise ValueError(f"trainer.resume={resume} is not an intact checkpoint: {error}")
            if present and step_of(present[-1].name) > read_manifest(Path(resume))["step"]:
                # A later `auto` would treat this checkpoint as one of this run.
                raise ValueError(f"{present[-1]} comes after {resume}: use trainer.resume=auto")
            return Path(resume)
        for checkpoint in reversed(present):
            error = find_error(checkpoint, self._run)
            if error is None:
                return checkpoint
            warn(f"checkpoint   {checkpoint} is not used ({error}): trying the one before it")
        if present:
            raise ValueError(f"no checkpoint in {self.folder} is intact: delete it to start again")
        return None

    def clean(self, keep: str = "") -> None:
        """Delete half-written and half-deleted folders except `keep`. The caller holds the run's lock."""
        for pattern in (WRITING, DELETING):
            for path in self.folder.glob(pattern + "*"):
                if path.name != keep:
                    delete(path)

    def prune(self, newest: Path, keep: int, keep_every: int = 0) -> str | None:
        """Delete checkpoints up to `newest`, except the last `keep` and the multiples of `keep_every` steps.

        Later ones are corrupt remains of an earlier attempt. They stay and do not count.

        Args:
            keep: number of checkpoints; 0: all.

        Returns:
            One line that names the checkpoints that could not be deleted, or None.
        """
        failed, last = [], step_of(newest.name)
        for old in [path for path in self.list() if keep and step_of(path.name) <= last][:-keep]:
            if not keep_every or step_of(old.name) % keep_every:
                with suppress(OSError):
                    remove_folder(old)
                if old.exists():
                    failed.append(old.name)
        return f"could not delete {', '.join(failed)}" if failed else None
