"""Pushes beside training: their order, what is tried again, what a restart takes up; and a whole run's."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from fla_train.hub.pushes import HubConfig, HubPushes
from tests.fake_hub import TOKEN, running_hub

EXPORTER = """
import os, sys, time
given = dict(argument.split("=", 1) for argument in sys.argv[1:])
step = os.path.basename(given["checkpoint"])
with open("calls", "a") as calls:
    print(step, given["hub.repo_id"], given["hub.tag"], os.environ["CUDA_VISIBLE_DEVICES"], file=calls)
while os.path.exists("gate"):
    time.sleep(0.02)
if os.path.exists(step):  # the exit statuses to come
    statuses = open(step).read().split()
    open(step, "w").write(" ".join(statuses[1:]))
    if statuses:
        print("error: said the Hub", flush=True)
        sys.exit(int(statuses[0]))
"""


@pytest.fixture
def pushes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[HubPushes, list[str]]]:
    """`pushes(**settings)`: those of a run here, with a stand-in for fla-export, and their lines."""
    monkeypatch.chdir(tmp_path)
    real = subprocess.Popen

    def stand_in(command: list[str], **options: object) -> subprocess.Popen:
        assert command[3].endswith("fla_train.cli.export import main; main()")
        return real([sys.executable, "-c", EXPORTER, *command[4:]], **options)

    monkeypatch.setattr(subprocess, "Popen", stand_in)

    def make(**settings: object) -> tuple[HubPushes, list[str]]:
        lines: list[str] = []
        given = {"repo_id": "user/tiny", "push_every": 4} | settings
        return HubPushes(HubConfig(**given), tmp_path, None, lines.append), lines

    return make


def calls() -> list[str]:
    return [line.split()[0] for line in Path("calls").read_text().splitlines()]


def wait(made: HubPushes, lines: list[str], count: int) -> None:
    while len(lines) < count:
        made.poll()
        time.sleep(0.02)


def idle(beat: str) -> None:
    pass


def test_one_after_another_and_only_once(pushes) -> None:
    Path("gate").touch()
    made, lines = pushes()
    for step in (4, 8):
        made.add(step)
    made.poll()
    assert not lines
    Path("gate").unlink()
    wait(made, lines, 2)
    made.add(8)
    made.finish(idle)
    assert lines == ["step 4: pushed to user/tiny", "step 8: pushed to user/tiny"]
    assert calls() == ["step-0000004", "step-0000008"]
    assert Path("calls").read_text().split()[1:3] == ["user/tiny", "step-0000004"]


def test_what_fails_is_tried_again_at_the_next_push(pushes) -> None:
    Path("step-0000004").write_text("1")
    made, lines = pushes()
    made.add(4)
    wait(made, lines, 1)
    assert lines == ["step 4: NOT PUSHED, said the Hub"]
    made.add(8)
    wait(made, lines, 3)
    assert calls() == ["step-0000004", "step-0000004", "step-0000008"]  # so the newest stays the last


def test_a_push_that_cannot_succeed_keeps_no_other_back(pushes) -> None:
    Path("step-0000004").write_text("2")
    made, lines = pushes()
    made.add(4)
    made.add(8)
    made.finish(idle)
    assert lines[1:] == ["step 4: NOT PUSHED, said the Hub", "step 8: pushed to user/tiny"]


def test_the_end_waits_and_tries_once_more(pushes) -> None:
    Path("step-0000004").write_text("1 1 1")
    made, lines = pushes()
    made.add(4)
    made.finish(idle)
    assert len(calls()) == 2 and "not on the Hub: step 4;" in lines[-1]


def test_the_end_does_not_wait_forever(pushes) -> None:
    Path("gate").touch()
    made, lines = pushes(timeout=0.1)
    made.add(4)
    started = time.monotonic()
    made.finish(idle)
    assert time.monotonic() - started < 10 and "waiting up to 0.1 s" in lines[0]
    assert "not on the Hub: step 4;" in lines[1] and not Path("pushes.jsonl").exists()


def test_a_full_disk_is_a_line(pushes) -> None:
    Path("logs").touch()  # no folder, so that no log can be written
    made, lines = pushes()
    made.add(4)
    made.finish(idle)
    assert "NOT PUSHED" in lines[0] and "not on the Hub" in lines[-1]


@pytest.mark.parametrize(
    ("recorded", "step", "pushed"),
    [
        ([], 0, []),  # a fresh run in an old folder
        ([], 9, [4, 8]),
        ([4], 9, [8]),
        ([4, 8, 12], 8, []),
        ([4, 8, 12], 12, []),
        ([4, 8], 7, []),  # step 8 is trained again
    ],
)
def test_a_restart_takes_up_what_is_left(pushes, recorded: list[int], step: int, pushed: list[int]) -> None:
    for exported in (4, 6, 8, 12):  # 6 is no push's
        Path(f"hf/step-{exported:07d}").mkdir(parents=True)
    others = [{"step": 4, "repo_id": "user/other"}]
    records = others + [{"step": done, "repo_id": "user/tiny"} for done in recorded]
    Path("pushes.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    made, lines = pushes()
    made.resume(step)
    made.finish(idle)
    assert [line for line in lines if "waiting" not in line] == [
        f"step {s}: pushed to user/tiny" for s in pushed
    ]
    if step == 7:
        made.add(8)  # its record is of the weights before
        made.finish(idle)
        assert lines[-1] == "step 8: pushed to user/tiny"


def test_only_the_last_export(pushes) -> None:
    Path("hf/step-0000004").mkdir(parents=True)
    for _ in range(2):  # the second one finds the record of the first
        made, lines = pushes(push_every=0)
        made.resume(12)
        made.add(12)
        made.finish(idle)
    assert calls() == ["step-0000012"] and not lines


@pytest.mark.parametrize(
    ("settings", "errors"),
    [
        ({"repo_id": "user/tiny", "push_every": 4}, 0),
        ({"repo_id": "a/b/c"}, 1),
        ({"push_every": 4}, 1),
        ({"repo_id": "../x", "push_every": -1, "dtype": "bf16", "timeout": -1.0}, 4),
    ],
)
def test_settings(settings: dict, errors: int) -> None:
    assert len(list(HubConfig(**settings).errors())) == errors


@pytest.mark.long
def test_a_run_pushes_its_exports(tmp_path: Path) -> None:
    (tmp_path / "corpus").mkdir()
    documents = [
        json.dumps({"id": str(i), "text": f"the gate of state {i} forgets a key " * 5}) for i in range(99)
    ]
    (tmp_path / "corpus/documents.jsonl").write_text("\n".join(documents) + "\n")
    size = ["vocab_size=320", "hidden_size=32", "num_hidden_layers=1", "num_heads=1", "head_dim=16"]
    trainer = [
        "max_steps=8",
        "seq_len=32",
        "global_batch_tokens=128",
        "micro_batch_size=2",
        "eval_tokens=256",
    ]
    overrides = [
        *("data=local", f"data.path={tmp_path}/corpus", f"data.cache_dir={tmp_path}/cache", "logger=none"),
        *("data.tokenizer.name=bytes", "data.validation_fraction=0.1", "trainer.check_backend=false"),
        *(f"model.{entry}" for entry in size),
        *(f"trainer.{entry}" for entry in trainer),
        *("launch.device=cpu", f"run.dir={tmp_path}/run", "hub.repo_id=user/tiny", "hub.push_every=4"),
        *("hub.license=apache-2.0", "hub.dtype=bfloat16"),
    ]

    def train() -> tuple[int, str]:
        command = [sys.executable, "-m", "fla_train.cli.train", *overrides]
        environment = os.environ | hub.environment(tmp_path / "home") | {"CUDA_VISIBLE_DEVICES": ""}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=500)
        assert TOKEN not in done.stdout + done.stderr
        return done.returncode, done.stdout + done.stderr

    with running_hub() as hub:
        hub.fail("repos/create", 401)
        code, said = train()
        assert code == 2 and "the Hub refuses" in said and not (tmp_path / "run").exists()
        hub.fail("commit/main", 403)
        code, said = train()
        assert code == 0 and "step 4: NOT PUSHED, the Hub refused" in said
        repo = hub.repos["user/tiny"]
        assert repo.tags == {"step-0000004": 1, "step-0000008": 2} and repo.branches == {"main": 2}
        before = len(hub.requests)
        (tmp_path / "run/pushes.jsonl").unlink()  # as if a kill came between upload and record
        code, said = train()
        assert code == 0 and "is complete" in said and "step 8: pushed" in said
        assert len(repo.commits) == 3 and not any("preupload" in r for r in hub.requests[before:])
    files = repo.files()
    own = {"loss.png", "tokenizer.json", "generation_config.json", "training.json", "README.md"}
    assert own | {"config.json", "model.safetensors", "checksums.json"} <= files.keys()
    assert json.loads(files["config.json"])["dtype"] == "bfloat16"
    assert b"license: apache-2.0" in files["README.md"] and b"validation perplexity" in files["README.md"]
    written = [file for file in (tmp_path / "run").rglob("*") if file.is_file()]
    assert not [file for file in written if TOKEN.encode() in file.read_bytes()]
    secrets = (TOKEN.encode(), str(tmp_path).encode())
    assert not [name for name, content in files.items() if any(secret in content for secret in secrets)]
