"""Pushing through the real client to a small server that speaks the Hub's API, and loading from there."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import huggingface_hub
import pytest
import torch
import yaml

from fla_train.hub import CardInfo, export_model, push
from fla_train.hub.push import check_access
from tests.fake_hub import DROP, TOKEN, FakeHub, running_hub


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[FakeHub]:
    constants = huggingface_hub.constants
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", "/nonexistent")
    for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    huggingface_hub.close_session()
    with running_hub() as server:
        monkeypatch.setattr(constants, "ENDPOINT", server.address)
        files = server.address + "/{repo_id}/resolve/{revision}/{filename}"
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", files)
        yield server
    huggingface_hub.close_session()


@pytest.fixture
def waits(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Seconds slept, without sleeping."""
    slept: list[float] = []
    monkeypatch.setattr(time, "sleep", slept.append)
    return slept


@pytest.fixture
def folder(small_model, tokenizer, tmp_path: Path) -> Path:
    return export_model(small_model, tokenizer, tmp_path / "export", validate=False)


def contents(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in folder.iterdir()}


def without_card(files: dict[str, bytes]) -> dict[str, bytes]:
    return {name: content for name, content in files.items() if name != "README.md"}


def test_every_file_arrives(hub: FakeHub, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / ".cache").mkdir()
    hidden = [folder / ".env", folder / ".cache/token"]
    for file in hidden:
        file.write_text("secret")
    monkeypatch.chdir(folder)
    address, uploaded = push(".", "user/tiny", token=TOKEN)
    for file in hidden:
        file.unlink()
    (folder / ".cache").rmdir()
    assert hub.repos["user/tiny"].messages == ["Upload export with fla-train"]
    assert uploaded and address.startswith(f"{hub.address}/user/tiny/commit/")
    there = hub.repos["user/tiny"].files()
    assert without_card(there) == without_card(contents(folder)) and hub.repos["user/tiny"].private
    assert b"user/model" not in there["README.md"] and b"user/tiny" in there["README.md"]
    assert len(hub.lfs) == 1  # the weights, and only they
    commits = len(hub.repos["user/tiny"].commits)
    assert not push(folder, "user/tiny", token=TOKEN).uploaded  # nothing has changed
    assert len(hub.repos["user/tiny"].commits) == commits


def test_files_in_folders_arrive(hub: FakeHub, small_model, tokenizer, tmp_path: Path) -> None:
    tokenizer.chat_template = {"default": "{{ messages }}", "tool_use": "{{ tools }}"}
    push(export_model(small_model, tokenizer, tmp_path / "export", validate=False), "user/tiny", token=TOKEN)
    there = hub.repos["user/tiny"].files()
    assert there["additional_chat_templates/tool_use.jinja"] == b"{{ tools }}"


def test_without_xet_storage_weights_go_by_lfs(
    hub: FakeHub, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_DISABLE_XET", False)
    push(folder, "user/tiny", token=TOKEN)
    assert without_card(hub.repos["user/tiny"].files()) == without_card(contents(folder))
    assert huggingface_hub.constants.HF_HUB_DISABLE_XET is False


def test_to_a_new_branch(hub: FakeHub, folder: Path) -> None:
    push(folder, "user/tiny", private=False, revision="step-7", token=TOKEN)
    repo = hub.repos["user/tiny"]
    assert without_card(repo.files("step-7")) == without_card(contents(folder))
    assert repo.files("main") == {} and not repo.private


def test_a_name_without_user_is_the_users_own(hub: FakeHub, folder: Path) -> None:
    push(folder, "tiny", token=TOKEN)
    assert b'"user/tiny"' in hub.repos["user/tiny"].files()["README.md"]


def test_a_tag_is_pushed_once_and_moves_with_other_weights(
    hub: FakeHub, folder: Path, small_model, tokenizer, tmp_path: Path
) -> None:
    push(folder, "user/tiny", tag="step-1", token=TOKEN)
    repo, before = hub.repos["user/tiny"], len(hub.requests)
    push(folder, "user/tiny", tag="step-1", token=TOKEN)
    assert len(repo.commits) == 2 and not any("preupload" in request for request in hub.requests[before:])
    bf16 = export_model(small_model, tokenizer, tmp_path / "bf16", dtype=torch.bfloat16, validate=False)
    (folder / "model.safetensors").rename(
        folder / "model-00001-of-00001.safetensors"
    )  # as a larger one has it
    (folder / "checksums.json").unlink()
    push(folder, "user/tiny", tag="step-2", token=TOKEN)
    assert "model.safetensors" not in repo.files()  # a loader would have preferred the old weights
    push(bf16, "user/tiny", tag="step-1", token=TOKEN)
    assert without_card(repo.files("step-1")) == without_card(contents(bf16)) == without_card(repo.files())
    assert repo.tags == {"step-1": 3, "step-2": 2}


def test_a_tag_moves_with_other_files_beside_equal_weights(
    hub: FakeHub, folder: Path, small_model, tokenizer, tmp_path: Path
) -> None:
    push(folder, "user/tiny", tag="v1", token=TOKEN)
    repo = hub.repos["user/tiny"]
    translated = export_model(small_model, tokenizer, tmp_path / "fla", format="fla", validate=False)
    tokenizer.add_tokens(["state"])
    other = export_model(small_model, tokenizer, tmp_path / "other", validate=False)
    for number, export in enumerate((translated, other), start=2):
        assert push(export, "user/tiny", tag="v1", token=TOKEN).uploaded
        assert repo.tags == {"v1": number}
        assert without_card(repo.files("v1")) == without_card(contents(export))
        (export / "README.md").write_text("a better card")
        assert not push(export, "user/tiny", tag="v1", token=TOKEN).uploaded
    (other / "checksums.json").unlink()
    (other / "tokenizer_config.json").unlink()
    assert push(other, "user/tiny", tag="v1", token=TOKEN).uploaded
    assert without_card(repo.files("v1")) == without_card(contents(other))


def test_a_tag_elsewhere_does_not_keep_a_branch_from_its_push(hub: FakeHub, folder: Path) -> None:
    for _ in range(2):
        push(folder, "user/tiny", revision="dev", tag="v1", token=TOKEN)
    repo = hub.repos["user/tiny"]
    assert repo.branches == {"main": 0, "dev": 1} and repo.tags == {"v1": 1}
    assert push(folder, "user/tiny", revision="stable", tag="v1", token=TOKEN).uploaded
    assert without_card(repo.files("stable")) == without_card(contents(folder))
    assert repo.branches == {"main": 0, "dev": 1, "stable": 2} and repo.tags == {"v1": 2}


def test_an_upload_whose_tag_failed_at_first_counts(hub: FakeHub, folder: Path, waits: list[float]) -> None:
    hub.fail(r"POST .*/tag/", 503)
    assert push(folder, "user/tiny", tag="v1", token=TOKEN).uploaded
    assert waits and hub.repos["user/tiny"].tags == {"v1": 1}


def test_the_command_says_whether_anything_was_uploaded(
    hub: FakeHub, folder: Path, run_command: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    words = ("fla-export", f"checkpoint={folder}", "hub.repo_id=user/tiny", "hub.tag=v1")
    code, first, _ = run_command(*words)
    assert code == 0 and f"pushed {folder} to {hub.address}" in first
    code, again, _ = run_command(*words)
    assert code == 0 and "nothing uploaded" in again and "pushed" not in again


def test_files_of_an_earlier_export_go(hub: FakeHub, small_model, tokenizer, tmp_path: Path) -> None:
    """A chat template, and Python files that another format has not; what a user added stays."""
    tokenizer.chat_template = {"default": "{{ messages }}", "tool_use": "{{ tools }}"}
    push(export_model(small_model, tokenizer, tmp_path / "first", validate=False), "user/tiny", token=TOKEN)
    repo = hub.repos["user/tiny"]
    assert "additional_chat_templates/tool_use.jinja" in repo.files()
    own = {".gitattributes": b"*.png filter=lfs", "notes.json": b"{}", "extra.jinja": b"{{ messages }}"}
    repo.commits[-1].update(own)
    tokenizer.chat_template = None
    second = export_model(small_model, tokenizer, tmp_path / "second", format="fla", validate=False)
    push(second, "user/tiny", token=TOKEN)
    assert without_card(repo.files()) == without_card(contents(second)) | own
    (second / "checksums.json").unlink()  # of no export here, it would call the files damaged
    push(second, "user/tiny", token=TOKEN)
    assert without_card(repo.files()) == without_card(contents(second)) | own


def test_licence_language_and_results_reach_the_card(
    hub: FakeHub, small_model, tokenizer, tmp_path: Path
) -> None:
    info = CardInfo(losses={"validation": 2.0}, datasets=["HuggingFaceFW/fineweb"])
    export = export_model(small_model, tokenizer, tmp_path / "run/hf/step-0000007", info, validate=False)
    for name, step, value in (("old", 6, 0.1), ("new", 7, 0.25)):
        (tmp_path / "run/eval" / name).mkdir(parents=True)
        metrics = {"eval/hellaswag/acc_norm": value, "eval/web/perplexity_64": float("inf")}
        record = {"checkpoint": f"/home/me/run/hf/step-{step:07d}", "metrics": metrics}
        (tmp_path / "run/eval" / name / "results.json").write_text(json.dumps(record))
    os.utime(export, (time.time() + 60,) * 2)  # as when an editor replaces the card
    push(export, "user/tiny", license="apache-2.0", language="en", token=TOKEN)
    card = hub.repos["user/tiny"].files()["README.md"].decode()
    header = yaml.safe_load(card.split("---")[1])
    assert (header["license"], header["language"]) == ("apache-2.0", "en")
    assert header["datasets"] == ["HuggingFaceFW/fineweb"]
    found = {r["metrics"][0]["type"]: r["metrics"][0]["value"] for r in header["model-index"][0]["results"]}
    assert found["acc_norm"] == 0.25 and len(found) == 2
    assert "| hellaswag | acc_norm | 0.2500 |" in card and "/home" not in card
    assert (export / "README.md").read_text() != card  # the export is only read


def test_other_names_in_the_card_stay(hub: FakeHub, small_model, tokenizer, tmp_path: Path) -> None:
    info = CardInfo(init_from="superuser/model-340m", datasets=["poweruser/modelset"], data="user/model")
    export = export_model(small_model, tokenizer, tmp_path / "export", info, validate=False)
    push(export, "user/tiny", token=TOKEN)
    card = hub.repos["user/tiny"].files()["README.md"].decode()
    changed = set(card.splitlines()) - set((export / "README.md").read_text().splitlines())
    assert len(changed) == 1 and '"user/tiny"' in changed.pop()


@pytest.mark.parametrize("name", ["user/tiny/too/long", "../tiny", "user/ti ny"])
def test_not_a_name(hub: FakeHub, folder: Path, name: str) -> None:
    with pytest.raises(ValueError, match="not a name of the form user/model"):
        push(folder, name, token=TOKEN)


def test_no_token(hub: FakeHub, folder: Path) -> None:
    for call in (lambda: push(folder, "user/tiny"), lambda: check_access("user/tiny")):
        with pytest.raises(ValueError, match="no Hub token: run `hf auth login`"):
            call()
    assert hub.repos == {}


def failure_line(folder: Path, **arguments: str) -> str:
    before = contents(folder)
    with pytest.raises(ConnectionError) as failure:
        push(folder, "user/tiny", **{"token": TOKEN} | arguments)
    assert contents(folder) == before
    message = str(failure.value)
    assert "\n" not in message and f"safe in {folder}" in message
    assert TOKEN not in message and "Signature" not in message
    return message


@pytest.mark.parametrize(
    ("request_", "status"),
    [
        ("repos/create", 401),
        ("repos/create", 403),
        ("preupload", 403),
        ("commit/main", 403),
        ("PUT /lfs", 403),
    ],
)
def test_a_refusal_is_a_line(hub: FakeHub, folder: Path, waits: list, request_: str, status: int) -> None:
    hub.fail(request_, status)
    assert "refused" in failure_line(folder) and not waits
    push(folder, "user/tiny", token=TOKEN)
    assert without_card(hub.repos["user/tiny"].files()) == without_card(contents(folder))


@pytest.mark.parametrize(
    ("request_", "status"),
    [
        ("repos/create", 429),
        ("repos/create", 503),
        ("preupload", 500),
        ("objects/batch", DROP),
        ("PUT /lfs", 502),
        ("PUT /lfs", DROP),
        ("commit/main", 409),
        ("commit/main", 412),
        ("commit/main", DROP),
        ("POST .*/tag/", 504),
    ],
)
def test_what_passes_is_tried_again(
    hub: FakeHub, folder: Path, waits: list, request_: str, status: int
) -> None:
    hub.fail(request_, status, times=2, Retry_After="11")
    push(folder, "user/tiny", tag="step-1", token=TOKEN)
    repo = hub.repos["user/tiny"]
    assert repo.commits[1:] == [repo.files("step-1")] and repo.files() == repo.files("step-1")
    assert without_card(repo.files()) == without_card(contents(folder)) and waits
    if "repos" in request_:
        assert waits == [11, 11]


def test_what_does_not_pass_is_a_line(hub: FakeHub, folder: Path, waits: list) -> None:
    hub.fail("commit/main", 429, times=99, Retry_After="9999")
    assert "429" in failure_line(folder) and len(waits) == 3 and max(waits) < 1000


def test_no_network(hub: FakeHub, folder: Path, waits: list) -> None:
    hub.shutdown()
    hub.server_close()
    line = failure_line(folder)
    assert "cannot reach the Hub" in line and not waits
    assert f"`fla-export checkpoint={folder} hub.repo_id=user/tiny`" in line


def test_offline_by_setting(hub: FakeHub, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    huggingface_hub.close_session()
    assert "cannot reach the Hub" in failure_line(folder)


def test_access_is_known_before_training(hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    check_access("user/tiny", private=False)
    assert not hub.repos["user/tiny"].private
    hub.fail("repos/create", 503)
    with pytest.raises(ConnectionError):  # which may pass
        check_access("user/tiny")
    monkeypatch.setenv("HF_TOKEN", "hf_wrong")
    with pytest.raises(ValueError, match="the Hub refuses") as refusal:
        check_access("user/tiny")
    assert "hf_wrong" not in str(refusal.value) and "\n" not in str(refusal.value)


@pytest.mark.slow
def test_round_trip(hub: FakeHub, small_model, tokenizer, tmp_path: Path) -> None:
    """fla-export to the Hub, and fla-eval from it, in processes that know it by HF_ENDPOINT."""
    export = export_model(small_model, tokenizer, tmp_path / "export")
    documents = tmp_path / "documents.jsonl"
    documents.write_text("".join(json.dumps({"text": "the state " * 20 * n}) + "\n" for n in range(1, 9)))
    work = f"""
import sys
from fla_train.cli import eval, export
from fla_train.hub import load_model
sys.argv = ["fla-export", "checkpoint={export}", "hub.repo_id=user/tiny"]
try:
    export.main()
except SystemExit as end:
    assert not end.code, end.code
model, tokenizer = load_model("user/tiny")
ids = tokenizer("the state", return_tensors="pt").input_ids
import torch
with torch.no_grad():
    torch.save(model(ids).logits, "{tmp_path}/logits.pt")
sys.argv = ["fla-eval", "checkpoint=user/tiny", "suite=demo", "suite.perplexity.sets=[{documents}]"]
sys.argv += ["suite.tasks=[]", "output={tmp_path}/eval", "device=cpu"]
eval.main()
"""
    environment = os.environ | hub.environment(tmp_path / "home")
    done = subprocess.run([sys.executable, "-c", work], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    assert TOKEN not in done.stdout + done.stderr
    ids = tokenizer("the state", return_tensors="pt").input_ids
    with torch.no_grad():
        assert torch.load(tmp_path / "logits.pt").equal(small_model.eval()(ids).logits)
    assert json.loads((tmp_path / "eval/results.json").read_text())["checkpoint"] == "user/tiny"
