"""An export is complete or absent, loads through the Auto classes, and computes what the model computed."""

import errno
import hashlib
import json
import os
import re
import resource
import shutil
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from fla_train.hub import export as export_module
from fla_train.hub.card import CardInfo
from fla_train.hub.checksums import find_export_damage
from fla_train.hub.convert import convert_export
from fla_train.hub.export import copy_export, export_model
from fla_train.hub.load import load_model
from fla_train.hub.push import push
from fla_train.models.configuration import DeltaProductConfig
from fla_train.models.modeling import DeltaProductForCausalLM
from fla_train.models.zoo.mamba import SignedMambaConfig, SignedMambaForCausalLM
from tests.hub.conftest import contents
from tests.refusal import refusal

IDS = torch.tensor([[5, 7, 300, 11, 2, 9]])


def test_auto_classes_load_equal_logits(model: PreTrainedModel, tokenizer, tmp_path: Path) -> None:
    """The model, its mode and the random state do not change."""
    random_state = torch.get_rng_state()
    model.train()
    folder = export_model(model, tokenizer, tmp_path / "export")
    assert model.training and torch.equal(torch.get_rng_state(), random_state)
    assert model.config.architectures is None
    loaded = AutoModelForCausalLM.from_pretrained(folder)
    assert type(loaded) is type(model) and loaded.dtype == torch.float32
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, loaded.get_parameter(name)), name
    with torch.no_grad():
        assert torch.equal(model.eval()(IDS).logits, loaded.eval()(IDS).logits)
    text = "naïve text, 日本"
    again = AutoTokenizer.from_pretrained(folder)
    assert again(text)["input_ids"] == tokenizer(text)["input_ids"]
    assert loaded.generation_config.eos_token_id == tokenizer.eos_token_id
    assert loaded.generation_config.pad_token_id == tokenizer.pad_token_id


def test_token_ids_and_generation_settings_of_the_model_are_kept(tokenizer, tmp_path: Path) -> None:
    """The tokenizer sets what a model leaves open; a conversion keeps what was published."""
    sizes = {"vocab_size": 320, "hidden_size": 16, "num_hidden_layers": 1, "num_heads": 1, "head_dim": 16}
    config = DeltaProductConfig(**sizes, intermediate_size=16, eos_token_id=9, pad_token_id=7)
    folder = export_model(DeltaProductForCausalLM(config), tokenizer, tmp_path / "first")
    file = folder / "generation_config.json"
    for content in (json.loads((folder / "config.json").read_text()), json.loads(file.read_text())):
        assert (content["eos_token_id"], content["pad_token_id"]) == (9, 7)
        assert content.get("bos_token_id") == tokenizer.bos_token_id
    published = {"do_sample": True, "temperature": 0.6, "eos_token_id": [9, 11], "bos_token_id": 3}
    file.write_text(json.dumps(published))
    (folder / "checksums.json").unlink()
    for format in (None, "fla"):
        converted = convert_export(folder, tmp_path / f"as-{format}", format, dtype=torch.bfloat16)
        written = json.loads((converted / "generation_config.json").read_text())
        assert {**written, **published} == written and written["pad_token_id"] == 7


def test_heads_too_wide_for_the_triton_operator_in_fp32(tmp_path: Path) -> None:
    """Triton takes 256 key channels in bf16, in which such a model trains, and 128 in fp32."""
    config = DeltaProductConfig(vocab_size=32, hidden_size=16, num_hidden_layers=1, num_heads=1, head_dim=256)
    config.backend = "triton"
    export_model(DeltaProductForCausalLM(config), None, tmp_path / "export")
    assert config.backend == "triton"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])  # of the model
def test_bf16_export_keeps_decay_parameters_in_fp32(small_model, tmp_path: Path, dtype: torch.dtype) -> None:
    small_model.to(dtype)
    folder = export_model(small_model, None, tmp_path / "export", dtype=torch.bfloat16)
    loaded = AutoModelForCausalLM.from_pretrained(folder)
    assert loaded.lm_head.weight.dtype == torch.bfloat16
    decay = loaded.model.layers[0].attn.A_log
    assert decay.dtype == torch.float32
    assert torch.equal(decay, small_model.model.layers[0].attn.A_log.float())


def test_an_interrupted_export_leaves_the_former_one(small_model, tokenizer, tmp_path, monkeypatch):
    folder = tmp_path / "export"

    def write(step: int) -> None:
        export_model(small_model, tokenizer, folder, CardInfo(step=step))

    def interrupted(step: int, left: list[Path]) -> None:
        def interrupt(*args: object) -> None:
            raise KeyboardInterrupt

        with monkeypatch.context() as patched:
            patched.setattr(export_module, "render_card", interrupt)
            with pytest.raises(KeyboardInterrupt):
                write(step)
        assert list(tmp_path.iterdir()) == left

    def written() -> int:
        assert list(tmp_path.iterdir()) == [folder]
        return json.loads((folder / "training.json").read_text())["step"]

    interrupted(1, left=[])
    write(1)
    interrupted(2, left=[folder])
    assert written() == 1
    (tmp_path / ".writing-export").mkdir()  # left by a killed process
    write(2)
    assert written() == 2


def test_an_export_that_loads_back_changed_is_not_written(small_model, tmp_path: Path, monkeypatch) -> None:
    save, name = export_module.save_torch_state_dict, "model.norm.weight"
    changed = small_model.get_parameter(name).detach().clone()
    changed[3] += 1e-6
    for error, change in (("missing_keys", {}), ("different_keys", {name: changed})):

        def flawed(weights: dict, *args: object, change: dict = change, **options: object) -> None:
            save({key: x for key, x in weights.items() if key != name} | change, *args, **options)

        with monkeypatch.context() as patched:
            patched.setattr(export_module, "save_torch_state_dict", flawed)
            with pytest.raises(ValueError, match=rf"{error} \['{name}'\]"):
                export_model(small_model, None, tmp_path / "export")
    small_model.model.layers[0].attn.beta_max = 1.0  # contradicts the config
    with pytest.raises(ValueError, match="logits"):
        export_model(small_model, None, tmp_path / "export")
    assert list(tmp_path.iterdir()) == []


def test_a_folder_with_other_files_is_not_replaced(small_model, export: Path, tmp_path: Path) -> None:
    place = tmp_path / "place"
    place.mkdir()
    for file, text in (
        ("thesis.tex", "dear"), ("config.json", "{}"), ("checksums.json", '{"files": {"data.csv": {}}}')
    ):  # fmt: skip
        (place / file).write_text(text)
        with pytest.raises(ValueError, match="not an exported model"):
            export_model(small_model, None, place)
    assert (place / "thesis.tex").read_text() == "dear"
    (export / "notes").mkdir()
    (export / "notes/mine.txt").write_text("dear")
    (export / "linked").symlink_to(place)
    for name in ("notes", "linked"):
        with pytest.raises(ValueError, match=name):
            export_model(small_model, None, export)
    shutil.rmtree(export / "notes")
    (export / "linked").unlink()
    export_model(small_model, None, export)


def test_copy(export: Path, tmp_path: Path) -> None:
    copy = copy_export(export, tmp_path / "copy")
    assert contents(export) == contents(copy)
    for target in (export, export / "inside"):
        with pytest.raises(ValueError, match="another output"):
            copy_export(export, target)
        with pytest.raises(ValueError, match="another output"):
            convert_export(export, target, dtype=torch.bfloat16)


def test_a_full_disk_leaves_no_export(small_model, tokenizer, export, tmp_path, monkeypatch):
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (40_000, limits[1]))
    try:
        with pytest.raises(OSError, match=r"^\S+ could not be written"):
            export_model(small_model, tokenizer, tmp_path / "new")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)

    def full(start: object, target: object, **options: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(shutil, "copyfile", full)
    with pytest.raises(OSError, match="No space left on device"):
        copy_export(export, tmp_path / "copy")
    assert list(tmp_path.iterdir()) == [export]


def cut(file: Path) -> None:
    os.truncate(file, file.stat().st_size - 1000)


def change(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[-1000] ^= 4  # within the weights
    file.write_bytes(content)


def test_every_file_but_the_card_has_its_checksum(export: Path) -> None:
    listed = json.loads((export / "checksums.json").read_text())["files"]
    files = contents(export)
    assert {"model.safetensors", "config.json", "tokenizer.json", "training.json"} <= listed.keys()
    assert listed.keys() == files.keys() - {"checksums.json", "README.md"}
    for name, entry in listed.items():
        expected = {"bytes": len(files[name]), "sha256": hashlib.sha256(files[name]).hexdigest()}
        assert entry == expected, name
    (export / "README.md").write_text("a better card")
    assert find_export_damage(export) is None


@pytest.mark.parametrize("damage", [Path.unlink, cut, change])
def test_damaged_weights_are_named(damage, export: Path, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_test")
    weights = export / "model.safetensors"
    damage(weights)
    assert find_export_damage(export).startswith(weights.name)
    assert str(weights) in refusal(copy_export, export, tmp_path / "copy")
    assert not (tmp_path / "copy").exists()
    assert str(weights) in refusal(push, export, "user/tiny")
    assert str(weights) in refusal(load_model, export)


@pytest.mark.parametrize("data", ["text", "task"])
def test_the_cards_code_runs(data: str, small_model, tokenizer, tmp_path: Path) -> None:
    mamba = SignedMambaForCausalLM(SignedMambaConfig(vocab_size=5, hidden_size=16, num_hidden_layers=1))
    model, with_tokenizer = (small_model, tokenizer) if data == "text" else (mamba, None)
    info = CardInfo(seq_len=64)
    card = (export_model(model, with_tokenizer, tmp_path / "export", info) / "README.md").read_text()
    blocks = re.findall(r"```python\n(.*?)```", card, re.S)
    assert "trust_remote_code=True" in blocks[0]
    assert len(blocks) == (2 if data == "text" else 1)
    names: dict = {}
    exec("".join(blocks).replace("user/model", str(tmp_path / "export")), names)
    assert type(names["model"]) is type(model)
    assert data == "task" or names["ids"][0, 0] == tokenizer.eos_token_id  # as before documents in training


def test_links_out_of_an_export_are_not_followed(export: Path, tmp_path: Path, monkeypatch) -> None:
    """To a file or a folder. Links in the Hub's cache lead to its blobs."""
    monkeypatch.setenv("HF_TOKEN", "hf_test")
    snapshot = tmp_path / "snapshots/commit"
    snapshot.parent.mkdir()
    export.rename(snapshot)
    (tmp_path / "secret").write_text("a key")
    for name, target in (("notes.txt", "../../secret"), ("plot.png", "../../secret"), ("up", "..")):
        (snapshot / name).symlink_to(target)
        for copy in (copy_export, convert_export):
            with pytest.raises(ValueError, match=name):
                copy(snapshot, tmp_path / "copy")
        with pytest.raises(ValueError, match=name):
            push(snapshot, "user/model")
        (snapshot / name).unlink()
    (tmp_path / "blobs").mkdir()
    (snapshot / "config.json").rename(tmp_path / "blobs" / "0a")
    (snapshot / "config.json").symlink_to("../../blobs/0a")
    assert find_export_damage(copy_export(snapshot, tmp_path / "copy")) is None
    assert not (tmp_path / "copy" / "config.json").is_symlink()
