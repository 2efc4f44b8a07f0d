"""Finding and loading checkpoints; what goes wrong says in one line what to do."""

import shutil
from pathlib import Path

import huggingface_hub
import pytest
import torch

from fla_train.hub import CardInfo, export_model, load_model, resolve_checkpoint
from fla_train.hub.convert import convert_export
from fla_train.hub.load import document_prefix, recorded_length, trained_length
from fla_train.hub.paths import run_folder
from fla_train.utils.device import pick_device, pick_dtype
from tests.refusal import refusal


@pytest.fixture
def run(small_model, tokenizer, tmp_path: Path) -> Path:
    for step in ("step-0000900", "step-0001000", "step-10000000"):
        card = CardInfo(seq_len=77, config="data: {}\n")
        export_model(small_model, tokenizer, tmp_path / "run/hf" / step, card, validate=False)
    (tmp_path / "run/hf/step-20000000").mkdir()  # no config.json: not an export
    return tmp_path / "run"


def test_resolve(run: Path) -> None:
    newest = run / "hf/step-10000000"
    assert resolve_checkpoint(run) == newest
    assert resolve_checkpoint(run / "hf") == newest
    assert resolve_checkpoint(str(run / "hf/step-0000900")) == run / "hf/step-0000900"
    assert resolve_checkpoint("some-user/some.model-1b") == "some-user/some.model-1b"
    assert run_folder(newest) == run
    assert run_folder("some-user/some.model-1b") is None


@pytest.mark.parametrize(
    "name", ["absent", "./user/model", "../model", "user/..", "/user/model", "a/b/c", "user/"]
)
def test_resolve_what_is_not_there(name: str, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match="does not exist: give a run folder"):
        resolve_checkpoint(name)


def test_resolve_a_path_that_only_looks_like_a_hub_name(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs").mkdir()
    with pytest.raises(ValueError, match="runs/first does not exist"):
        resolve_checkpoint("runs/first")
    (tmp_path / "runs/first").mkdir()
    with pytest.raises(ValueError, match="no exported model in runs/first"):
        resolve_checkpoint("runs/first")


def test_load(run: Path, small_model) -> None:
    model, tokenizer = load_model(run, dtype=torch.float64)
    assert not model.training and model.dtype == torch.float64
    assert torch.equal(model.lm_head.weight, small_model.lm_head.weight.double())
    assert recorded_length(model) == trained_length(model) == 77
    assert document_prefix(model, tokenizer) == [tokenizer.eos_token_id]


def test_positions_are_no_training_length(small_model) -> None:
    small_model.config.max_position_embeddings = 32
    assert recorded_length(small_model) is None and trained_length(small_model) == 32
    del small_model.config.max_position_embeddings
    assert recorded_length(small_model) is None and trained_length(small_model) == 2048


def test_a_model_from_the_hub_has_its_training_record_too(run: Path, tmp_path: Path, monkeypatch) -> None:
    commit, repository = "1" * 40, tmp_path / "cache/models--user--tiny"
    shutil.copytree(run / "hf/step-10000000", repository / "snapshots" / commit)
    (repository / "refs").mkdir()
    (repository / "refs/main").write_text(commit)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    model, tokenizer = load_model("user/tiny")
    assert trained_length(model) == 77
    assert document_prefix(model, tokenizer) == [tokenizer.eos_token_id]
    (repository / "snapshots" / commit / "training.json").unlink()
    assert recorded_length(model) is None
    assert document_prefix(model, tokenizer) == [tokenizer.eos_token_id]  # by its config
    del model.config.document_prefix  # as before 2026-11-28
    assert document_prefix(model, tokenizer) == [tokenizer.bos_token_id]


@pytest.mark.parametrize("kept", ["eos", "nothing"])
def test_other_ways_of_saving_keep_what_stands_before_a_document(
    run: Path, tmp_path: Path, kept: str
) -> None:
    """`save_pretrained`, as of Trainer and TRL, writes no training record; a translation keeps the record."""
    model, tokenizer = load_model(run)
    text = "data: {append_eos: false}\n" if kept == "nothing" else "data: {}\n"
    export_model(model, tokenizer, tmp_path / "ours", CardInfo(config=text))
    expected = [] if kept == "nothing" else [tokenizer.eos_token_id]
    model, tokenizer = load_model(tmp_path / "ours")
    model.save_pretrained(tmp_path / "saved")
    tokenizer.save_pretrained(tmp_path / "saved")
    convert_export(tmp_path / "ours", tmp_path / "fla", "fla")
    convert_export(tmp_path / "fla", tmp_path / "back", "hf")
    convert_export(tmp_path / "saved", tmp_path / "saved-fla", "fla")
    convert_export(tmp_path / "saved-fla", tmp_path / "saved-back", "hf")
    for name in ("saved", "fla", "back", "saved-fla", "saved-back"):
        assert document_prefix(*load_model(tmp_path / name)) == expected


def test_a_conversion_of_anothers_model_does_not_make_it_ours(small_model, tokenizer, tmp_path: Path) -> None:
    export_model(small_model, tokenizer, tmp_path / "fla", format="fla")
    for name in ("training.json", "checksums.json"):
        (tmp_path / "fla" / name).unlink()
    convert_export(tmp_path / "fla", tmp_path / "hf", "hf")
    for name in ("fla", "hf"):
        assert document_prefix(*load_model(tmp_path / name)) == [tokenizer.bos_token_id]


def test_document_prefix_of_other_models(small_model, tokenizer) -> None:
    assert document_prefix(small_model, tokenizer) == [tokenizer.bos_token_id]
    tokenizer.bos_token = None
    assert document_prefix(small_model, tokenizer) == [tokenizer.eos_token_id]
    tokenizer.eos_token = None
    assert document_prefix(small_model, tokenizer) == []


def test_without_separators_in_training_nothing_stands_before_a_document(
    small_model, tokenizer, tmp_path: Path
) -> None:
    for name, text in (("no", "data: {append_eos: false}"), ("yes", "data: {append_eos: true}")):
        export_model(small_model, tokenizer, tmp_path / name, CardInfo(config=text + "\n"))
    assert document_prefix(*load_model(tmp_path / "no")) == []
    assert document_prefix(*load_model(tmp_path / "yes")) == [tokenizer.eos_token_id]


def test_a_model_of_a_task_has_no_tokenizer(small_model, tmp_path: Path) -> None:
    export_model(small_model, None, tmp_path / "model")
    line = refusal(load_model, tmp_path / "model")
    assert "has no tokenizer" in line and "suite=expressivity" in line


def test_a_training_record_cut_short(run: Path) -> None:
    record = run / "hf/step-10000000/training.json"
    record.write_text(record.read_text()[:20])
    (record.parent / "checksums.json").unlink()  # as in an export of an earlier version
    assert f"{record} is damaged" in refusal(trained_length, load_model(run)[0])


@pytest.mark.parametrize(
    "content", ['{"config": {"lr": 0.1}, "name": 3}', '{"name": 3}', '{"config": "a.yaml"}']
)
def test_a_training_json_of_another_program_is_no_record(run: Path, content: str, tmp_path: Path) -> None:
    source = convert_export(run / "hf/step-10000000", tmp_path / "theirs", "fla")
    (source / "training.json").write_text(content)
    (source / "checksums.json").unlink()
    model, _ = load_model(source)
    assert recorded_length(model) is None
    load_model(convert_export(source, tmp_path / "ours", "hf"))


@pytest.mark.parametrize("content", ["[1]", "[]", "3", "null"])
def test_a_config_that_is_no_object(run: Path, content: str, tmp_path: Path) -> None:
    source = run / "hf/step-10000000"
    (source / "config.json").write_text(content)
    (source / "checksums.json").unlink()
    for line in (refusal(load_model, source), refusal(convert_export, source, tmp_path / "copy")):
        assert f"{source}/config.json is damaged" in line


def test_a_weight_missing_is_not_drawn_at_random(run: Path) -> None:
    from safetensors.torch import load_file, save_file

    weights = run / "hf/step-10000000/model.safetensors"
    tensors = load_file(weights)
    del tensors["model.norm.weight"]
    save_file(tensors, weights, metadata={"format": "pt"})
    (weights.parent / "checksums.json").unlink()
    with pytest.raises(ValueError, match=r"lacks weights: model\.norm\.weight"):
        load_model(run)


def test_a_hub_name_without_network() -> None:
    assert "the Hub did not give it" in refusal(load_model, "some-user/absent-model")


def test_device_and_dtype_by_name() -> None:
    assert pick_device("cpu") == "cpu"
    assert pick_dtype("bfloat16") == torch.bfloat16 and pick_dtype("auto") is None
    with pytest.raises(ValueError, match="device=nonsense cannot be used here"):
        pick_device("nonsense")
    if not torch.cuda.is_available():
        assert pick_device("auto") == "cpu"
        with pytest.raises(ValueError, match="try device=cpu"):
            pick_device("cuda")
    with pytest.raises(ValueError, match="dtype=int8 must be one of"):
        pick_dtype("int8")
