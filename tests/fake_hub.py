"""A small server that speaks the Hub's HTTP API: repositories, LFS uploads, commits, tags, downloads, faults.

It has no xet storage. Tests, and the processes that they start, reach it by `HF_ENDPOINT` and `environment`.
"""

import base64
import hashlib
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

TOKEN = "hf_SecretOfThisTest"
DROP = 0  # as a fault's status: the connection ends without an answer


@dataclass
class Repo:
    """Commits are {path: content}; branches and tags are numbers of commits.

    Attributes:
        messages, parents: of the commits but the first, which is empty.
    """

    private: bool
    commits: list[dict[str, bytes]] = field(default_factory=lambda: [{}])
    branches: dict[str, int] = field(default_factory=lambda: {"main": 0})
    tags: dict[str, int] = field(default_factory=dict)
    messages: list[str] = field(default_factory=list)
    parents: list[int] = field(default_factory=list)

    def files(self, revision: str = "main") -> dict[str, bytes]:
        return self.commits[self.number(revision)]

    def number(self, revision: str) -> int:
        refs = self.branches | self.tags
        return refs[revision] if revision in refs else int(revision, 16)


class FakeHub(ThreadingHTTPServer):
    """Listens on loopback while it lives.

    Attributes:
        faults: (pattern of "METHOD path", status, headers), each for one request, in any order.
        requests: "METHOD path" of every request so far.
    """

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.address = f"http://127.0.0.1:{self.server_port}"
        self.repos: dict[str, Repo] = {}
        self.lfs: dict[str, bytes] = {}
        self.faults: list[tuple[str, int, dict[str, str]]] = []
        self.requests: list[str] = []

    def environment(self, home: Path) -> dict[str, str]:
        """What a process needs to reach this Hub and nothing else."""
        place = {"HF_ENDPOINT": self.address, "HF_HOME": str(home), "HF_HUB_OFFLINE": "0"}
        return place | {"HF_TOKEN": TOKEN}

    def fail(self, pattern: str, status: int, times: int = 1, **headers: str) -> None:
        self.faults += [(pattern, status, headers)] * times


@contextmanager
def running_hub() -> Iterator[FakeHub]:
    hub = FakeHub()
    threading.Thread(target=hub.serve_forever, args=(0.05,), daemon=True).start()
    try:
        yield hub
    finally:
        hub.shutdown()
        hub.server_close()


class Handler(BaseHTTPRequestHandler):
    server: FakeHub
    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        self._answer()

    do_GET = do_HEAD = do_PUT = do_DELETE = do_POST

    def _answer(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        path = unquote(urlsplit(self.path).path)
        request = f"{self.command} {path}"
        self.server.requests.append(request)
        for fault in self.server.faults:
            if re.search(fault[0], request):
                self.server.faults.remove(fault)
                return self._fail(*fault[1:])
        if path.startswith("/lfs/"):  # like presigned addresses: without the token
            self.server.lfs[hashlib.sha256(body).hexdigest()] = body
            return self._reply({})
        if self.headers.get("Authorization") != f"Bearer {TOKEN}":
            return self._fail(401, {})
        for pattern, method in ROUTES.items():
            if match := re.fullmatch(pattern, request):
                if "repo" in match.groupdict() and match["repo"] not in self.server.repos:
                    return self._error(404, "RepoNotFound")
                return method(self, body, **match.groupdict())
        self._error(404, "EntryNotFound")

    def _create(self, body: bytes) -> None:
        request = json.loads(body)
        name = f"{request.get('organization') or 'user'}/{request['name']}"
        known = name in self.server.repos
        self.server.repos.setdefault(name, Repo(request.get("visibility") == "private"))
        self._reply({"url": f"{self.server.address}/{name}", "id": name}, 409 if known else 200)

    def _validate(self, body: bytes) -> None:
        self._reply({"errors": [], "warnings": []})

    def _preupload(self, body: bytes, repo: str, revision: str) -> None:
        there = self._files(repo, revision)
        if there is not None:
            files = [
                {"path": name, "uploadMode": _mode(name), "shouldIgnore": False, "oid": _oid(there, name)}
                for name in (file["path"] for file in json.loads(body)["files"])
            ]
            self._reply({"files": files})

    def _batch(self, body: bytes, repo: str) -> None:
        objects = []
        for entry in json.loads(body)["objects"]:
            href = f"{self.server.address}/lfs/{entry['oid']}?X-Amz-Signature=of-{entry['oid'][:8]}"
            actions = {} if entry["oid"] in self.server.lfs else {"actions": {"upload": {"href": href}}}
            objects.append({**entry, **actions})
        self._reply({"transfer": "basic", "objects": objects})

    def _commit(self, body: bytes, repo: str, revision: str) -> None:
        known = self.server.repos[repo]
        files = dict(known.files(revision))
        for entry in map(json.loads, body.splitlines()):
            value = entry["value"]
            if entry["key"] == "header":
                known.messages.append(value["summary"])
            elif entry["key"] == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif entry["key"] == "lfsFile":
                files[value["path"]] = self.server.lfs[value["oid"]]
            elif entry["key"] == "deletedFile":
                del files[value["path"]]
        known.commits.append(files)
        known.parents.append(known.number(revision))
        known.branches[revision] = number = len(known.commits) - 1
        address = f"{self.server.address}/{repo}/commit/{number:040x}"
        self._reply({"commitUrl": address, "commitOid": f"{number:040x}"})

    def _branch(self, body: bytes, repo: str, name: str) -> None:
        known = self.server.repos[repo]
        if name in known.branches:
            return self._error(409, "Conflict")
        known.branches[name] = known.branches["main"]
        self._reply({})

    def _tag(self, body: bytes, repo: str, revision: str) -> None:
        known, tag = self.server.repos[repo], json.loads(body)["tag"]
        if tag in known.tags:
            return self._error(409, "Conflict")
        known.tags[tag] = known.number(revision)
        self._reply({})

    def _delete_tag(self, body: bytes, repo: str, tag: str) -> None:
        del self.server.repos[repo].tags[tag]
        self._reply({})

    def _tree(self, body: bytes, repo: str, revision: str) -> None:
        files = self._files(repo, revision)
        if files is not None:
            self._reply([_describe(files, name) for name in files])

    def _commits(self, body: bytes, repo: str, revision: str) -> None:
        if self._files(repo, revision) is None:
            return
        known = self.server.repos[repo]
        numbers = [known.number(revision)]
        while numbers[-1]:
            numbers.append(known.parents[numbers[-1] - 1])
        empty = {"authors": [], "date": "2026-01-01T00:00:00.000Z", "title": "", "message": ""}
        self._reply([{"id": f"{number:040x}", **empty} for number in numbers])

    def _info(self, body: bytes, repo: str, revision: str = "main") -> None:
        files = self._files(repo, revision)
        if files is not None:
            number = self.server.repos[repo].number(revision)
            siblings = [{"rfilename": name} for name in files]
            self._reply({"id": repo, "sha": f"{number:040x}", "siblings": siblings, "tags": []})

    def _resolve(self, body: bytes, repo: str, revision: str, name: str) -> None:
        files = self._files(repo, revision)
        if files is None:
            return
        if name not in files:
            return self._error(404, "EntryNotFound")
        number = self.server.repos[repo].number(revision)
        headers = {"ETag": f'"{_oid(files, name)}"', "X-Repo-Commit": f"{number:040x}"}
        self._reply(files[name], headers=headers)

    def _files(self, repo: str, revision: str) -> dict[str, bytes] | None:
        try:
            return self.server.repos[repo].files(revision)
        except (ValueError, IndexError):
            self._error(404, "RevisionNotFound")
            return None

    def _error(self, status: int, code: str) -> None:
        self._reply({"error": code}, status, {"X-Error-Code": code})

    def _fail(self, status: int, headers: dict[str, str]) -> None:
        if status == DROP:
            self.close_connection = True
            self.connection.close()
            return
        said = {"error": f"{status} for {self.headers.get('Authorization')}"}  # an indiscreet server
        self._reply(said, status, {name.replace("_", "-"): value for name, value in headers.items()})

    def _reply(self, content: Any, status: int = 200, headers: dict[str, str] | None = None) -> None:
        body = content if isinstance(content, bytes) else json.dumps(content).encode()
        self.send_response(status)
        kind = "application/octet-stream" if isinstance(content, bytes) else "application/json"
        given = {"Content-Type": kind, "Content-Length": str(len(body)), **(headers or {})}
        for name, value in given.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, *args: object) -> None:
        pass


REPO = r"(?P<repo>[^/]+/[^/]+)"
REVISION = r"(?P<revision>[^/]+)"
ROUTES = {
    "POST /api/repos/create": Handler._create,
    "POST /api/validate-yaml": Handler._validate,
    rf"POST /api/models/{REPO}/preupload/{REVISION}": Handler._preupload,
    rf"POST /{REPO}\.git/info/lfs/objects/batch": Handler._batch,
    rf"POST /api/models/{REPO}/commit/{REVISION}": Handler._commit,
    rf"POST /api/models/{REPO}/branch/(?P<name>.+)": Handler._branch,
    rf"POST /api/models/{REPO}/tag/{REVISION}": Handler._tag,
    rf"DELETE /api/models/{REPO}/tag/(?P<tag>.+)": Handler._delete_tag,
    rf"GET /api/models/{REPO}/tree/{REVISION}": Handler._tree,
    rf"GET /api/models/{REPO}/commits/{REVISION}": Handler._commits,
    rf"GET /api/models/{REPO}/revision/{REVISION}": Handler._info,
    rf"GET /api/models/{REPO}": Handler._info,
    rf"(GET|HEAD) /{REPO}/resolve/{REVISION}/(?P<name>.+)": Handler._resolve,
}


def _mode(name: str) -> str:
    return "lfs" if name.endswith((".safetensors", ".png")) else "regular"


def _oid(files: dict[str, bytes], name: str) -> str | None:
    """The sha256 of an LFS file, git's sha1 of another."""
    if name not in files:
        return None
    if _mode(name) == "lfs":
        return hashlib.sha256(files[name]).hexdigest()
    return hashlib.sha1(b"blob %d\0" % len(files[name]) + files[name]).hexdigest()


def _describe(files: dict[str, bytes], name: str) -> dict:
    size, oid = len(files[name]), _oid(files, name)
    lfs = {"lfs": {"oid": oid, "size": size, "pointerSize": 130}} if _mode(name) == "lfs" else {}
    return {"type": "file", "path": name, "size": size, "oid": oid, **lfs}
