"""Pushing through the real client to a small server that speaks the Hub's protocol."""

import base64
import hashlib
import json
import re
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import huggingface_hub
import pytest

from fla_train.hub import export_model, push

TOKEN = "hf_test"


class FakeHub(ThreadingHTTPServer):
    """Repositories as dicts {path: bytes}; weights arrive by LFS, everything else inside the commit."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.address = f"http://127.0.0.1:{self.server_port}"
        self.repos: dict[str, dict] = {}
        self.lfs: dict[str, bytes] = {}


class Handler(BaseHTTPRequestHandler):
    server: FakeHub

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        path = self.path.split("?")[0]
        if self.headers.get("Authorization") != f"Bearer {TOKEN}":
            self._reply({"error": "Invalid credentials"}, 401)
        elif path == "/api/repos/create":
            request = json.loads(body)
            name = f"{request.get('organization') or 'user'}/{request['name']}"
            known = name in self.server.repos
            self.server.repos.setdefault(
                name, {"private": request.get("visibility") == "private", "main": {}}
            )
            self._reply({"url": f"{self.server.address}/{name}", "id": name}, 409 if known else 200)
        elif path == "/api/validate-yaml":
            self._reply({"errors": [], "warnings": []})
        elif match := re.fullmatch(r"/api/models/(.+)/branch/(.+)", path):
            self.server.repos[match[1]].setdefault(match[2], {})
            self._reply({})
        elif match := re.fullmatch(r"/api/models/(.+)/preupload/(.+)", path):
            mode = {True: "lfs", False: "regular"}
            names = [f["path"] for f in json.loads(body)["files"]]
            files = [
                {"path": n, "uploadMode": mode[n.endswith(".safetensors")], "shouldIgnore": False}
                for n in names
            ]
            self._reply({"files": files})
        elif path.endswith(".git/info/lfs/objects/batch"):
            actions = {"upload": {"href": f"{self.server.address}/lfs"}}
            objects = [
                {**o, "actions": {"upload": {"href": f"{actions['upload']['href']}/{o['oid']}"}}}
                for o in json.loads(body)["objects"]
            ]
            self._reply({"transfer": "basic", "objects": objects})
        elif match := re.fullmatch(r"/api/models/(.+)/commit/(.+)", path):
            self._commit(self.server.repos[match[1]][match[2]], body)
            self._reply({"commitUrl": f"{self.server.address}/{match[1]}/commit/1", "commitOid": "1" * 40})
        else:
            self._reply({"error": f"unknown {path}"}, 404)

    def do_PUT(self) -> None:
        content = self.rfile.read(int(self.headers["Content-Length"]))
        self.server.lfs[hashlib.sha256(content).hexdigest()] = content
        self._reply({})

    def do_GET(self) -> None:
        self._reply({"error": f"unknown {self.path}"}, 404)

    def _commit(self, files: dict[str, bytes], body: bytes) -> None:
        for entry in map(json.loads, body.splitlines()):
            value = entry["value"]
            if entry["key"] == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif entry["key"] == "lfsFile":
                files[value["path"]] = self.server.lfs[value["oid"]]

    def _reply(self, content: dict, status: int = 200) -> None:
        body = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *args: object) -> None:
        pass


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_DISABLE_XET", True)  # the server speaks LFS
    for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(huggingface_hub.constants, "HF_TOKEN_PATH", "/nonexistent")
    huggingface_hub.close_session()
    server = FakeHub()
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield server
    server.shutdown()
    server.server_close()
    huggingface_hub.close_session()


@pytest.fixture
def folder(small_model, tokenizer, tmp_path: Path) -> Path:
    return export_model(small_model, tokenizer, tmp_path / "export", validate=False)


def contents(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in folder.iterdir()}


def test_every_file_arrives(hub: FakeHub, folder: Path) -> None:
    address = push(folder, "user/tiny", token=TOKEN, endpoint=hub.address)
    assert address == f"{hub.address}/user/tiny/commit/1"
    assert hub.repos["user/tiny"] == {"private": True, "main": contents(folder)}
    assert len(hub.lfs) == 1  # the weights, and only they
    push(folder, "user/tiny", token=TOKEN, endpoint=hub.address)  # once more into the same repository


def test_to_a_new_branch(hub: FakeHub, folder: Path) -> None:
    push(folder, "user/tiny", private=False, revision="step-7", token=TOKEN, endpoint=hub.address)
    assert hub.repos["user/tiny"]["step-7"] == contents(folder)
    assert hub.repos["user/tiny"]["main"] == {} and hub.repos["user/tiny"]["private"] is False


def test_a_name_without_user_is_the_users_own(hub: FakeHub, folder: Path) -> None:
    push(folder, "tiny", token=TOKEN, endpoint=hub.address)
    assert hub.repos["user/tiny"]["main"] == contents(folder)


def test_no_token(hub: FakeHub, folder: Path) -> None:
    with pytest.raises(ValueError, match="no Hub token: run `hf auth login`"):
        push(folder, "user/tiny", endpoint=hub.address)
    assert hub.repos == {}


def test_not_a_name(hub: FakeHub, folder: Path) -> None:
    with pytest.raises(ValueError, match="not a name of the form user/model"):
        push(folder, "user/tiny/too/long", token=TOKEN, endpoint=hub.address)


def failure_line(folder: Path, **arguments: str) -> str:
    before = contents(folder)
    with pytest.raises(ConnectionError) as failure:
        push(folder, "user/tiny", **arguments)
    assert contents(folder) == before
    message = str(failure.value)
    assert "\n" not in message and f"safe in {folder}" in message
    return message


def test_wrong_token(hub: FakeHub, folder: Path) -> None:
    assert "refused" in failure_line(folder, token="hf_wrong", endpoint=hub.address)


def test_no_network(hub: FakeHub, folder: Path) -> None:
    hub.shutdown()
    hub.server_close()
    line = failure_line(folder, token=TOKEN, endpoint=hub.address)
    assert "cannot reach the Hub" in line
    assert f"`fla-export checkpoint={folder} hub.repo_id=user/tiny`" in line


def test_offline_by_setting(hub: FakeHub, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    huggingface_hub.close_session()
    assert "cannot reach the Hub" in failure_line(folder, token=TOKEN, endpoint=hub.address)
