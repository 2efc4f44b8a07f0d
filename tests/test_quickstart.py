"""The commands of the CPU quickstart, in ```bash fences, work in order in one folder, with less data."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent


def commands() -> list[list[str]]:
    blocks = re.findall(r"^```bash\n(.*?)^```", (ROOT / "docs" / "quickstart.md").read_text(), re.S | re.M)
    lines = [line for block in blocks for line in block.splitlines() if line.strip()]
    return [shlex.split(line, comments=True) for line in lines]


@pytest.mark.usefixtures("unwatched")
@pytest.mark.long
def test_the_tour_runs_in_order(tmp_path: Path) -> None:
    small = {"fla-prepare": ["data.max_documents=60"]}
    small["fla-train"] = [
        *(*small["fla-prepare"], "debug=smoke"),
        *("trainer.global_batch_tokens=256", "trainer.eval_tokens=256"),
    ]
    environment = os.environ | {"FLA_TRAIN_CACHE": str(tmp_path / "cache")}
    tour = commands()
    assert [words[0] for words in tour] == [
        "fla-doctor", "fla-train", "fla-prepare", "fla-train", "fla-eval", "fla-generate", "fla-runs"
    ]  # fmt: skip
    for words in tour:
        command = [str(Path(sys.executable).with_name(words[0])), *words[1:], *small.get(words[0], [])]
        done = subprocess.run(
            command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=600
        )
        assert done.returncode == 0, f"{shlex.join(words)}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
    assert list(tmp_path.glob("runs/first/eval/*/table.md"))
