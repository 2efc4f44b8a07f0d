"""Two network namespaces stand for machines, joined by a cable that the test pulls and puts back."""

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
from test_nodes import put
from test_preemption import without_saves
from test_resume import TIMEOUT, steps_logged, wait_for
from warm_ranks import WarmRanks

from fla_train.training.config import TrainConfig

SCRIPT = Path(__file__).parents[2] / "scripts" / "train_hosts.sh"
NAMESPACE = ["unshare", "--map-root-user", "--net"]  # Any user may lay cables inside.
FIRST, SECOND = "10.77.0.1", "10.77.0.2"
LAY = f"""set -e
exec 3< <(unshare --net sh -c 'echo $$; exec sleep 600')
read -r OTHER <&3
export OTHER  # a process on the second machine
trap 'kill "$OTHER"' EXIT
ip link set lo up
ip link add cable type veth peer name cable netns "$OTHER"
ip address add {FIRST}/24 dev cable
ip link set cable up
nsenter --net=/proc/$OTHER/ns/net sh -ec \\
  'ip link set lo up; ip address add {SECOND}/24 dev cable; ip link set cable up'
"$@"
"""
REACH = f"""#!/usr/bin/env bash
[ "$1" = {FIRST} ] || enter="nsenter --net=/proc/$OTHER/ns/net"
exec $enter bash -c "$2"
"""
SETTINGS = [
    *("trainer.max_steps=80", "trainer.checkpoint_every=20", "trainer.eval_every=0"),
    *("launch.num_processes=2", "launch.device=cpu", "trainer.precision=fp32", "trainer.hang_timeout=8"),
]


def can_lay_cables() -> bool:
    if not all(map(shutil.which, ("unshare", "nsenter", "ip", "bash"))):
        return False
    return subprocess.run([*NAMESPACE, "bash", "-c", LAY, "-", "true"], capture_output=True).returncode == 0


def switch(shell: subprocess.Popen, state: str) -> None:
    """Pull the cable ("down") or put it back ("up")."""
    inside = ["nsenter", f"--target={shell.pid}", "--user", "--preserve-credentials", "--net"]
    subprocess.run([*inside, "ip", "link", "set", "cable", state], check=True)


@pytest.mark.usefixtures("unwatched")
@pytest.mark.long
def test_machines_that_lose_sight_of_each_other_go_on_when_the_cable_is_back(
    overrides: list[str], make_config: Callable[..., TrainConfig], warm_ranks: WarmRanks, tmp_path: Path
):
    if not can_lay_cables():
        pytest.skip("no network namespaces here")
    whole, run, output = tmp_path / "whole", tmp_path / "run", tmp_path / "said"
    warm_ranks.launch(make_config(*SETTINGS, f"run.dir={whole}"))

    reach = put(tmp_path / "reach", REACH)
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"  # where fla-train is
    environment = os.environ | {"PATH": path, "SSH": str(reach), "HOSTS": f"{FIRST} {SECOND}"}
    command = ["bash", str(SCRIPT), *overrides, *SETTINGS, f"run.dir={run}"]
    with output.open("w") as file:
        shell = subprocess.Popen(
            [*NAMESPACE, "bash", "-c", LAY, "-", *command], env=environment, stdout=file, stderr=file
        )
    try:
        wait_for(lambda: steps_logged(run) >= 30 or shell.poll() is not None)
        assert shell.poll() is None, output.read_text()[-3000:]
        switch(shell, "down")

        def gave_up() -> bool:
            """Both ranks have ended; the agent without the store hears nothing until the cable is back."""
            own = (run / "logs" / "rank-1.log").read_text() + (run / "train.log").read_text()
            return own.count("no progress for 8 s") == 2 and ": restart      1 of " in output.read_text()

        wait_for(lambda: gave_up() or shell.poll() is not None, poll=0.1)
        switch(shell, "up")
        assert shell.wait(TIMEOUT) == 0, output.read_text()[-3000:]
    finally:
        if shell.poll() is None:
            for process in (*psutil.Process(shell.pid).children(recursive=True), shell):
                process.kill()

    said = output.read_text()
    assert f"{SECOND}: machines     waiting for all 2 at {FIRST}:29500" in said
    assert "no progress for 8 s while" in said
    assert ": Trained 80 steps" in said
    assert without_saves(run) == without_saves(whole)
    (export,) = run.glob("hf/*/model.safetensors")
    assert export.read_bytes() == (whole / export.relative_to(run)).read_bytes()
