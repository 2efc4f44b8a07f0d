"""A preparation that is killed or meets an error is resumed; its shards are those of an undisturbed one."""

import errno
import multiprocessing
import os
import random
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import datasets
import pytest

from fla_train.data import files, shards, sources, tokenize
from fla_train.data import prepare as preparation
from fla_train.data.cache import JOURNAL
from fla_train.data.config import TokenizerConfig
from fla_train.data.shards import ShardWriter
from fla_train.utils.errors import Interrupted
from tests.data.conftest import WORDS, quiet, write_jsonl, write_parquet
from tests.data.test_prepare import expected_bytes, read


def contents(folder):
    """{relative path: bytes} of all files."""
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


@pytest.fixture
def small_chunks(monkeypatch):
    """Many chunks and commits even for a small corpus."""
    _make_small(monkeypatch.setattr)


def _make_small(assign):
    for module in (files, sources):
        assign(module, "CHUNK_BYTES", 1500)
    assign(preparation, "COMMIT_SECONDS", 0.0)


def _prepare_until_killed(config, after):
    """Runs in a process of its own: dies by SIGKILL at the disk operation of that number."""
    _make_small(setattr)
    left = [after]

    def deadly(operation):
        def wrapped(*arguments, **named):
            left[0] -= 1
            if left[0] == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            return operation(*arguments, **named)

        return wrapped

    for owner, name in [
        (os, "fsync"),
        (os, "replace"),
        (os, "rename"),
        (Path, "mkdir"),
        (Path, "unlink"),
        (ShardWriter, "_append"),
        (ShardWriter, "add"),
    ]:
        setattr(owner, name, deadly(getattr(owner, name)))
    quiet(config)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["parquet", "jsonl.gz", "hub", "bpe"])
def test_killed_at_any_disk_operation(tmp_path, local, corpus, documents, kind):
    config = local
    if kind == "jsonl.gz":
        write_jsonl(tmp_path / "a.jsonl.gz", documents)
        config = replace(local, path=str(tmp_path / "a.jsonl.gz"))
    elif kind == "hub":
        config = replace(local, source="hub")
    elif kind == "bpe":
        config = replace(local, tokenizer=TokenizerConfig(name="bpe", vocab_size=300))
    undisturbed = contents(quiet(replace(config, cache_dir=str(tmp_path / "once"))).folder)
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.data.test_tokenize_job"])
    rng, kills = random.Random(0), 0
    number = 10 if kind in ("parquet", "jsonl.gz") else 4
    limits = [1, 3, *(rng.randrange(4, 90) for _ in range(number)), 10**9]
    for limit in limits:
        process = context.Process(target=_prepare_until_killed, args=(config, limit))
        process.start()
        process.join()
        kills += process.exitcode == -signal.SIGKILL
        assert process.exitcode in (0, -signal.SIGKILL)
        if process.exitcode == 0 and limit < 10**9:  # done: kill its successor in a new cache
            assert contents(quiet(config).folder) == undisturbed
            config = replace(config, cache_dir=str(tmp_path / f"cache{limit}"))
    assert kills >= number
    assert contents(quiet(config).folder) == undisturbed


@pytest.mark.parametrize("num_workers", [0, 1, 3, None])
def test_any_number_of_workers_gives_the_same_bytes(
    tmp_path, local, documents, small_chunks, monkeypatch, num_workers
):
    monkeypatch.setattr(tokenize, "START_CHUNKS", 2)
    monkeypatch.setattr(tokenize, "available_cores", lambda: 2)
    reference = contents(quiet(replace(local, cache_dir=str(tmp_path / "once"), num_workers=0)).folder)
    prepared = quiet(replace(local, num_workers=num_workers))
    assert contents(prepared.folder) == reference
    assert read(prepared, "train")[0] == expected_bytes(documents, 0.2, "train")[0]


def _prepare_with_workers(config):
    preparation.COMMIT_SECONDS = 0.0
    quiet(config)


@pytest.mark.slow
def test_killed_at_random_moments_with_workers(tmp_path, local):
    rng = random.Random(1)
    rows = [{"text": " ".join(rng.choices(WORDS, k=4000))} for _ in range(300)]
    write_parquet(tmp_path / "large" / "a.parquet", rows)
    large = replace(local, path=str(tmp_path / "large"), num_workers=2, cache_dir=str(tmp_path / "killed"))
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.data.test_tokenize_job"])
    kills = 0
    for _ in range(4):
        process = context.Process(target=_prepare_with_workers, args=(large,))
        process.start()
        time.sleep(rng.uniform(0.3, 1.0))
        process.kill()
        process.join()
        kills += process.exitcode == -signal.SIGKILL
    assert kills >= 2
    killed = quiet(large)
    once = quiet(replace(large, cache_dir=str(tmp_path / "once"), num_workers=0))
    assert contents(killed.folder) == contents(once.folder)
    deadline = time.monotonic() + 10
    while _serving() and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not _serving()  # no process outlives its parent


def _serving():
    commands = []
    for entry in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            commands.append(entry.read_bytes())
        except OSError:
            continue
    return [c for c in commands if b"fla_train.data.tokenize import serve" in c]


def test_a_worker_loads_no_heavy_package():
    """Each of its processes would need seconds, and the memory, for it."""
    code = "import sys, fla_train.data.tokenize; print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert not {"torch", "transformers", "pyarrow", "datasets"} & set(loaded.split())


def test_a_worker_that_dies(local, small_chunks, dying_workers, monkeypatch):
    with pytest.raises(Interrupted, match=r"process ended with code -9.*data\.num_workers.*same command"):
        quiet(replace(local, num_workers=1))
    monkeypatch.undo()
    quiet(local).verify()


def test_a_worker_leaves_signals_to_its_parent(local, small_chunks, monkeypatch):
    """Batch systems and terminals send them to every process of a job."""
    encode = tokenize.Worker.encode

    def signalled(self, chunk):
        encoded = encode(self, chunk)
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP):
            self._process.send_signal(number)
        return encoded

    monkeypatch.setattr(tokenize.Worker, "encode", signalled)
    quiet(replace(local, num_workers=1)).verify()


def test_an_invalid_file_costs_nothing_that_lies_before_it(tmp_path, local, corpus, documents, small_chunks):
    write_jsonl(corpus / "b.jsonl", documents[:5])
    bad = corpus / "c.jsonl"
    bad.write_text('{"text": "a"}\n' * 300 + '{"text": "b\n')
    for _ in range(2):  # the second attempt goes on from the first, to the same error
        with pytest.raises(ValueError, match=r"c\.jsonl, line 301: not JSON.*repair"):
            quiet(local)
    for repair in ("repaired", "removed"):
        lines = []
        if repair == "repaired":
            bad.write_text('{"text": "a"}\n' * 300 + '{"text": "b"}\n')
        else:
            bad.unlink()
        cache = tmp_path / repair
        (tmp_path / "cache").rename(cache)
        before = contents(cache)
        prepared = quiet(replace(local, cache_dir=str(cache)), lines.append)
        assert "going on after 125 documents" in lines[0]
        whole = documents + documents[:5] + [{"text": "a"}] * 300 + [{"text": "b"}]
        expected = whole if repair == "repaired" else documents + documents[:5]
        assert read(prepared, "train")[0] == expected_bytes(expected, 0.2, "train")[0]
        prepared.verify()
        if repair == "repaired":  # the state as the error left it, once more
            for name, raw in before.items():
                path = tmp_path / "cache" / name
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(raw)
            bad.write_text("{")


def test_an_interrupted_stream_goes_on(local, documents, small_chunks, monkeypatch):
    load, rows = datasets.load_dataset, []

    class Breaking:
        """A stream whose connection is lost after 50 rows, and one that says which rows it was asked for."""

        def __init__(self, stream, left):
            self._stream, self._left = stream, left

        def __getattr__(self, name):
            return getattr(self._stream, name)

        def select_columns(self, columns):
            return Breaking(self._stream.select_columns(columns), self._left)

        def __iter__(self):
            for count, row in enumerate(self._stream):
                if count == self._left:
                    raise ConnectionError("connection reset by peer")
                rows.append(row["id"])
                yield row

    monkeypatch.setattr(datasets, "load_dataset", lambda *a, **k: Breaking(load(*a, **k), 50))
    hub = replace(local, source="hub")
    for _ in range(2):
        with pytest.raises(ValueError, match=r"cannot be read \(connection reset by peer\).*network"):
            quiet(hub)
    monkeypatch.setattr(datasets, "load_dataset", lambda *a, **k: Breaking(load(*a, **k), None))
    lines = []
    prepared = quiet(hub, lines.append)
    assert "going on after" in lines[0]
    assert read(prepared, "train")[0] == expected_bytes(documents, 0.2, "train")[0]
    assert len(rows) < len(documents) + 2 * 10  # no more is read twice than what a chunk had not yet taken


def test_changed_text_starts_anew(local, corpus, documents, small_chunks):
    (corpus / "z.jsonl").write_text("{")
    with pytest.raises(ValueError, match="not JSON"):
        quiet(local)
    (corpus / "z.jsonl").unlink()
    write_parquet(corpus / "000_00000.parquet", documents[:69])
    lines = []
    prepared = quiet(local, lines.append)
    assert "has changed" in lines[0]
    assert read(prepared, "train")[0] == expected_bytes(documents[:69] + documents[70:], 0.2, "train")[0]


def test_an_error_in_the_first_chunk_can_be_repaired(tmp_path, local):
    """Before any text was taken: there is nothing to go on from, and nothing to lose."""
    file = tmp_path / "invalid" / "a.jsonl"
    write_jsonl(file, [{"text": "fine"}])
    file.write_text(file.read_text() + "{")
    invalid = replace(local, path=str(file.parent), validation_fraction=0.0)
    with pytest.raises(ValueError, match=r"line 2: not JSON.*repair or remove the line"):
        quiet(invalid)
    write_jsonl(file, [{"text": "fine"}, {"text": "repaired"}])
    assert quiet(invalid).manifest["splits"]["train"]["documents"] == 2


def test_another_tokenizer_of_the_same_name(tmp_path, local):
    folder = tmp_path / "tokenizer"
    quiet(replace(local, cache_dir=str(tmp_path / "other"))).tokenizer().save_pretrained(folder)
    named = replace(local, tokenizer=TokenizerConfig(name=str(folder)))
    first = quiet(named)
    content = (folder / "tokenizer.json").read_text().replace('"<pad>"', '"<pad2>"')
    (folder / "tokenizer.json").write_text(content)
    assert quiet(named).folder != first.folder


def test_disk_full(tmp_path, local, documents, small_chunks, monkeypatch):
    append, room = ShardWriter._append, [6]

    def full(self, tokens, ends):
        room[0] -= 1
        if room[0] < 0:
            self._tokens_file.write(tokens[: len(tokens) // 2])  # what a full disk still took
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        append(self, tokens, ends)

    monkeypatch.setattr(shards.ShardWriter, "_append", full)
    with pytest.raises(Interrupted, match=r"cannot write .*No space left on device; make room.*same command"):
        quiet(local)
    room[0] = 10**9
    lines = []
    prepared = quiet(local, lines.append)
    assert "going on after" in lines[0]
    assert read(prepared, "train")[0] == expected_bytes(documents, 0.2, "train")[0]
    prepared.verify()


def test_a_journal_that_could_not_take_its_place_is_gone_in_the_end(tmp_path, local, monkeypatch):
    """As a kill leaves it; what goes on from the journal before it ends without another."""
    undisturbed = contents(quiet(replace(local, cache_dir=str(tmp_path / "once"))).folder)
    move = os.replace

    def broken(source, target):
        if Path(target).name == JOURNAL and Path(target).exists():  # the first one arrived
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        move(source, target)

    with monkeypatch.context() as patch:
        _make_small(patch.setattr)
        patch.setattr(os, "replace", broken)
        with pytest.raises(ValueError, match="Input/output error"):
            quiet(local)
    (left,) = (tmp_path / "cache").rglob("*.tmp")
    assert left.name.startswith(JOURNAL)
    lines = []
    assert contents(quiet(local, lines.append).folder) == undisturbed
    assert "going on after" in lines[0]


def test_a_shard_lost_behind_the_journal_is_named(tmp_path, local, corpus, small_chunks):
    (corpus / "z.jsonl").write_text("{")
    with pytest.raises(ValueError, match="not JSON"):
        quiet(local)
    (building,) = (tmp_path / "cache").glob(".building-*[!k]")
    last = max((building / "train").glob("tokens-*.bin"))
    os.truncate(last, 3)
    with pytest.raises(ValueError, match=r"tokens-\d+\.bin is cut short; delete .*building"):
        quiet(local)


@pytest.mark.parametrize("file", ["tokens", "documents"])
def test_a_shard_damaged_before_the_resume_is_named(tmp_path, local, corpus, small_chunks, file):
    local = replace(local, shard_tokens=10**6)  # so that none is finished
    undisturbed = contents(quiet(replace(local, cache_dir=str(tmp_path / "once"))).folder)
    (corpus / "z.jsonl").write_text("{")
    with pytest.raises(ValueError, match="not JSON"):
        quiet(local)
    (corpus / "z.jsonl").unlink()
    (building,) = (tmp_path / "cache").glob(".building-*[!k]")
    shard = building / "train" / f"{file}-00000.bin"
    written = shard.read_bytes()
    shard.write_bytes(bytes([written[0] ^ 1]) + written[1:])
    with pytest.raises(ValueError, match=rf"{shard.name} is not as it was written; delete {building}"):
        quiet(local)
    shard.write_bytes(written)
    assert contents(quiet(local).folder) == undisturbed
