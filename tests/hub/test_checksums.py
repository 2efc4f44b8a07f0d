"""An export is as it was written, or the damaged file is named: when it is loaded, copied and pushed."""

import hashlib
import json
import os
import stat
from pathlib import Path

import pytest

from fla_train.hub import copy_export, export_model, find_export_damage, load, load_model, push
from tests.refusal import refusal


@pytest.fixture
def export(small_model, tokenizer, tmp_path: Path) -> Path:
    return export_model(small_model, tokenizer, tmp_path / "export", validate=False)


def remove(file: Path) -> None:
    file.unlink()


def cut(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-1000])


def change(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[-1000] ^= 4  # within the weights
    file.write_bytes(content)


def test_every_file_but_the_card_has_its_checksum(export: Path) -> None:
    listed = json.loads((export / "checksums.json").read_text())["files"]
    files = {file.name: file.read_bytes() for file in export.iterdir()}
    assert {"model.safetensors", "config.json", "tokenizer.json", "training.json"} <= listed.keys()
    assert listed.keys() == files.keys() - {"checksums.json", "README.md"}
    for name, entry in listed.items():
        expected = {"bytes": len(files[name]), "sha256": hashlib.sha256(files[name]).hexdigest()}
        assert entry == expected, name
    (export / "README.md").write_text("a better card")
    assert find_export_damage(export) is None


@pytest.mark.parametrize("damage", [remove, cut, change])
def test_damaged_weights_are_named(damage, export: Path, tmp_path: Path) -> None:
    weights = export / "model.safetensors"
    assert find_export_damage(export) is None
    damage(weights)
    assert find_export_damage(export).startswith(weights.name)
    assert str(weights) in refusal(copy_export, export, tmp_path / "copy")
    assert not (tmp_path / "copy").exists()
    nowhere = {"token": "hf_test", "endpoint": "http://127.0.0.1:9"}
    assert str(weights) in refusal(push, export, "user/tiny", **nowhere)
    assert str(weights) in refusal(load_model, export)


def test_loading_compares_the_sizes_of_large_files_only(
    export: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    weights = export / "model.safetensors"
    monkeypatch.setattr(load, "HASHED_BYTES", weights.stat().st_size - 1)
    change(weights)
    load_model(export)
    config = export / "config.json"
    config.write_text(config.read_text().replace("true", "TRUE", 1))
    assert str(config) in refusal(load_model, export)


def test_damaged_checksums_are_named(export: Path) -> None:
    (export / "checksums.json").write_text('{"files": {"model.saf')
    assert find_export_damage(export).startswith("checksums.json")
    assert str(export / "checksums.json") in refusal(load_model, export)


def test_an_export_of_an_earlier_version_is_used_as_before(export: Path, tmp_path: Path) -> None:
    (export / "checksums.json").unlink()
    assert find_export_damage(export) is None
    load_model(copy_export(export, tmp_path / "copy"))
    cut(export / "model.safetensors")
    assert find_export_damage(export).startswith("model.safetensors")
    assert str(export / "model.safetensors") in refusal(load_model, export)
    remove(export / "model.safetensors")
    assert find_export_damage(export).startswith("model.safetensors")


def modes(folder: Path) -> set[int]:
    return {stat.S_IMODE(file.stat().st_mode) for file in folder.iterdir()}


def test_files_are_as_readable_as_the_umask_says(small_model, tokenizer, tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        export = export_model(small_model, tokenizer, tmp_path / "export", validate=False)
        assert modes(export) == {0o640}
        (export / "model.safetensors").chmod(0o600)  # as earlier versions left it
        assert modes(copy_export(export, tmp_path / "copy")) == {0o640}
    finally:
        os.umask(before)
