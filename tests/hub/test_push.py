"""Push with the real client to a small server that speaks the Hub's API, and load from it."""

import json
import os
import shutil
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import datasets
import huggingface_hub
import pytest
import torch
import yaml

from fla_train.cli import export as export_command
from fla_train.data.config import TokenizerConfig
from fla_train.data.tokenizers import load_tokenizer
from fla_train.eval.sets import HubSet, hub_documents
from fla_train.hub.card import CardInfo
from fla_train.hub.export import export_model
from fla_train.hub.load import load_model
from fla_train.hub.push import check_access, push
from fla_train.utils.errors import Interrupted
from tests.fake_hub import TOKEN, FakeHub, running_hub
from tests.hub.conftest import contents


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    constants = huggingface_hub.constants
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "no-token"))
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    monkeypatch.delenv("HUGGING_FACE_HUB_TOKEN", raising=False)
    monkeypatch.setattr(time, "sleep", lambda seconds: None)  # between the client's attempts
    huggingface_hub.close_session()
    with running_hub() as server:
        monkeypatch.setattr(constants, "ENDPOINT", server.address)
        files = server.address + "/{repo_id}/resolve/{revision}/{filename}"
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", files)
        yield server
    huggingface_hub.close_session()


def without_card(files: dict[str, bytes]) -> dict[str, bytes]:
    return {name: content for name, content in files.items() if name != "README.md"}


def test_every_file_arrives_in_one_commit(hub, export, monkeypatch):
    expected = contents(export)
    (export / ".cache").mkdir()
    for hidden in (".env", ".cache/token"):
        (export / hidden).write_text("secret")
    monkeypatch.chdir(export)
    address = push(".", "tiny")  # the user of the token owns it
    repo = hub.repos["user/tiny"]
    assert repo.messages == ["Upload export with fla-train"] and repo.private
    assert address == f"{hub.address}/user/tiny/commit/{1:040x}"
    assert without_card(repo.files()) == without_card(expected)
    assert len(hub.lfs) == 1  # only the weights
    changed = {*repo.files()["README.md"].decode().splitlines()} - {
        *expected["README.md"].decode().splitlines()
    }
    assert [line.split("  #")[0] for line in changed] == ['checkpoint = "user/tiny"']
    push(export, "user/tiny")  # nothing has changed
    assert len(repo.commits) == 2


def test_a_model_of_the_hub_is_pushed_in_another_format(hub, export, tmp_path, monkeypatch):
    push(export, "user/tiny")
    command = ["checkpoint=user/tiny", "format=fla", "hub.repo_id=user/tiny-fla"]
    monkeypatch.setattr(sys, "argv", ["fla-export", *command])
    monkeypatch.chdir(tmp_path)
    export_command.main()
    assert json.loads(hub.repos["user/tiny-fla"].files()["config.json"])["model_type"].startswith(
        "gated_delta"
    )


def test_branches_and_tags(hub: FakeHub, export: Path) -> None:
    push(export, "user/tiny", private=False, revision="dev", tag="v1")
    repo = hub.repos["user/tiny"]
    assert not repo.private and repo.branches == {"main": 0, "dev": 1} and repo.tags == {"v1": 1}
    push(export, "user/tiny", revision="dev", tag="v1")
    assert len(repo.commits) == 2 and repo.tags == {"v1": 1}
    assert push(export, "user/tiny", tag="v1") == f"{hub.address}/user/tiny/tree/v1"  # to main: the tag moves
    assert without_card(repo.files("v1")) == without_card(contents(export)) and repo.tags == {"v1": 2}


def test_files_of_an_earlier_export_are_deleted(hub: FakeHub, small_model, tokenizer, tmp_path: Path) -> None:
    """Old weights, a chat template and Python files would change what is loaded. The user's files stay."""
    tokenizer.chat_template = {"default": "{{ messages }}", "tool_use": "{{ tools }}"}
    first = export_model(small_model, tokenizer, tmp_path / "first")
    (first / "model.safetensors").rename(first / "model-00001-of-00001.safetensors")
    (first / "checksums.json").unlink()
    push(first, "user/tiny")
    repo = hub.repos["user/tiny"]
    assert repo.files()["additional_chat_templates/tool_use.jinja"] == b"{{ tools }}"
    others = {".gitattributes": b"*.png filter=lfs", "notes.json": b"{}", "extra.jinja": b"{{ messages }}"}
    others["adapters/mine.safetensors"] = b"weights"
    repo.commits[-1].update(others)
    tokenizer.chat_template = None
    second = export_model(small_model, tokenizer, tmp_path / "second", format="fla")
    push(second, "user/tiny")
    assert without_card(repo.files()) == without_card(contents(second)) | others


def test_licence_language_and_results_reach_the_card(hub, small_model, tokenizer, tmp_path):
    info = CardInfo(losses={"validation": 2.0}, datasets=["user/model"], init_from="superuser/model-340m")
    export = export_model(small_model, tokenizer, tmp_path / "run/hf/step-0000007", info)
    for name, step, value in (("old", 6, 0.1), ("new", 7, 0.25)):
        (tmp_path / "run/eval" / name).mkdir(parents=True)
        metrics = {"eval/hellaswag/acc_norm": value, "eval/web/perplexity_64": float("inf")}
        record = {"checkpoint": f"/home/me/run/hf/step-{step:07d}", "metrics": metrics}
        (tmp_path / "run/eval" / name / "results.json").write_text(json.dumps(record))
    os.utime(export, (time.time() + 60,) * 2)  # as after an edit of the card
    push(export, "user/tiny", license="apache-2.0", language="en")
    card = hub.repos["user/tiny"].files()["README.md"].decode()
    header = yaml.safe_load(card.split("---")[1])
    assert (header["license"], header["language"]) == ("apache-2.0", "en")
    assert (header["datasets"], header["base_model"]) == (["user/model"], "superuser/model-340m")
    results = [r["metrics"][0] for r in header["model-index"][0]["results"]]
    assert {r["type"]: r["value"] for r in results} == {"validation loss": 2.0, "acc_norm": 0.25}
    assert "| hellaswag | acc_norm | 0.2500 |" in card and "/home" not in card
    assert (export / "README.md").read_text() != card  # the export is only read


@pytest.mark.parametrize(
    ("request_", "status"),
    [("repos/create", 503), ("PUT /lfs", 403), ("commit/main", 403), ("POST .*/tag/", 504)],
)
def test_a_failed_push_is_a_line_and_can_be_repeated(hub, export, request_, status):
    """Without the token and the signatures of upload addresses."""
    hub.faults[request_] = status
    before = contents(export)
    with pytest.raises(ConnectionError) as failure:
        push(export, "user/tiny", tag="v1")
    message = str(failure.value)
    assert "\n" not in message and f"safe in {export}" in message and contents(export) == before
    assert f"`fla-export checkpoint={export} hub.repo_id=user/tiny`" in message
    assert TOKEN not in message and "Signature" not in message
    push(export, "user/tiny", tag="v1")
    repo = hub.repos["user/tiny"]
    assert without_card(repo.files("v1")) == without_card(before) and repo.commits[1:] == [repo.files("v1")]


def test_wrong_requests(hub: FakeHub, export: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("user/tiny/too/long", "../tiny", "user/ti ny"):
        with pytest.raises(ValueError, match="user/model"):
            push(export, name)
    monkeypatch.delenv("HF_TOKEN")
    for call in (lambda: push(export, "user/tiny"), lambda: check_access("user/tiny")):
        with pytest.raises(ValueError, match="hf auth login"):
            call()
    assert hub.repos == {}


def test_access_is_known_before_training(hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    check_access("user/tiny", private=False)
    assert not hub.repos["user/tiny"].private
    hub.faults["repos/create"] = 503
    with pytest.raises(ConnectionError):  # may pass
        check_access("user/tiny")
    monkeypatch.setenv("HF_TOKEN", "hf_wrong")
    with pytest.raises(ValueError, match="the Hub rejects") as failure:
        check_access("user/tiny")
    assert "hf_wrong" not in str(failure.value) and "\n" not in str(failure.value)


def test_round_trip(hub, export, run_command):
    """From `fla-export` to the Hub and back by name: weights, tokenizer and training record."""
    code, out, err = run_command("fla-export", f"checkpoint={export}", "hub.repo_id=user/tiny", "hub.tag=v1")
    assert code == 0 and f"pushed {export} to {hub.address}" in out and TOKEN not in out + err
    local, remote = load_model(export), load_model("user/tiny")
    shutil.rmtree(export)
    ids = local[1]("the state", return_tensors="pt").input_ids
    with torch.no_grad():
        assert remote[0](ids).logits.equal(local[0](ids).logits)
    assert remote[1]("the state").input_ids == ids[0].tolist()


def test_without_the_hub_the_cache_is_read_at_once(hub, export, monkeypatch):
    push(export, "user/tiny")
    load_model("user/tiny")
    hub.shutdown()
    hub.server_close()
    huggingface_hub.close_session()  # and with it the open connection
    pauses = []  # between the client's attempts
    monkeypatch.setattr(time, "sleep", pauses.append)
    load_model("user/tiny")
    for load in (load_model, lambda name: load_tokenizer(TokenizerConfig(name))):
        with pytest.raises(Interrupted, match="user/other"):
            load("user/other")
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(datasets.config, "HF_ENDPOINT", hub.address)
    with pytest.raises(ValueError, match="user/texts"):
        next(hub_documents(HubSet("", "user/texts", None, "train", str), None, None))
    assert not pauses and not huggingface_hub.constants.HF_HUB_OFFLINE
