"""scripts/time_first_step.py: three times, of a process that starts with an empty compile cache."""

import re
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).parents[2] / "scripts" / "time_first_step.py"


def test_time_first_step() -> None:
    sizes = ["trainer.seq_len=16", "trainer.micro_batch_size=1", "trainer.global_batch_tokens=16"]
    command = [sys.executable, str(SCRIPT), "model=gated_delta_product/tiny", "launch.device=cpu", *sizes]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    found = re.findall(r"^(.+): (\d+\.\d) s$", done.stdout, re.MULTILINE)
    names = ["imports and the device's start", "first forward and backward", "second forward and backward"]
    assert [name for name, _ in found] == names
    assert float(found[0][1]) > 0
