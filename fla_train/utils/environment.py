"""Describe the environment of a result: versions, hardware, commit, command. Omit environment variables."""

import os
import platform
import re
import subprocess
import sys
from datetime import datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import fla_train

PACKAGES = ("torch", "triton", "transformers", "accelerate", "deepspeed", "datasets", "lm-eval", "numpy")
PEERS = ("flash-linear-attention", "flash-qla", "tilelang", "attn-gym", "liger-kernel")  # if installed


def describe_environment(device: str) -> dict:
    """Return the description as plain JSON. `device` runs the work (`cpu`, `cuda`, `cuda:1`, ...)."""
    return {
        "time": datetime.now().astimezone().isoformat(timespec="seconds"),
        "command": sys.argv,
        "commit": git_commit(),
        "fla_train": fla_train.__version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "packages": {name: package_version(name) for name in PACKAGES} | _peers(),
        "device": device,
        "hardware": _hardware(device),
        "devices": _gpus(),
        "cpu_count": os.cpu_count(),
    }


def git_commit() -> str | None:
    """Return the commit of the checkout, with `-dirty` if files differ; None outside a checkout."""
    root = Path(fla_train.__file__).parents[1]
    if not (root / ".git").exists():
        return None
    command = ["git", "-C", str(root), "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    try:
        result = subprocess.run(command, capture_output=True, text=True, check=True, timeout=10)
    except (OSError, subprocess.SubprocessError):
        return None
    return result.stdout.strip()


def package_version(package: str) -> str | None:
    """Return the version of a package without importing it, or None if it is not installed."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _peers() -> dict[str, str]:
    return {name: found for name in PEERS if (found := package_version(name)) is not None}


def _hardware(device: str) -> str:
    """Return the model of the GPU, or of the processor as far as the system names it."""
    import torch  # takes seconds, and `--version` does not need it

    if device.startswith("cuda") and torch.cuda.is_available():
        return torch.cuda.get_device_name(device)
    # This is for Linux, where `platform` returns the instruction set there instead of the processor.
    cpuinfo = Path("/proc/cpuinfo")
    text = cpuinfo.read_text() if cpuinfo.is_file() else ""
    named = re.search(r"^model name\s*: (.+)$", text, re.MULTILINE)
    return named[1] if named else platform.processor() or platform.machine()


def _gpus() -> list[str]:
    import torch

    if not torch.cuda.is_available():
        return []
    return [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
