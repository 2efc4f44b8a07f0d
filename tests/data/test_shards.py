"""A flipped bit of prepared data is found when its block is first read, and named."""

import zlib
from pathlib import Path

import numpy as np
import pytest

from fla_train.data import prepare as preparation
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


@pytest.mark.parametrize("fault", ["cut", "flipped", "lost"])
def test_damaged_checksums_are_told_from_damaged_data(prepared: PreparedData, fault: str) -> None:
    written = checksums(prepared)
    assert len(written) == len(list(prepared.folder.glob("*/*.bin")))
    file = prepared.folder / "train" / "tokens-00000.crc32"
    if fault == "lost":
        file.unlink()
    elif fault == "cut":
        file.write_bytes(written[file][:-4])
    else:
        flip(file, 4)
    message = refusal(lambda: TokenDataset(prepared.folder, "train", 16).sequences(np.array([0])))
    assert str(file) in message and "not the shard" in message and "verify=true" in message
    prepared.verify()
    assert checksums(prepared) == written


@pytest.mark.parametrize("change", [("uint16", "float16"), ('"vocab_size": ', '"vocab_size": 9')])
def test_an_edited_manifest_is_refused(prepared: PreparedData, change: tuple[str, str]) -> None:
    file = prepared.folder / "manifest.json"
    file.write_text(file.read_text().replace(*change))
    assert str(file) in refusal(TokenDataset, prepared.folder, "train", 16)


def test_text_that_changes_while_it_is_prepared_is_refused(
    local, corpus: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_encoder = preparation.make_encoder
    file = corpus / "more.jsonl"
    file.write_text('{"text": "first"}\n')

    def grow(*arguments: object) -> object:
        with file.open("a") as lines:
            lines.write('{"text": "one more"}\n')
        return make_encoder(*arguments)

    monkeypatch.setattr(preparation, "make_encoder", grow)
    assert "changed" in refusal(quiet, local)
    monkeypatch.undo()
    assert quiet(local).manifest["source"]["files"][-1]["bytes"] == file.stat().st_size
