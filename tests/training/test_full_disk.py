"""A run on a disk full to its last byte: it goes on, tells of it, and nothing is missing afterwards."""

import contextlib
import json
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import BinaryIO

import pytest

from fla_train.training import checkpoint

NAMESPACE = ["unshare", "--map-root-user", "--mount"]  # in which anyone may mount
TRAIN = [sys.executable, "-c", "from fla_train.cli.train import main; main()"]
# $0 is the small disk; what is on it is gone with the namespace.
SCRIPT = 'mount -t tmpfs -o size=8M none "$0" && "$@"; code=$?; cp -r "$0/run" "$0/.."; exit $code'
PATIENCE = 120.0  # seconds


def can_mount(folder: Path) -> bool:
    if shutil.which("unshare") is None:
        return False
    return not subprocess.run([*NAMESPACE, "mount", "-t", "tmpfs", "none", folder], check=False).returncode


def wait_for(output: Path, *texts: str, filler: BinaryIO | None = None) -> None:
    """Wait until all `texts` have been said; meanwhile `filler` takes all the room there is."""
    deadline = time.monotonic() + PATIENCE
    while not all(text in (said := output.read_text()) for text in texts):
        assert "error: " not in said and time.monotonic() < deadline, said[-2000:]
        time.sleep(0.01)
        with contextlib.suppress(OSError):
            while filler is not None:  # a checkpoint that fails leaves room
                filler.write(bytes(1 << 16))


@pytest.mark.usefixtures("unwatched")
@pytest.mark.long
def test_a_run_outlives_a_full_disk(overrides: list[str], tmp_path: Path) -> None:
    if not can_mount(tmp_path):
        pytest.skip("no mount namespaces here")
    disk, output = tmp_path / "disk", tmp_path / "launcher.log"
    disk.mkdir()
    more = ["trainer.max_steps=80", "trainer.checkpoint_every=10", "trainer.eval_every=0"]
    command = [*TRAIN, *overrides, *more, "launch.device=cpu", f"run.dir={disk / 'run'}"]
    with output.open("w") as file:
        shell = subprocess.Popen([*NAMESPACE, "sh", "-c", SCRIPT, disk, *command], stdout=file, stderr=file)
    wait_for(output, "step-0000010, written in")
    filler = Path(f"/proc/{shell.pid}/root{disk}/filler")
    full = "No space left on device"
    with filler.open("wb", buffering=0) as file:
        wait_for(
            output, f"metrics.jsonl can't be written ({full})", f"NO CHECKPOINT, rank 0: {full}", filler=file
        )
    filler.unlink()
    assert shell.wait(PATIENCE) == 0, output.read_text()[-2000:]
    run = tmp_path / "run"
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [record["step"] for record in records if "loss" in record] == list(range(1, 81))
    newest = checkpoint.CheckpointStore(run / "checkpoints").choose("auto")
    assert newest is not None and newest.name == "step-0000080"
    assert (run / "hf/step-0000080/model.safetensors").is_file()
