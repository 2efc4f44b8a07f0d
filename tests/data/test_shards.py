"""A flipped bit of prepared data is found when its block is first read, and named."""

import logging
import zlib
from pathlib import Path

import numpy as np
import pytest
import torch

from fla_train.data import shards
from fla_train.data.cache import PreparedData
from fla_train.data.dataset import TokenDataset
from tests.data.conftest import quiet
from tests.refusal import refusal

BLOCK = 1024  # bytes: 512 tokens


@pytest.fixture
def prepared(local, monkeypatch: pytest.MonkeyPatch) -> PreparedData:
    monkeypatch.setattr(shards, "BLOCK", BLOCK)
    return quiet(local)


def flip(path: Path, place: int) -> None:
    content = bytearray(path.read_bytes())
    content[place] ^= 1
    path.write_bytes(content)


def checksums(prepared: PreparedData) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in prepared.folder.glob("*/*.crc32")}


def test_every_file_has_its_block_checksums(prepared: PreparedData) -> None:
    files = sorted(prepared.folder.glob("*/*.bin"))
    assert len(files) > 6
    for file in files:
        content = file.read_bytes()
        expected = [BLOCK, *(zlib.crc32(content[at : at + BLOCK]) for at in range(0, len(content), BLOCK))]
        assert np.fromfile(file.with_suffix(".crc32"), dtype="<u4").tolist() == expected


def test_a_flipped_token_is_named_when_its_block_is_read(prepared: PreparedData) -> None:
    shard = prepared.folder / "train" / "tokens-00001.bin"
    first = prepared.manifest["splits"]["train"]["shards"][0]["tokens"]
    flip(shard, 2 * BLOCK + 6)  # of token 1027 of the shard
    dataset = TokenDataset(prepared.folder, "train", 8)
    bad = (first + 1024) // 8
    dataset.sequences(np.array([0, first // 8, bad - 2, bad + 66]))  # other blocks
    message = refusal(dataset.sequences, np.array([bad + 1]))
    assert f"{shard} is corrupt: block 2 " in message and "1,024 to 1,535" in message
    assert f"delete {prepared.folder} and run fla-prepare again" in message
    refusal(dataset.sequences, np.array([bad + 1]))  # still


def test_a_flipped_bound_of_a_document_is_named(prepared: PreparedData) -> None:
    file = prepared.folder / "train" / "documents-00000.bin"
    flip(file, 8)
    dataset = TokenDataset(prepared.folder, "train", 8)
    assert f"{file} is corrupt" in refusal(dataset.boundaries, np.array([0]))


def test_blocks_are_compared_once(prepared: PreparedData, monkeypatch: pytest.MonkeyPatch) -> None:
    dataset = TokenDataset(prepared.folder, "train", 16)
    whole, sizes, crc32 = np.arange(len(dataset)), [], zlib.crc32
    monkeypatch.setattr(zlib, "crc32", lambda block: sizes.append(len(block)) or crc32(block))
    for _ in range(2):
        dataset.sequences(whole)
    assert sum(sizes) == sum(path.stat().st_size for path in prepared.folder.glob("train/tokens-*.bin"))


def test_data_without_block_checksums_load_and_are_given_some(prepared: PreparedData) -> None:
    expected = TokenDataset(prepared.folder, "train", 16).sequences(np.arange(40))
    written = checksums(prepared)
    assert len(written) == len(list(prepared.folder.glob("*/*.bin")))
    for path in written:
        path.unlink()
    assert torch.equal(TokenDataset(prepared.folder, "train", 16).sequences(np.arange(40)), expected)
    prepared.verify()
    assert checksums(prepared) == written


@pytest.mark.parametrize("cut", [False, True])
def test_damaged_checksums_are_told_from_damaged_data(prepared: PreparedData, cut: bool) -> None:
    written = checksums(prepared)
    file = prepared.folder / "train" / "tokens-00000.crc32"
    if cut:
        file.write_bytes(written[file][:-4])
    else:
        flip(file, 4)
    message = refusal(TokenDataset(prepared.folder, "train", 16).sequences, np.array([0]))
    assert f"{file} is corrupt" in message and "verify=true" in message
    prepared.verify()
    assert checksums(prepared) == written


def test_data_that_cannot_be_written_are_verified_all_the_same(
    prepared: PreparedData, caplog: pytest.LogCaptureFixture
) -> None:
    file = prepared.folder / "train" / "tokens-00000.crc32"
    file.unlink()
    file.mkdir()
    prepared.verify()
    (line,) = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert str(file) in line


def test_a_build_of_an_earlier_version_goes_on(local, corpus: Path, prepared: PreparedData) -> None:
    """Its finished shards have no block checksums; `verify` adds them."""
    expected = checksums(prepared)
    bad = corpus / "z.jsonl"
    bad.write_text("{")
    with pytest.raises(ValueError, match="not JSON"):
        quiet(local)
    (building,) = prepared.folder.parent.glob(".building-*[!k]")
    for path in building.glob("*/*.crc32"):
        path.unlink()
    bad.unlink()
    for path in sorted(prepared.folder.rglob("*"), reverse=True):
        path.rmdir() if path.is_dir() else path.unlink()
    again = quiet(local)
    assert again.folder == prepared.folder
    TokenDataset(again.folder, "train", 16).sequences(np.arange(40))
    assert checksums(again).items() < expected.items()
    again.verify()
    assert checksums(again) == expected
