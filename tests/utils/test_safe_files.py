"""Reading a hostile file is quick, and returns data or raises an error of one line."""

import os
from pathlib import Path

import pytest

from fla_train.utils.safe_files import LARGEST_YAML, read_json, read_yaml

BOMB = "a: &a [1, 1, 1, 1, 1, 1, 1, 1, 1]\n" + "".join(
    f"{new}: &{new} [{', '.join([f'*{old}'] * 9)}]\n" for old, new in zip("abcdefgh", "bcdefghi", strict=True)
)
HOSTILE = {
    "bomb.yaml": BOMB,
    "loop.yaml": "l: &l [*l]",
    "deep.yaml": "a: " + "[" * 3000 + "]" * 3000,
    "rather_deep.yaml": "a: " + "[" * 80 + "]" * 80,
    "code.yaml": "a: !!python/object/apply:os.getcwd []",
    "twice.yaml": "a: 1\nb: {c: 1, c: 2}",
    "list.yaml": "[1, 2]",
    "empty.yaml": "",
    "large.yaml": "a: " + "b" * LARGEST_YAML,
    "deep.json": '{"a":' + "[" * 100_000 + "]" * 100_000 + "}",
    "rather_deep.json": '{"a":' + "[" * 80 + "]" * 80 + "}",
    "digits.json": '{"a":' + "9" * 5000 + "}",
    "list.json": "[]",
    "cut.json": '{"a": 1',
    "latin1.json": b'{"a": "\xe4"}',
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_file_is_one_line_that_names_it(name: str, tmp_path: Path) -> None:
    file, content = tmp_path / name, HOSTILE[name]
    file.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(ValueError, match=name) as failure:
        (read_yaml if file.suffix == ".yaml" else read_json)(file)
    assert "\n" not in str(failure.value) and len(str(failure.value)) < 500


def test_named_pipe_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.json")
    with pytest.raises(OSError, match=r"pipe\.json"):
        read_json(tmp_path / "pipe.json")


def test_yaml_values_are_those_of_hydra(tmp_path: Path) -> None:
    file = tmp_path / "config.yaml"
    file.write_text(
        "lr: 3e-4\neps: 1.5e-05\nname: 2026-01-01\nkey: '1e3'\nnote: ${oc.env:HOME}\nlist: [1, null]\n"
    )
    assert read_yaml(file) == {
        "lr": 3e-4,
        "eps": 1.5e-5,
        "name": "2026-01-01",
        "key": "1e3",
        "note": "${oc.env:HOME}",
        "list": [1, None],
    }
