"""A small server that speaks the Hub's HTTP API: repositories, LFS uploads, commits, tags, downloads, faults.

It has no xet storage. Tests, and the processes that they start, reach it by `HF_ENDPOINT` and `environment`.
"""

import base64
import hashlib
import json
import re
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

TOKEN = "hf_SecretOfThisTest"


@dataclass
class Repo:
    """Commits are {path: content}; branches and tags are numbers of commits."""

    private: bool
    commits: list[dict[str, bytes]] = field(default_factory=lambda: [{}])
    branches: dict[str, int] = field(default_factory=lambda: {"main": 0})
    tags: dict[str, int] = field(default_factory=dict)
    messages: list[str] = field(default_factory=list)

    def files(self, revision: str = "main") -> dict[str, bytes]:
        return self.commits[self.number(revision)]

    def number(self, revision: str) -> int:
        refs = self.branches | self.tags
        return refs[revision] if revision in refs else int(revision, 16)


class FakeHub(ThreadingHTTPServer):
    """Listens on loopback while it lives.

    Attributes:
        faults: pattern of "METHOD path" -> status, for the next request that matches.
        cut: name of a file; each answer with its content ends in the middle.
        was_cut: is released for each of these answers.
        sent: names of the files whose content was sent.
    """

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.address = f"http://127.0.0.1:{self.server_port}"
        self.repos: dict[str, Repo] = {}
        self.lfs: dict[str, bytes] = {}
        self.faults: dict[str, int] = {}
        self.cut, self.was_cut, self.sent = "", threading.Semaphore(0), []

    def environment(self, home: Path) -> dict[str, str]:
        """Return what a process needs to reach this Hub and nothing else."""
        variables = {"HF_ENDPOINT": self.address, "HF_HOME": str(home), "HF_HUB_OFFLINE": "0"}
        return variables | {"HF_TOKEN": TOKEN, "HF_HUB_DISABLE_XET": "1"}


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
    disable_nagle_algorithm = True  # A body would wait 40 ms until the client has acknowledged its headers.

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        path = unquote(urlsplit(self.path).path)
        request, hub = f"{self.command} {path}", self.server
        if fault := next((pattern for pattern in hub.faults if re.search(pattern, request)), None):
            # An indiscreet server quotes the token.
            return self._reply({"error": self.headers.get("Authorization")}, hub.faults.pop(fault))
        if path.startswith("/lfs/"):  # presigned addresses need no token
            hub.lfs[hashlib.sha256(body).hexdigest()] = body
            return self._reply({})
        if self.headers.get("Authorization") != f"Bearer {TOKEN}":
            return self._reply({"error": self.headers.get("Authorization")}, 401)
        for pattern, method in ROUTES.items():
            if match := re.fullmatch(pattern, request):
                names = match.groupdict()
                if "repo" not in names:
                    return method(self, body)
                if (repo := hub.repos.get(names["repo"])) is None:
                    return self._error("RepoNotFound")
                try:
                    repo.files(names.get("revision") or "main")
                except (ValueError, IndexError):
                    return self._error("RevisionNotFound")
                return method(self, body, **names)
        self._error("EntryNotFound")

    do_GET = do_HEAD = do_PUT = do_DELETE = do_POST

    def _create(self, body: bytes) -> None:
        request = json.loads(body)
        name = f"{request.get('organization') or 'user'}/{request['name']}"
        known = name in self.server.repos
        self.server.repos.setdefault(name, Repo(request.get("visibility") == "private"))
        self._reply({"url": f"{self.server.address}/{name}", "id": name}, 409 if known else 200)

    def _validate(self, body: bytes) -> None:
        self._reply({"errors": [], "warnings": []})

    def _preupload(self, body: bytes, repo: str, revision: str) -> None:
        known = self.server.repos[repo].files(revision)
        names = [file["path"] for file in json.loads(body)["files"]]
        keys = {"shouldIgnore": False}
        files = [{"path": n, "uploadMode": _mode(n), "oid": _oid(known, n), **keys} for n in names]
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
        known.branches[revision] = number = len(known.commits) - 1
        address = f"{self.server.address}/{repo}/commit/{number:040x}"
        self._reply({"commitUrl": address, "commitOid": f"{number:040x}"})

    def _branch(self, body: bytes, repo: str, name: str) -> None:
        branches = self.server.repos[repo].branches
        known = name in branches
        branches.setdefault(name, branches["main"])
        self._reply({}, 409 if known else 200)

    def _tag(self, body: bytes, repo: str, revision: str) -> None:
        known, tag = self.server.repos[repo], json.loads(body)["tag"]
        status = 409 if tag in known.tags else 200
        known.tags.setdefault(tag, known.number(revision))
        self._reply({}, status)

    def _delete_tag(self, body: bytes, repo: str, tag: str) -> None:
        if self.server.repos[repo].tags.pop(tag, None) is None:
            return self._error("RevisionNotFound")
        self._reply({})

    def _tree(self, body: bytes, repo: str, revision: str) -> None:
        files = self.server.repos[repo].files(revision)
        self._reply(
            [{"type": "file", "path": n, "size": len(files[n]), "oid": _oid(files, n)} for n in files]
        )

    def _info(self, body: bytes, repo: str, revision: str = "main") -> None:
        known = self.server.repos[repo]
        siblings = [{"rfilename": name} for name in known.files(revision)]
        about = {"id": repo, "private": known.private, "gated": False, "tags": []}
        self._reply({**about, "sha": f"{known.number(revision):040x}", "siblings": siblings})

    def _resolve(self, body: bytes, repo: str, revision: str, name: str) -> None:
        known = self.server.repos[repo]
        files = known.files(revision)
        if name not in files:
            return self._error("EntryNotFound")
        headers = {"ETag": f'"{_oid(files, name)}"', "X-Repo-Commit": f"{known.number(revision):040x}"}
        status, first, last = 200, 0, len(files[name]) - 1
        if asked := re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", "")):
            status, first, last = 206, int(asked[1]), min(int(asked[2] or last), last)
            headers["Content-Range"] = f"bytes {first}-{last}/{len(files[name])}"
        if self.command == "GET":
            self.server.sent.append(name)
        self._reply(files[name][first : last + 1], status, headers, cut=name == self.server.cut)

    def _error(self, code: str) -> None:
        self._reply({"error": code}, 404, {"X-Error-Code": code})

    def _reply(
        self, content: Any, status: int = 200, headers: dict[str, str] | None = None, cut: bool = False
    ) -> None:
        body = content if isinstance(content, bytes) else json.dumps(content).encode()
        self.send_response(status)
        media = "application/octet-stream" if isinstance(content, bytes) else "application/json"
        all_headers = {"Content-Type": media, "Content-Length": str(len(body)), **(headers or {})}
        for name, value in all_headers.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "HEAD":
            return
        self.wfile.write(body[: len(body) // 2] if cut else body)
        if cut:
            self.wfile.flush()
            self.connection.shutdown(socket.SHUT_RDWR)
            self.close_connection = True
            self.server.was_cut.release()

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
    rf"GET /api/(models|datasets)/{REPO}/tree/{REVISION}": Handler._tree,
    rf"GET /api/(models|datasets)/{REPO}/revision/{REVISION}": Handler._info,
    rf"GET /api/(models|datasets)/{REPO}": Handler._info,
    rf"(GET|HEAD) (/datasets)?/{REPO}/resolve/{REVISION}/(?P<name>.+)": Handler._resolve,
}


def _mode(name: str) -> str:
    return "lfs" if name.endswith((".safetensors", ".png")) else "regular"


def _oid(files: dict[str, bytes], name: str) -> str | None:
    """Return the sha256 of an LFS file, and git's sha1 of any other."""
    if name not in files:
        return None
    if _mode(name) == "lfs":
        return hashlib.sha256(files[name]).hexdigest()
    return hashlib.sha1(b"blob %d\0" % len(files[name]) + files[name]).hexdigest()
