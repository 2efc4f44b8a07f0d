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
    import torch  # takes seconds, and `--version` does not need it

    versions = {name: package_version(name) for name in (*PACKAGES, *PEERS)}
    gpus = [torch.cuda.get_device_name(number) for number in range(torch.cuda.device_count())]
    return {
        "time": datetime.now().astimezone().isoformat(timespec="seconds"),
        "command": sys.argv,
        "commit": git_commit(),
        "fla_train": fla_train.__version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "packages": {name: number for name, number in versions.items() if number or name in PACKAGES},
        "device": device,
        "hardware": torch.cuda.get_device_name(device) if gpus and "cuda" in device else _processor(),
        "devices": gpus,
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


def _processor() -> str:
    """Return the model of the processor as far as the system names it."""
    # Linux names it in this file, and `platform` returns only the instruction set there.
    cpuinfo = Path("/proc/cpuinfo")
    text = cpuinfo.read_text() if cpuinfo.is_file() else ""
    model = re.search(r"^model name\s*: (.+)$", text, re.MULTILINE)
    return model[1] if model else platform.processor() or platform.machine()
