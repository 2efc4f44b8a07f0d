import errno
import gzip
import os
import signal
from functools import partial
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from fla_train.cli import prepare as command
from fla_train.cli.app import compose
from fla_train.data.config import PartConfig
from fla_train.utils.keys import find_errors


@pytest.fixture
def run(run_command):
    return partial(run_command, "fla-prepare")


def assert_error(result, code, message):
    """One error on stderr, without a traceback."""
    assert result[0] == code and result[2].startswith("error: ") and message in result[2]
    assert "Traceback" not in result[2]


def test_it_prepares_and_says_where(run, local):
    overrides = ["data=local", f"data.path={local.path}", f"data.cache_dir={local.cache_dir}"]
    overrides.append("data.tokenizer.name=bytes")
    code, out, _ = run(*overrides)
    folder = out.strip().splitlines()[-1].removeprefix("data: ready in ")
    assert code == 0 and folder.startswith(local.cache_dir)
    assert "vocabulary 259 (bytes)" in out
    code, out, _ = run(*overrides, "verify=true")
    assert code == 0 and f"data: every shard is as written, ready in {folder}" in out
    shard = Path(folder) / "train/tokens-00000.bin"
    content = bytearray(shard.read_bytes())
    content[7] ^= 1
    shard.write_bytes(content)
    assert_error(run(*overrides, "verify=true"), 2, f"shard {shard} is corrupt (checksum)")


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["data.foo=1"], "no key data.foo"),
        (["data.max_tokens=many"], "'many'"),
        (["data=local"], "data.path must be set"),
        (["data=local", "data.path=no/such/place"], "no such file or folder"),
        (["data=web"], "web"),
        (["data=mixture", "+data.mixture={a: {path: docs}}"], "data.mixture.a"),
    ],
)
def test_errors_are_exit_code_2(run, overrides, message):
    assert_error(run(*overrides), 2, message)


NEEDED = {
    "stdlib": [],
    "fineweb": [],
    "local": ["data.path=x"],
    "hub": ["data.path=x/y"],
    "mixture": ["+data.mixture={a: {weight: 0.7, path: x/}, b: {weight: 1, source: stdlib}}"],
}


@pytest.mark.parametrize("name", NEEDED)
def test_every_yaml_fits_the_schema(name):
    command.register()
    config = OmegaConf.to_object(compose("prepare", [f"data={name}", *NEEDED[name]])).data
    assert find_errors(config, "data.") == []
    if name == "mixture":
        assert config.mixture["b"] == PartConfig(weight=1.0, source="stdlib")


def test_a_mixture_on_the_command_line(run, local):
    overrides = ["data=mixture", f"data.cache_dir={local.cache_dir}"]
    one = f"one: {{weight: 0.75, path: {local.path}}}"
    two = "two: {weight: 0.25, source: stdlib, max_documents: 5}"
    code, out, _ = run(*overrides, f"+data.mixture={{{one}, {two}}}")
    assert code == 0 and "one: 3 of 4 sequences; train: " in out
    wrong = run(*overrides, f"+data.mixture={{{one}, two: {{weight: 0}}}}")
    assert_error(wrong, 2, "data.mixture.two.weight=0")


UNREACHABLE = ["data=hub", "data.path=no/dataset"]
PART = "+data.mixture={a: {weight: 1, source: hub, path: no/dataset}}"


@pytest.mark.usefixtures("dying_workers")
@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["data=stdlib", "data.cache_dir={tmp}/file/cache"], "cannot write"),
        (["data=local", "data.path={corpus}", "data.num_workers=1"], "ended with code -9"),
        (UNREACHABLE, "dataset no/dataset, split train: cannot be read"),
        (["data=mixture", PART], "data.mixture.a: dataset no/dataset, split train: cannot be read"),
        (["data=stdlib", "data.tokenizer.name=no/tokenizer"], "no/tokenizer: cannot be loaded"),
    ],
)
def test_what_another_attempt_may_mend_is_exit_code_1(run, tmp_path, corpus, overrides, message):
    (tmp_path / "file").touch()
    given = [text.replace("{tmp}", str(tmp_path)).replace("{corpus}", str(corpus)) for text in overrides]
    assert_error(run("data.tokenizer.name=bytes", f"data.cache_dir={tmp_path}/cache", *given), 1, message)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("a.jsonl.gz", gzip.compress(b'{"text": "a"}\n' * 999, mtime=0)[:-12]),
        ("a.jsonl", b'{"text": "a"}\n' * 300 + b"{"),
        ("a.jsonl", b'{"text": "a"}\n' * 200 + b'{"text": "\\ud800"}'),
        ("a.jsonl", b'{"text": ' + b"[" * 10**5),
    ],
)
def test_an_error_in_the_text_is_exit_code_2(run, tmp_path, name, content):
    (tmp_path / name).write_bytes(content)
    overrides = ["data=local", f"data.path={tmp_path / name}", f"data.cache_dir={tmp_path}/cache"]
    code, _, err = run(*overrides, "data.tokenizer.name=bytes")
    assert code == 2 and err.startswith("error: ") and err.count("\n") == 1


@pytest.mark.usefixtures("unheard")
def test_a_request_to_stop_is_one_line_and_exit_code_75(run, monkeypatch):
    monkeypatch.setattr(
        "fla_train.data.prepare.prepare", lambda settings: os.kill(os.getpid(), signal.SIGTERM)
    )
    code, out, err = run("data=stdlib")
    assert code == 75 and out.count("\n") == 1 and not err


def test_what_the_system_refuses_is_one_line_and_exit_code_1(run, monkeypatch, tmp_path):
    def refuse(*arguments):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(tmp_path / "here"))

    monkeypatch.setattr("fla_train.data.prepare.prepare", refuse)
    code, _, err = run("data=stdlib")
    assert (code, err) == (1, f"error: {tmp_path / 'here'}: Permission denied\n")
    monkeypatch.setenv("FLA_TRAIN_TRACEBACK", "1")
    monkeypatch.setenv("HYDRA_FULL_ERROR", "1")  # as under a debugger, or coverage
    with pytest.raises(PermissionError):
        run("data=stdlib")
