"""Find and load checkpoints; errors are one line."""

import json
import os
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from fla_train.hub.card import CardInfo
from fla_train.hub.checkpoint_config import resolve_checkpoint
from fla_train.hub.convert import convert_export
from fla_train.hub.export import export_model
from fla_train.hub.load import document_prefix, load_model, recorded_length, trained_length
from fla_train.hub.paths import last_component, run_folder
from tests.refusal import refusal


def test_resolve(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run, newest = tmp_path / "run", tmp_path / "run/hf/step-10000000"
    for step in ("0000900", "0001000", "10000000"):
        (run / f"hf/step-{step}").mkdir(parents=True)
        (run / f"hf/step-{step}/config.json").touch()
    (run / "hf/step-20000000").mkdir()  # not an export
    (run / "eval/first").mkdir(parents=True)
    assert resolve_checkpoint(run) == resolve_checkpoint(run / "hf") == newest
    assert resolve_checkpoint(str(run / "hf/step-0000900")) == run / "hf/step-0000900"
    assert resolve_checkpoint("some-user/some.model-1b") == "some-user/some.model-1b"
    assert run_folder(newest) == run and run_folder("some-user/some.model-1b") is None
    (tmp_path / "linked").symlink_to(run)
    assert last_component(tmp_path / "linked") == "linked"
    for inside in ("eval", "eval/first", "hf", "hf/step-10000000"):
        monkeypatch.chdir(run / inside)
        up = "/".join([".."] * (1 + inside.count("/")))
        for checkpoint in (up, f"{up}/hf", "." if inside.startswith("hf") else up):
            source = resolve_checkpoint(checkpoint)
            assert (run_folder(source), last_component(source)) == (run, newest.name)


def test_resolve_what_does_not_exist(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs").mkdir()
    names = "absent ./user/model ../model user/.. /user/model a/b/c user/ runs/first"
    for name in names.split():
        assert f"{name} does not exist" in refusal(resolve_checkpoint, name)
    (tmp_path / "runs/first").mkdir()
    assert "no exported model in runs/first" in refusal(resolve_checkpoint, "runs/first")
    assert "the Hub did not deliver it" in refusal(load_model, "some-user/absent-model")


def test_load(export: Path, small_model) -> None:
    model, tokenizer = load_model(export, dtype=torch.float64)
    assert not model.training and model.dtype == torch.float64
    assert recorded_length(model) == trained_length(model) == 77
    assert document_prefix(model, tokenizer) == [tokenizer.eos_token_id]
    small_model.config.max_position_embeddings = 32  # is not a training length
    assert recorded_length(small_model) is None and trained_length(small_model) == 32


def test_a_model_from_the_hub_has_its_training_record(export: Path, tmp_path: Path) -> None:
    commit, repository = "1" * 40, tmp_path / "cache/models--user--tiny"
    shutil.copytree(export, repository / "snapshots" / commit)
    (repository / "refs").mkdir()
    (repository / "refs/main").write_text(commit)
    model, tokenizer = load_model("user/tiny")
    assert trained_length(model) == 77
    (repository / "snapshots" / commit / "training.json").unlink()
    assert recorded_length(model) is None
    assert document_prefix(model, tokenizer) == [tokenizer.eos_token_id]  # from its config


@pytest.mark.parametrize("append_eos", [True, False])
def test_other_ways_of_saving_keep_the_tokens_before_a_document(small_model, tokenizer, tmp_path, append_eos):
    """`save_pretrained`, of Trainer and TRL, writes no training record; a translation keeps the record."""
    config = f"data: {{append_eos: {str(append_eos).lower()}}}\n"
    export_model(small_model, tokenizer, tmp_path / "ours", CardInfo(config=config))
    model, tokenizer = load_model(tmp_path / "ours")
    model.save_pretrained(tmp_path / "saved")
    tokenizer.save_pretrained(tmp_path / "saved")
    convert_export(tmp_path / "ours", tmp_path / "fla", "fla")
    convert_export(tmp_path / "saved", tmp_path / "saved-fla", "fla")
    convert_export(tmp_path / "saved-fla", tmp_path / "saved-back", "hf")
    for name in ("ours", "saved", "fla", "saved-fla", "saved-back"):
        expected = [tokenizer.eos_token_id] if append_eos else []
        assert document_prefix(*load_model(tmp_path / name)) == expected, name


def test_a_conversion_of_another_model_gets_no_training_record(small_model, tokenizer, tmp_path):
    export_model(small_model, tokenizer, tmp_path / "fla", format="fla")
    for name in ("training.json", "checksums.json"):
        (tmp_path / "fla" / name).unlink()
    convert_export(tmp_path / "fla", tmp_path / "hf", "hf")
    for name in ("fla", "hf"):
        assert document_prefix(*load_model(tmp_path / name)) == [tokenizer.bos_token_id]
    tokenizer.bos_token = None
    assert document_prefix(small_model, tokenizer) == [tokenizer.eos_token_id]
    tokenizer.eos_token = None
    assert document_prefix(small_model, tokenizer) == []


def test_training_records_that_are_damaged_or_of_another_program(export: Path) -> None:
    record = export / "training.json"
    (export / "checksums.json").unlink()
    model, _ = load_model(export)
    record.write_text(record.read_text()[:20])
    assert f"{record} is damaged" in refusal(trained_length, model)
    for content in ('{"config": {"lr": 0.1}, "name": 3}', '{"name": 3}', '{"config": "a.yaml"}'):
        record.write_text(content)
        assert recorded_length(model) is None


FOREIGN = {  # files of a model's folder, with changes to them
    "quantization": ("config.json", {"quantization_config": {"quant_method": "gptq", "bits": 4}}),
    "dtype": ("config.json", {"dtype": "os.system"}),
    "tokenizer": ("tokenizer.json", {"model": {"type": "BPE", "vocab": {}, "merges": [["a"]]}}),
    "pickle": ("pytorch_model.bin", None),
}


@pytest.mark.parametrize("name", FOREIGN)
def test_a_foreign_model_is_one_line(name: str, export: Path) -> None:
    """The line names the folder, and gives no advice to run code."""
    (export / "checksums.json").unlink()
    file, changes = FOREIGN[name]
    if changes is None:
        torch.save({"weight": os.getcwd}, export / file)
        (export / "model.safetensors").unlink()
    else:
        (export / file).write_text(json.dumps(json.loads((export / file).read_text()) | changes))
    try:
        load_model(export)
    except ValueError as failure:
        assert str(export) in str(failure) and "\n" not in str(failure)
        assert "weights_only" not in str(failure)


def test_a_missing_weight_is_not_drawn_at_random(export: Path) -> None:
    weights = export / "model.safetensors"
    tensors = load_file(weights)
    del tensors["model.norm.weight"]
    save_file(tensors, weights, metadata={"format": "pt"})
    (export / "checksums.json").unlink()
    with pytest.raises(ValueError, match=r"model\.norm\.weight"):
        load_model(export)
