"""Pushes during training: their order, retries, restarts, and those of a whole run."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from fla_train.training.features import pushes as module
from fla_train.training.features.pushes import HubConfig, Pushes
from fla_train.training.run_folder import RunFolder
from tests.fake_hub import TOKEN, running_hub


class FakeProcess:
    """`fla-export` that ends with the next status of its step in `statuses`, 0 by default; None: never."""

    pid = os.getpid()

    def __init__(self, step: int, log: Path, statuses: dict[int, list[int | None]]) -> None:
        self.returncode = statuses[step].pop(0) if statuses.get(step) else 0
        log.write_text("" if self.returncode == 0 else "error: rejected by the Hub\n")

    def poll(self) -> int | None:
        return self.returncode

    def terminate(self) -> None:
        pass

    wait = terminate


@pytest.fixture
def pushes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Pushes]:
    """Make the pushes of a run in `tmp_path`, with lists `lines` and `calls` of its log and processes."""
    monkeypatch.setattr(module, "POLL", 0.001)
    monkeypatch.setattr(os, "setpriority", lambda *arguments: None)

    def make(statuses: dict[int, list[int | None]] | None = None, **settings: object) -> Pushes:
        lines: list[str] = []
        calls: list[str] = []

        def start(name: str, overrides: list[str], log: Path, **variables: str) -> FakeProcess:
            assert name == "export" and "hub.repo_id=user/tiny" in overrides
            assert variables["CUDA_VISIBLE_DEVICES"] == ""
            Path(variables["TMPDIR"], "of a push that is killed").touch()
            calls.append(next(x for x in overrides if x.startswith("hub.tag=")).removeprefix("hub.tag=step-"))
            return FakeProcess(int(calls[-1]), log, statuses or {})

        monkeypatch.setattr(module, "start_command", start)
        config = HubConfig(**({"repo_id": "user/tiny", "push_every": 4} | settings))
        made = Pushes(SimpleNamespace(hub=config, model={}), RunFolder(tmp_path), lines.append)
        made.lines, made.calls = lines, calls
        return made

    return make


def idle(beat: str) -> None:
    pass


def steps(made: Pushes) -> list[int]:
    return [int(call) for call in made.calls]


def test_a_failed_push_is_repeated_first(pushes) -> None:
    """With the next export, so that the newest arrives last."""
    made = pushes({4: [1]})
    made.add(4)
    made.poll()
    assert made.lines == ["step 4: NOT PUSHED, rejected by the Hub"]
    made.add(8)
    made.wait(idle)
    assert steps(made) == [4, 4, 8]


@pytest.mark.parametrize(
    ("statuses", "expected", "left"),
    [({4: [2]}, [4, 8], False), ({4: [1, 1]}, [4, 4], True), ({4: [None]}, [4], True)],
    ids=["cannot succeed", "no network", "hangs"],
)
def test_the_end_of_a_run(pushes, statuses: dict, expected: list[int], left: bool, tmp_path: Path) -> None:
    made = pushes(statuses, timeout=0.1)
    made.add(4)
    made.add(8)
    made.wait(idle)
    assert steps(made) == expected and not list(tmp_path.glob(".*"))
    assert (made.lines[-1] == "step 8: pushed to user/tiny") is not left
    if left:
        assert "not on the Hub: step 4, 8" in made.lines[-1] and not (tmp_path / "pushes.jsonl").exists()


@pytest.mark.parametrize(
    ("recorded", "step", "pushed"),
    [
        ([], 0, []),  # a new run in an old folder
        ([], 9, [4, 8]),
        ([4], 9, [8]),
        ([8], 9, []),  # step 4 would replace step 8
        ([4, 8, 12], 8, []),
        ([4, 8], 7, []),  # step 8 is trained again
    ],
)
def test_a_restart_pushes_the_rest(pushes, recorded, step, pushed, tmp_path):
    for exported in (4, 6, 8, 12):  # no push is due at step 6
        (tmp_path / f"hf/step-{exported:07d}").mkdir(parents=True)
    records = [{"step": 4, "repo_id": "user/other"}]
    records += [{"step": done, "repo_id": "user/tiny"} for done in recorded]
    (tmp_path / "pushes.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    made = pushes()
    made.resume(step)
    made.wait(idle)
    assert steps(made) == pushed
    if step == 7:
        made.add(8)  # the record is of the weights before
        made.wait(idle)
        assert made.lines[-1] == "step 8: pushed to user/tiny"


@pytest.mark.long
def test_a_run_pushes_its_exports(overrides: list[str], tmp_path: Path) -> None:
    publishes = ["hub.repo_id=user/tiny", "hub.push_every=6", "hub.license=apache-2.0", "hub.dtype=bfloat16"]
    words = [*overrides, *publishes, "launch.device=cpu", f"run.dir={tmp_path}/run"]

    def train() -> tuple[int, str]:
        command = [sys.executable, "-m", "fla_train.cli.train", *words]
        environment = os.environ | hub.environment(tmp_path / "home") | {"CUDA_VISIBLE_DEVICES": ""}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=500)
        assert TOKEN not in done.stdout + done.stderr
        return done.returncode, done.stdout + done.stderr

    with running_hub() as hub:
        hub.faults["repos/create"] = 401
        code, output = train()
        assert code == 2 and "the Hub rejects" in output and not (tmp_path / "run").exists()
        hub.faults["commit/main"] = 403
        code, output = train()
        assert code == 0 and "step 6: NOT PUSHED, cannot push" in output
        repo = hub.repos["user/tiny"]
        assert repo.tags == {"step-0000006": 1, "step-0000012": 2} and repo.branches == {"main": 2}
        (tmp_path / "run/pushes.jsonl").write_text(
            json.dumps({"step": 6, "repo_id": "user/tiny"}) + "\n"  # as if a kill came before the last record
        )
        code, output = train()
        assert code == 0 and "is complete" in output and "step 12: pushed" in output
        assert len(repo.commits) == 3
    files = repo.files()
    expected = {"loss.png", "tokenizer.json", "generation_config.json", "training.json", "README.md"}
    assert expected | {"config.json", "model.safetensors", "checksums.json"} <= files.keys()
    assert json.loads(files["config.json"])["dtype"] == "bfloat16"
    assert b"license: apache-2.0" in files["README.md"] and b"validation perplexity" in files["README.md"]
    written = [file for file in (tmp_path / "run").rglob("*") if file.is_file()]
    assert not [file for file in written if TOKEN.encode() in file.read_bytes()]
    secrets = (TOKEN.encode(), str(tmp_path.parent).encode())
    assert not [name for name, content in files.items() if any(secret in content for secret in secrets)]
