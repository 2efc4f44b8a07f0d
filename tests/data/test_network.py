"""`fla-prepare` from a Hub behind a connection that breaks.

The tokens must be those of the same files read from disk, though the dataset is replaced meanwhile.
"""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from fla_train.data.cache import open_prepared
from fla_train.data.config import DataConfig, TokenizerConfig
from tests.data.conftest import quiet, write_parquet
from tests.data.test_prepare import read
from tests.fake_hub import FakeHub, Repo, running_hub

NAME, COMMIT, LATER = "someone/texts", f"{0:040x}", f"{1:040x}"
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
        data = prepare(config, log=lambda line: None, commits=pinned)
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


@pytest.fixture
def files(tmp_path: Path) -> Path:
    """The dataset as a folder."""
    for number in range(2):
        rows = DOCUMENTS[600 * number : 600 * (number + 1)]
        write_parquet(tmp_path / f"files/train-0000{number}-of-00002.parquet", rows, row_group_size=100)
    return tmp_path / "files"


@pytest.fixture
def hub(files: Path, tmp_path: Path) -> Iterator[FakeHub]:
    """A Hub with the dataset; a later commit has its text in capitals."""
    first = {file.name: file.read_bytes() for file in sorted(files.iterdir())}
    shouted = [document | {"text": document["text"].upper()} for document in DOCUMENTS]
    write_parquet(tmp_path / "shouted.parquet", shouted, row_group_size=100)
    later = {name: (tmp_path / "shouted.parquet").read_bytes() for name in first}
    with running_hub() as server:
        server.repos[NAME] = Repo(private=False, commits=[first, later])
        yield server


@pytest.fixture
def environment(hub: FakeHub, tmp_path: Path) -> dict[str, str]:
    """Of a process that may ask `hub`."""
    return os.environ | hub.environment(tmp_path / "home") | {"PYTHONUNBUFFERED": "1"}


@pytest.mark.slow
def test_a_stream_from_the_hub_outlives_broken_connections_and_a_kill(hub, files, environment, tmp_path):
    names = [*hub.repos[NAME].files()]
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
    hub.cut, hub.repos[NAME].branches["main"] = "", 1
    second, _ = start().communicate(timeout=120)
    assert "resuming" in second, second
    streamed = second.strip().splitlines()[-1].removeprefix("data: ready in ")
    local = DataConfig(
        source="local", path=str(files), cache_dir=str(tmp_path / "read"), num_workers=0,
        tokenizer=TokenizerConfig(name="bytes"), validation_fraction=0.1, shard_bytes=1_000_000,
    )  # fmt: skip
    assert read(open_prepared(streamed), "train") == read(quiet(local), "train")
    assert json.loads((Path(streamed) / "manifest.json").read_text())["commit"] == COMMIT


@pytest.mark.long
def test_a_branch_that_moves_does_not_move_a_stream(hub, environment, tmp_path):
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
    hub.repos[NAME].branches["main"] = 1
    again, refused = stream(("one", {}, [0, 1, epoch]), ("one", {"": LATER}, [0]))
    assert again["commits"] == {"": COMMIT}
    assert again["texts"][:2] == before["texts"] and "document 0" in before["texts"][0]
    assert again["texts"][2] == again["texts"][2].lower()  # the later commit shouts
    (lost,) = stream(("two", {"": COMMIT}, [0, 1]))
    assert lost["commits"] == {"": COMMIT}
    assert lost["texts"] == before["texts"]
    error = f"holds another commit of {NAME} than {LATER}: delete it"
    assert error in refused["error"]
