import errno
import gzip
import os
import signal
import sys
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from fla_train.cli import prepare as command
from fla_train.cli.app import compose
from fla_train.data import tokenize
from fla_train.data.config import PartConfig


def run(monkeypatch, *overrides):
    """Exit code of `fla-prepare` with these overrides."""
    monkeypatch.setattr(sys, "argv", ["fla-prepare", *overrides])
    with pytest.raises(SystemExit) as stop:
        command.main()
        raise SystemExit(0)
    return stop.value.code


def test_it_prepares_and_says_where(monkeypatch, capsys, local, tmp_path):
    overrides = ["data=local", f"data.path={local.path}", f"data.cache_dir={local.cache_dir}"]
    assert run(monkeypatch, *overrides, "data.tokenizer.name=bytes") == 0
    out = capsys.readouterr().out
    folder = out.strip().splitlines()[-1].removeprefix("data: ready in ")
    assert folder.startswith(local.cache_dir)
    assert "vocabulary 259 (bytes)" in out
    again = (*overrides, "data.tokenizer.name=bytes", "verify=true")
    assert run(monkeypatch, *again) == 0
    assert f"data: every shard is as written, ready in {folder}" in capsys.readouterr().out
    shard = Path(folder) / "train/tokens-00000.bin"
    content = bytearray(shard.read_bytes())
    content[7] ^= 1
    shard.write_bytes(content)
    assert run(monkeypatch, *again) == 2
    assert f"error: shard {shard} is corrupt (checksum)" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["data.foo=1"], "no key data.foo"),
        (["data.max_tokens=many"], "'many'"),
        (["data=local"], "needs data.path"),
        (["data=local", "data.path=no/such/place"], "no such file or folder"),
        (["data=web"], "web"),
        (["data=mixture", "+data.mixture={a: {path: x/}}"], "value: weight"),
    ],
)
def test_errors_are_one_line_and_exit_code_2(monkeypatch, capsys, overrides, message):
    assert run(monkeypatch, *overrides) == 2
    err = capsys.readouterr().err
    assert err.startswith("error: ")
    assert message in err
    assert "Traceback" not in err


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
    assert config.validation_errors() == []
    if name == "mixture":
        assert config.mixture["b"] == PartConfig(weight=1.0, source="stdlib")


def test_a_mixture_on_the_command_line(monkeypatch, capsys, local, tmp_path):
    overrides = ["data=mixture", f"data.cache_dir={local.cache_dir}"]
    one = f"one: {{weight: 0.75, path: {local.path}}}"
    two = "two: {weight: 0.25, source: stdlib, max_documents: 5}"
    assert run(monkeypatch, *overrides, f"+data.mixture={{{one}, {two}}}") == 0
    assert "one: 3 of 4 sequences; train: " in capsys.readouterr().out
    assert run(monkeypatch, *overrides, f"+data.mixture={{{one}, two: {{weight: 0}}}}") == 2
    assert "data.mixture.two.weight=0" in capsys.readouterr().err


UNREACHABLE = ["data=hub", "data.path=no/dataset"]
PART = "+data.mixture={a: {weight: 1, source: hub, path: no/dataset}}"


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
def test_what_another_attempt_may_mend_is_exit_code_1(
    monkeypatch, capsys, tmp_path, corpus, overrides, message
):
    encode = tokenize.Worker.encode

    def dying(self, chunk):
        self._process.kill()
        return encode(self, chunk)

    monkeypatch.setattr(tokenize.Worker, "encode", dying)
    (tmp_path / "file").touch()
    given = [text.replace("{tmp}", str(tmp_path)).replace("{corpus}", str(corpus)) for text in overrides]
    assert run(monkeypatch, "data.tokenizer.name=bytes", f"data.cache_dir={tmp_path}/cache", *given) == 1
    err = capsys.readouterr().err
    assert err.startswith("error: ") and message in err and "Traceback" not in err


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("a.jsonl.gz", gzip.compress(b'{"text": "a"}\n' * 999, mtime=0)[:-12]),
        ("a.jsonl", b'{"text": "a"}\n' * 300 + b"{"),
        ("a.jsonl", b'{"text": "a"}\n' * 200 + b'{"text": "\\ud800"}'),
        ("a.jsonl", b'{"text": ' + b"[" * 10**5),
    ],
)
def test_an_error_in_the_text_is_exit_code_2(monkeypatch, capsys, tmp_path, name, content):
    (tmp_path / name).write_bytes(content)
    overrides = ["data=local", f"data.path={tmp_path / name}", f"data.cache_dir={tmp_path}/cache"]
    assert run(monkeypatch, *overrides, "data.tokenizer.name=bytes") == 2
    err = capsys.readouterr().err
    assert err.startswith("error: ") and err.count("\n") == 1


@pytest.mark.usefixtures("unheard")
def test_a_request_to_stop_is_one_line_and_exit_code_75(monkeypatch, capsys):
    monkeypatch.setattr(
        "fla_train.data.prepare.prepare", lambda settings: os.kill(os.getpid(), signal.SIGTERM)
    )
    assert run(monkeypatch, "data=stdlib") == 75
    assert capsys.readouterr().err == "error: stopped on request; the same command resumes from here\n"


def test_what_the_system_refuses_is_one_line_and_exit_code_1(monkeypatch, capsys, tmp_path):
    def refuse(*arguments):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(tmp_path / "here"))

    monkeypatch.setattr("fla_train.data.prepare.prepare", refuse)
    assert run(monkeypatch, "data=stdlib") == 1
    assert capsys.readouterr().err == f"error: {tmp_path / 'here'}: Permission denied\n"
    monkeypatch.setenv("FLA_TRAIN_TRACEBACK", "1")
    monkeypatch.setenv("HYDRA_FULL_ERROR", "1")  # as under a debugger, or coverage
    with pytest.raises(PermissionError):
        run(monkeypatch, "data=stdlib")
