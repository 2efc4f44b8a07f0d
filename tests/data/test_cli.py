import sys

import pytest

from fla_train.cli import prepare as command
from fla_train.cli.app import compose
from fla_train.data import data_faults


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


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["data.foo=1"], "'foo'"),
        (["data.max_tokens=many"], "'many'"),
        (["data=local"], "needs data.path"),
        (["data=local", "data.path=no/such/place"], "no such file or folder"),
        (["data=web"], "web"),
    ],
)
def test_faults_are_one_line_and_exit_code_2(monkeypatch, capsys, overrides, message):
    assert run(monkeypatch, *overrides) == 2
    err = capsys.readouterr().err
    assert err.startswith("error: ")
    assert message in err
    assert "Traceback" not in err


@pytest.mark.parametrize("name", ["stdlib", "local", "fineweb"])
def test_every_yaml_fits_the_schema(name):
    command.register()
    config = compose("prepare", [f"data={name}", *(["data.path=x"] if name == "local" else [])])
    assert data_faults(config.data) == []
