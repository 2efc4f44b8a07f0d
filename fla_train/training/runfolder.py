"""The run folder: its paths, its lock, and what is written once before training starts."""

import fcntl
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import IO

import torch

import fla_train

PACKAGES = ("torch", "triton", "transformers", "accelerate", "deepspeed", "datasets", "numpy")
LOCK_WAIT = 10.0  # seconds; the workers of a killed launcher need a moment to die


@dataclass(frozen=True)
class RunFolder:
    """Paths inside a run folder (docs/architecture.md lists them)."""

    root: Path

    @property
    def metrics(self) -> Path:
        return self.root / "metrics.jsonl"

    @property
    def log(self) -> Path:
        return self.root / "train.log"

    @property
    def checkpoints(self) -> Path:
        return self.root / "checkpoints"

    @property
    def loss_plot(self) -> Path:
        return self.root / "plots" / "loss.png"

    def config(self, machine: int) -> Path:
        """The resolved config; machines after the first, whose launch section differs, have their own."""
        return self.root / ("config.yaml" if machine == 0 else f"config-machine-{machine}.yaml")

    def export(self, step: int) -> Path:
        return self.root / "hf" / f"step-{step:07d}"

    def create(self) -> None:
        for folder in (self.root, self.checkpoints):
            folder.mkdir(parents=True, exist_ok=True)

    @contextmanager
    def locked(self) -> Iterator[int]:
        """Hold the run; yields the lock's descriptor. A process that inherits it holds the run too.

        Raises:
            ValueError: another trainer holds it.
        """
        with (self.root / ".lock").open("w") as file:
            deadline = time.monotonic() + LOCK_WAIT
            while not _try_lock(file):
                if time.monotonic() > deadline:
                    raise ValueError(
                        f"another training process writes {self.root}: wait for it or give another run.dir"
                    )
                time.sleep(0.2)
            yield file.fileno()


def _try_lock(file: IO) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def new_run_dir(label: str, parent: Path = Path("runs")) -> Path:
    """`runs/<label>-<time>`, made here, so that two launches in one second get two folders."""
    base = f"{label}-{datetime.now():%Y%m%d-%H%M%S}"
    for attempt in range(1, 1000):
        path = parent / (base if attempt == 1 else f"{base}-{attempt}")
        try:
            path.mkdir(parents=True)
            return path
        except FileExistsError:
            continue
    raise ValueError(f"{parent} already holds a thousand runs named {base}: give run.dir")


def describe_environment(device: str) -> dict:
    """What a reader needs to repeat a run: versions, devices, commit, command. No environment variables."""
    return {
        "time": datetime.now().astimezone().isoformat(timespec="seconds"),
        "command": sys.argv,
        "commit": git_commit(),
        "fla_train": fla_train.__version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "packages": {name: _version(name) for name in PACKAGES},
        "device": device,
        "devices": _devices(),
        "cpu_count": os.cpu_count(),
    }


def write_environment(folder: RunFolder, device: str) -> None:
    (folder.root / "environment.json").write_text(json.dumps(describe_environment(device), indent=2) + "\n")


def git_commit() -> str | None:
    """Commit of the checkout this package runs from, `-dirty` when files differ; None outside a checkout."""
    root = Path(fla_train.__file__).parents[1]
    if not (root / ".git").exists():
        return None
    command = ["git", "-C", str(root), "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    try:
        result = subprocess.run(command, capture_output=True, text=True, check=True, timeout=10)
    except (OSError, subprocess.SubprocessError):
        return None
    return result.stdout.strip()


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _devices() -> list[str]:
    if not torch.cuda.is_available():
        return []
    return [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
