"""`fla-prepare` from a Hub behind a connection that breaks: a small server that answers as the Hub does.

The tokens must be those of the same files read from disk, though the dataset is replaced meanwhile.
"""

import hashlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

from fla_train.data.cache import open_prepared
from fla_train.data.config import DataConfig, TokenizerConfig
from tests.data.conftest import quiet, write_parquet
from tests.data.test_prepare import read

NAME, COMMIT, LATER = "someone/texts", "a" * 40, "c" * 40
PREPARE = "import gc; gc.disable(); from fla_train.cli.prepare import main; main()"
# Runs of one dataset, one after another.
STREAM = """
import json, sys
import numpy as np
from fla_train.data.config import DataConfig, TokenizerConfig
from fla_train.data.open_dataset import open_train
from fla_train.data.prepare import prepare

def run(name, cache, pinned, reads):
    config = DataConfig(
        source="hub", path=name, cache_dir=cache, tokenizer=TokenizerConfig(name="bytes"), num_workers=0,
        validation_fraction=0.0, stream=True, stream_head_documents=20, shard_bytes=100_000,
    )
    try:
        data = prepare(config, log=lambda line: None, progress=False, commits=pinned)
        stream = open_train(data.folder, 16, 0)
        tokens = [stream.sequences(np.array([index]))[0] for index in reads]
        return {"commits": data.commits(), "texts": [data.tokenizer().decode(row) for row in tokens]}
    except ValueError as error:
        return {"error": str(error)}

print(json.dumps([run(*asked) for asked in json.loads(sys.argv[1])]))
"""
DOCUMENTS = [
    {"id": str(i), "text": f"document {i}: " + "the state forgets what its gate closes on " * 120}
    for i in range(1200)
]


class Hub(ThreadingHTTPServer):
    """One dataset repository. While `cut` names a file, each answer of it ends in the middle.

    Args:
        commits: the files of each; the main branch is `head`, at first the first one.
    """

    def __init__(self, commits: dict[str, Path]):
        super().__init__(("127.0.0.1", 0), Answer)
        self.commits, self.head, self.cut = commits, next(iter(commits)), ""
        self.was_cut, self.sent = threading.Semaphore(0), []

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class Answer(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Hub

    def log_message(self, *_: object) -> None:
        pass

    def do_GET(self) -> None:
        path = unquote(urlsplit(self.path).path)
        asked = re.search("/(?:resolve|revision|tree)/([^/]+)", path)
        commit = asked[1] if asked and asked[1] != "main" else self.server.head
        folder = self.server.commits[commit]
        entries = [
            {"type": "file", "path": file.name, "size": file.stat().st_size, "oid": "b" * 40}
            for file in sorted(folder.iterdir())
        ]
        if found := re.fullmatch(rf"/datasets/{NAME}/resolve/[^/]+/(.*)", path):
            self.send_file(folder / found[1], commit)
        elif re.fullmatch(rf"/api/datasets/{NAME}(/revision/.*)?", path):
            about = {"id": NAME, "sha": commit, "private": False, "gated": False, "tags": []}
            self.send(200, about | {"siblings": [{"rfilename": entry["path"]} for entry in entries]}, {})
        elif found := re.fullmatch(rf"/api/datasets/{NAME}/tree/[^/]+/?(.*)", path):
            self.send(200, [entry for entry in entries if entry["path"].startswith(found[1])], {})
        else:
            missing = "EntryNotFound" if path.startswith(f"/datasets/{NAME}/") else "RepoNotFound"
            self.send(404, {}, {"X-Error-Code": missing})

    do_HEAD = do_GET

    def send_file(self, file: Path, commit: str) -> None:
        if not file.is_file():
            return self.send(404, {}, {"X-Error-Code": "EntryNotFound"})
        content = file.read_bytes()
        about = {"ETag": f'"{hashlib.sha256(content).hexdigest()}"', "X-Repo-Commit": commit}
        code, first, last = 200, 0, len(content) - 1
        if asked := re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", "")):
            code, first, last = 206, int(asked[1]), min(int(asked[2] or last), last)
            about["Content-Range"] = f"bytes {first}-{last}/{len(content)}"
        if self.command == "GET":
            self.server.sent.append(file.name)
        self.send(code, content[first : last + 1], about, cut=file.name == self.server.cut)

    def send(self, code: int, content: object, about: dict[str, str], cut: bool = False) -> None:
        body = content if isinstance(content, bytes) else json.dumps(content).encode()
        self.send_response(code)
        for name, value in about.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command == "HEAD":
            return
        self.wfile.write(body[: len(body) // 2] if cut else body)
        if cut:
            self.wfile.flush()
            self.connection.shutdown(socket.SHUT_RDWR)
            self.close_connection = True
            self.server.was_cut.release()


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[Hub]:
    later = [document | {"text": document["text"].upper()} for document in DOCUMENTS]
    commits = {COMMIT: tmp_path / "files", LATER: tmp_path / "later"}
    for folder, documents in zip(commits.values(), (DOCUMENTS, later), strict=True):
        for number in range(2):
            rows = documents[600 * number : 600 * (number + 1)]
            write_parquet(folder / f"train-0000{number}-of-00002.parquet", rows, row_group_size=100)
    with Hub(commits) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server
        server.shutdown()


@pytest.fixture
def environment(hub: Hub, tmp_path: Path) -> dict[str, str]:
    """Of a process that may ask `hub`."""
    allowed = {name: value for name, value in os.environ.items() if name != "HF_HUB_OFFLINE"}
    return allowed | {"HF_ENDPOINT": hub.address, "HF_HOME": str(tmp_path / "home"), "PYTHONUNBUFFERED": "1"}


@pytest.mark.slow
def test_a_stream_from_the_hub_outlives_broken_connections_and_a_kill(
    hub: Hub, environment: dict[str, str], tmp_path: Path
):
    names = [file.name for file in sorted(hub.commits[COMMIT].iterdir())]
    overrides = [
        *("data=fineweb", f"data.path={NAME}", "data.name=null", f"data.cache_dir={tmp_path / 'streamed'}"),
        *("data.tokenizer.name=bytes", "data.validation_fraction=0.1", "data.num_workers=0"),
        "data.shard_bytes=1000000",
    ]

    def start() -> subprocess.Popen:
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        return subprocess.Popen([sys.executable, "-c", PREPARE, *overrides], env=environment, **pipes)

    hub.cut = names[1]
    first = start()
    for _ in range(2):  # the first broken answer is asked for again
        assert hub.was_cut.acquire(timeout=60), first.communicate(timeout=10)[0]
    first.send_signal(signal.SIGKILL)
    first.communicate()
    assert names[0] in hub.sent
    hub.cut, hub.head = "", LATER
    second, _ = start().communicate(timeout=120)
    assert "resuming" in second, second
    streamed = second.strip().splitlines()[-1].removeprefix("data: ready in ")
    files = DataConfig(
        source="local", path=str(hub.commits[COMMIT]), cache_dir=str(tmp_path / "read"), num_workers=0,
        tokenizer=TokenizerConfig(name="bytes"), validation_fraction=0.1, shard_bytes=1_000_000,
    )  # fmt: skip
    assert read(open_prepared(streamed), "train") == read(quiet(files), "train")
    assert json.loads((Path(streamed) / "manifest.json").read_text())["commit"] == COMMIT


@pytest.mark.long
def test_a_branch_that_moves_does_not_move_a_stream(hub: Hub, environment: dict[str, str], tmp_path: Path):
    """Neither between ranks nor between epochs, and a run that lost its cache reads its commit again."""

    def stream(*runs: tuple[str, dict[str, str], list[int]]) -> list[dict]:
        """Each in the cache, with the commits and of the sequences given, all in a process of their own."""
        asked = [(NAME, str(tmp_path / cache), pinned, reads) for cache, pinned, reads in runs]
        command = [sys.executable, "-c", STREAM, json.dumps(asked)]
        done = subprocess.run(command, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout.splitlines()[-1])

    epoch = sum(len(document["text"].encode()) + 1 for document in DOCUMENTS) // 16 + 1
    (before,) = stream(("one", {}, [0, 1]))
    assert before["commits"] == {"": COMMIT}
    hub.head = LATER
    again, refused = stream(("one", {}, [0, 1, epoch]), ("one", {"": LATER}, [0]))
    assert again["commits"] == {"": COMMIT}
    assert again["texts"][:2] == before["texts"] and "document 0" in before["texts"][0]
    assert again["texts"][2] == again["texts"][2].lower()  # the later commit shouts
    (lost,) = stream(("two", {"": COMMIT}, [0, 1]))
    assert lost["commits"] == {"": COMMIT}
    assert lost["texts"] == before["texts"]
    error = f"holds another commit of {NAME} than {LATER}: delete it"
    assert error in refused["error"]
