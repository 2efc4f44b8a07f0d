"""`fla-prepare`: what it prints, its exit codes, and the configs of the data group."""

import os
import signal
from functools import partial

import pytest


@pytest.fixture
def run(run_command):
    return partial(run_command, "fla-prepare")


def assert_error(result, code, message):
    """One error line on stderr, without a traceback."""
    assert result[0] == code and result[2].startswith("error: ") and message in result[2]
    assert result[2].count("\n") == 1


def test_it_prepares_and_verifies(run, local):
    overrides = ["data=local", f"data.path={local.path}", f"data.cache_dir={local.cache_dir}"]
    overrides.append("data.tokenizer.name=bytes")
    code, out, _ = run(*overrides)
    folder = out.strip().splitlines()[-1].removeprefix("data: ready in ")
    assert code == 0 and folder.startswith(local.cache_dir) and "vocabulary 259 (bytes)" in out
    code, out, _ = run(*overrides, "verify=true")
    assert code == 0 and f"ready in {folder}" in out
    shard = os.path.join(folder, "shard-00000.bin")
    with open(shard, "r+b") as file:
        file.write(b"x")
    assert_error(run(*overrides, "verify=true"), 2, str(shard))


@pytest.mark.parametrize(
    ("code", "overrides", "message"),
    [
        (2, "data=local data.path={tmp}/bad.jsonl", "bad.jsonl, line 1: not JSON"),
        # Another attempt may succeed.
        (1, "data=stdlib data.cache_dir={tmp}/bad.jsonl/cache", "Not a directory"),
        (1, "data=hub data.path=no/dataset", "dataset no/dataset, split train: cannot be read"),
        (1, "data=stdlib data.tokenizer.name=no/tokenizer", "no/tokenizer: cannot be loaded"),
    ],
)
def test_errors(run, tmp_path, code, overrides, message):
    (tmp_path / "bad.jsonl").write_text("{")
    words = overrides.format(tmp=tmp_path).split(" ")
    cache = [f"data.cache_dir={tmp_path}/cache"] if "cache_dir" not in overrides else []
    assert_error(run("data.tokenizer.name=bytes", *cache, *words), code, message)


@pytest.mark.usefixtures("unheard")
def test_a_request_to_stop_is_one_line_and_exit_code_75(run, monkeypatch):
    monkeypatch.setattr(
        "fla_train.data.prepare.prepare", lambda settings: os.kill(os.getpid(), signal.SIGTERM)
    )
    code, out, err = run("data=stdlib")
    assert code == 75 and out.count("\n") == 1 and not err
