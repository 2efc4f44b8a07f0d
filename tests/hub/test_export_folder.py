"""An export is complete or absent, loads through the Auto classes, and computes what the model computed."""

import errno
import json
import os
import re
import resource
import shutil
from pathlib import Path

import pytest
import torch
import yaml
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from fla_train.hub import CardInfo, copy_export, export_model, find_export_damage, load_model, push
from fla_train.hub import export as export_module
from fla_train.hub.convert import convert_export
from fla_train.models import DeltaProductConfig, DeltaProductForCausalLM
from fla_train.models.zoo.mamba import SignedMambaConfig, SignedMambaForCausalLM

IDS = torch.tensor([[5, 7, 300, 11, 2, 9]])


def test_auto_classes_load_equal_logits(model: PreTrainedModel, tokenizer, tmp_path: Path) -> None:
    folder = export_model(model, tokenizer, tmp_path / "export")
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


def test_token_ids_and_settings_of_generation_stay_the_models_own(tokenizer, tmp_path: Path) -> None:
    """The tokenizer gives what a model leaves open; a conversion keeps what was published."""
    sizes = {"vocab_size": 320, "hidden_size": 16, "num_hidden_layers": 1, "num_heads": 1, "head_dim": 16}
    config = DeltaProductConfig(**sizes, intermediate_size=16, eos_token_id=9, pad_token_id=7)
    folder = export_model(DeltaProductForCausalLM(config), tokenizer, tmp_path / "given")
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
    with pytest.raises(ValueError, match="another output"):
        convert_export(folder, folder, dtype=torch.bfloat16)


def test_given_weights_are_written_in_place_of_the_models_own(model: PreTrainedModel, tmp_path: Path) -> None:
    # As ZeRO gathers them: fp32 masters of a bf16 model, tied tensors in separate storage.
    masters = {name: t.clone() for name, t in model.state_dict().items()}
    model.to(torch.bfloat16)
    loaded = AutoModelForCausalLM.from_pretrained(
        export_model(model, None, tmp_path / "export", state_dict=masters)
    )
    for name, tensor in masters.items():
        assert torch.equal(loaded.state_dict()[name], tensor), name


def test_views_of_one_buffer_are_written_as_separate_weights(small_model, tmp_path: Path) -> None:
    """ZeRO's parameters are such views; safetensors would take them for shared weights."""
    state = small_model.state_dict()
    flat = torch.cat([t.flatten() for t in state.values()])
    sizes = [t.numel() for t in state.values()]
    views = {n: v.view_as(state[n]) for n, v in zip(state, flat.split(sizes), strict=True)}
    loaded = AutoModelForCausalLM.from_pretrained(
        export_model(small_model, None, tmp_path / "export", state_dict=views)
    )
    assert [n for n, t in loaded.state_dict().items() if not torch.equal(t, state[n])] == []


@pytest.mark.gpu
@pytest.mark.parametrize(("model_on", "weights_on"), [("cuda", "cpu"), ("cpu", "cuda"), ("cuda", "cuda")])
def test_model_and_weights_on_any_device(small_model, tmp_path: Path, model_on: str, weights_on: str) -> None:
    state = {name: t.clone().to(weights_on) for name, t in small_model.state_dict().items()}
    small_model.to(model_on)
    folder = export_model(small_model, None, tmp_path / "export", state_dict=state)
    for name, tensor in AutoModelForCausalLM.from_pretrained(folder).state_dict().items():
        assert torch.equal(tensor, state[name].cpu()), name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])  # of the model
def test_bf16_export_keeps_decay_parameters_wide(small_model, tmp_path: Path, dtype: torch.dtype) -> None:
    small_model.to(dtype)
    folder = export_model(small_model, None, tmp_path / "export", dtype=torch.bfloat16)
    loaded = AutoModelForCausalLM.from_pretrained(folder)
    assert loaded.lm_head.weight.dtype == torch.bfloat16
    decay = loaded.model.layers[0].attn.A_log
    assert decay.dtype == torch.float32
    assert torch.equal(decay, small_model.model.layers[0].attn.A_log.float())


def test_training_goes_on_as_if_nothing_had_happened(small_model, tokenizer, tmp_path: Path) -> None:
    small_model.train()
    state = torch.get_rng_state()
    export_model(small_model, tokenizer, tmp_path / "export")
    assert small_model.training and torch.equal(torch.get_rng_state(), state)
    assert small_model.config.architectures is None and small_model.config.eos_token_id is None


def test_an_interrupted_export_leaves_the_former_one(
    small_model, tokenizer, tmp_path: Path, monkeypatch
) -> None:
    folder = tmp_path / "export"

    def interrupted(step: int, left: list[Path]) -> None:
        def interrupt(*args: object) -> None:
            raise KeyboardInterrupt

        with monkeypatch.context() as patched:
            patched.setattr(export_module, "render_card", interrupt)
            with pytest.raises(KeyboardInterrupt):
                export_model(small_model, tokenizer, folder, CardInfo(step=step))
        assert list(tmp_path.iterdir()) == left

    def written() -> int:
        assert list(tmp_path.iterdir()) == [folder]
        return json.loads((folder / "training.json").read_text())["step"]

    interrupted(1, left=[])
    export_model(small_model, tokenizer, folder, CardInfo(step=1))
    interrupted(2, left=[folder])
    assert written() == 1
    (tmp_path / ".writing-export").mkdir()  # what a killed process leaves
    export_model(small_model, tokenizer, folder, CardInfo(step=2))
    assert written() == 2
    folder.rename(tmp_path / ".replaced-export")  # what one leaves that is killed between its two renames
    interrupted(3, left=[folder])
    assert written() == 2


def test_an_export_that_does_not_load_back_is_refused(small_model, tmp_path: Path) -> None:
    weights = dict(small_model.state_dict())
    del weights["model.norm.weight"]
    with pytest.raises(ValueError, match=r"missing_keys \['model.norm.weight'\]"):
        export_model(small_model, None, tmp_path / "export", state_dict=weights)
    assert list(tmp_path.iterdir()) == []


def test_weights_and_settings_that_come_back_changed_are_refused(
    small_model, tmp_path: Path, monkeypatch
) -> None:
    save = export_module.save_torch_state_dict

    def flawed(weights: dict, *args: object, **kwargs: object) -> None:
        changed = weights["model.norm.weight"].clone()
        changed[3] += 1e-6
        save(weights | {"model.norm.weight": changed}, *args, **kwargs)

    with monkeypatch.context() as patched:
        patched.setattr(export_module, "save_torch_state_dict", flawed)
        with pytest.raises(ValueError, match=r"different_keys \['model.norm.weight'\]"):
            export_model(small_model, None, tmp_path / "export")
    small_model.model.layers[0].attn.beta_max = 1.0  # no longer what the config says
    with pytest.raises(ValueError, match="its logits differ"):
        export_model(small_model, None, tmp_path / "export")
    assert list(tmp_path.iterdir()) == []


def test_a_folder_with_other_things_is_not_replaced(small_model, tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("dear")
    with pytest.raises(ValueError, match="not an exported model"):
        export_model(small_model, None, tmp_path)
    (tmp_path / "config.json").write_text('{"editor": 1}')  # of another program
    with pytest.raises(ValueError, match="not an exported model"):
        export_model(small_model, None, tmp_path)
    export = export_model(small_model, None, tmp_path / "export")
    (export / "notes").mkdir()
    with pytest.raises(ValueError, match="holds notes"):
        export_model(small_model, None, export)
    (export / "checksums.json").unlink()  # as after a change of one's own
    with pytest.raises(ValueError, match="holds notes"):
        export_model(small_model, None, export)
    assert (tmp_path / "thesis.tex").read_text() == "dear" and (export / "notes").is_dir()
    (export / "notes").rmdir()
    export_model(small_model, None, export)


def test_a_folder_that_lists_other_files_is_not_replaced(small_model, tmp_path: Path) -> None:
    data = tmp_path / "data.csv"
    data.write_text("dear")
    (tmp_path / "checksums.json").write_text('{"files": {"data.csv": {}}}')
    with pytest.raises(ValueError, match="not an exported model"):
        export_model(small_model, None, tmp_path)
    assert data.is_file()


def test_a_tokenizer_with_several_chat_templates(small_model, tokenizer, tmp_path: Path) -> None:
    tokenizer.chat_template = {"default": "{{ messages }}", "tool_use": "{{ tools }}"}
    template = "additional_chat_templates/tool_use.jinja"
    for _ in range(2):  # the second one replaces the first
        export = export_model(small_model, tokenizer, tmp_path / "export", validate=False)
    assert template in json.loads((export / "checksums.json").read_text())["files"]
    for _ in range(2):
        copy = copy_export(export, tmp_path / "copy")
    assert AutoTokenizer.from_pretrained(copy).chat_template == tokenizer.chat_template
    (copy / template).write_text("{{ tolls }}")
    assert find_export_damage(copy).startswith(template)
    (copy / template).with_name("notes.txt").write_text("dear")
    for _ in range(2):
        with pytest.raises(ValueError, match="notes"):
            copy_export(export, copy)
        (copy / "checksums.json").unlink(missing_ok=True)  # as after a change of one's own
    (copy / template).with_name("notes.txt").unlink()
    copy_export(export, copy)


def test_copy(small_model, tokenizer: PreTrainedTokenizerBase, tmp_path: Path) -> None:
    source = export_model(small_model, tokenizer, tmp_path / "export")
    copy = copy_export(source, tmp_path / "copy")
    assert {f.name: f.read_bytes() for f in source.iterdir()} == {
        f.name: f.read_bytes() for f in copy.iterdir()
    }
    for place in (source, source / "inside"):
        with pytest.raises(ValueError, match="another output"):
            copy_export(source, place)
    export_model(small_model, tokenizer, source / "inside", validate=False)
    with pytest.raises(ValueError, match="another output"):
        copy_export(source / "inside", source)


def test_a_copy_of_any_checkpoint_can_be_replaced(small_model, tokenizer, tmp_path: Path) -> None:
    source = export_model(small_model, tokenizer, tmp_path / "export", validate=False)
    (source / ".cache/huggingface").mkdir(parents=True)  # as `hf download --local-dir` leaves it
    (source / ".gitattributes").write_text("*.safetensors filter=lfs")
    (source / "figures").mkdir()  # of the user's own
    (source / "figures/loss.pdf").write_text("dear")
    for mark in ("nothing", "checksums.json", "training.json"):  # without both it is another library's
        (source / mark).unlink(missing_ok=True)
        for _ in range(2):
            copy = copy_export(source, tmp_path / mark)
        names = {path.name for path in source.iterdir() if not path.name.startswith(".")}
        assert {path.name for path in copy.iterdir()} == names | {"checksums.json"}
        assert find_export_damage(copy) is None and (copy / "figures/loss.pdf").is_file()


def test_a_copy_that_the_disk_refuses_names_the_first_file(
    small_model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = export_model(small_model, None, tmp_path / "export", validate=False)

    def full(start: object, target: object, **options: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(shutil, "copyfile", full)
    with pytest.raises(OSError, match=r"^\S+ could not be written: \[Errno 28\] No space left on device$"):
        copy_export(source, tmp_path / "copy")
    assert [f.name for f in tmp_path.iterdir()] == ["export"]


def test_an_export_to_a_full_disk_is_absent(small_model, tokenizer, tmp_path: Path) -> None:
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (40_000, limits[1]))
    try:
        with pytest.raises(OSError, match=r"^\S+ could not be written"):
            export_model(small_model, tokenizer, tmp_path / "export")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert not list(tmp_path.iterdir())


def test_card(small_model, tokenizer, tmp_path: Path) -> None:
    info = CardInfo(
        name="tiny run",
        data="stdlib",
        tokens=123456,
        seq_len=64,
        losses={"validation": 2.34567},
        config="seed: 0\n",
    )
    card = (export_model(small_model, tokenizer, tmp_path / "export", info) / "README.md").read_text()
    front = yaml.safe_load(card.split("---")[1])
    assert front["pipeline_tag"] == "text-generation" and front["library_name"] == "transformers"
    table = 320 * 32
    total = sum(p.numel() for p in small_model.parameters())
    for expected in (
        f"| parameters | {total:,} |",
        f"| without embeddings | {total - 2 * table:,} |",
        "| training tokens | 123,456 |",
        "| final validation loss (nats per token) | 2.3457 |",
        "trust_remote_code=True",
        "seed: 0",
    ):
        assert expected in card
    (result,) = front["model-index"][0]["results"]
    assert result["metrics"] == [{"type": "validation loss", "value": 2.34567}]


@pytest.mark.parametrize(
    ("settings", "papers"),
    [
        ({"use_forget_gate": False, "allow_neg_eigval": False}, {"2406.06484"}),
        ({"use_forget_gate": True, "allow_neg_eigval": False}, {"2406.06484", "2412.06464"}),
        (
            {"num_householder": 2, "use_forget_gate": True, "allow_neg_eigval": True},
            {"2406.06484", "2412.06464", "2411.12537", "2502.10297"},
        ),
    ],
)
def test_the_card_cites_what_the_model_uses(settings: dict, papers: set[str], tmp_path: Path) -> None:
    shape = {"vocab_size": 8, "hidden_size": 16, "num_hidden_layers": 1, "num_heads": 1, "head_dim": 16}
    model = DeltaProductForCausalLM(DeltaProductConfig(**shape, **settings))
    card = (export_model(model, None, tmp_path / "export", validate=False) / "README.md").read_text()
    assert set(re.findall(r"https://arxiv.org/abs/([\d.]+)", card)) == papers


@pytest.mark.parametrize("kind", ["text", "task"])
def test_the_cards_code_runs(kind: str, small_model, tokenizer, tmp_path: Path) -> None:
    baseline = SignedMambaForCausalLM(SignedMambaConfig(vocab_size=5, hidden_size=16, num_hidden_layers=1))
    model, with_tokenizer = (small_model, tokenizer) if kind == "text" else (baseline, None)
    info = CardInfo(seq_len=64)
    card = (export_model(model, with_tokenizer, tmp_path / "export", info) / "README.md").read_text()
    blocks = re.findall(r"```python\n(.*?)```", card, re.S)
    assert "trust_remote_code=True" in blocks[0]
    assert len(blocks) == (2 if kind == "text" else 1)
    names: dict = {}
    exec("".join(blocks).replace("user/model", str(tmp_path / "export")), names)
    assert type(names["model"]) is type(model)
    assert kind == "task" or names["ids"][0, 0] == tokenizer.eos_token_id  # as before documents in training


def test_links_out_of_an_export_are_not_followed(model: PreTrainedModel, tokenizer, tmp_path: Path) -> None:
    """A file or a folder; those of the Hub's cache lead to its blobs."""
    export = export_model(model, tokenizer, tmp_path / "snapshots" / "commit")
    (tmp_path / "secret").write_text("a key")
    for name, target in (("notes.txt", "../../secret"), ("plot.png", "../../secret"), ("up", "..")):
        (export / name).symlink_to(target)
        for copy in (copy_export, convert_export):
            with pytest.raises(ValueError, match=name):
                copy(export, tmp_path / "copy")
        with pytest.raises(ValueError, match=name):
            push(export, "user/model", token="hf_x")
        (export / name).unlink()
    (tmp_path / "blobs").mkdir()
    (export / "config.json").rename(tmp_path / "blobs" / "0a")
    (export / "config.json").symlink_to("../../blobs/0a")
    assert find_export_damage(copy_export(export, tmp_path / "copy")) is None
    assert not (tmp_path / "copy" / "config.json").is_symlink()


FOREIGN = {  # files of a model's folder, with what is changed in them
    "attention": ("config.json", {"_attn_implementation": "nonsense"}),
    "quantization": ("config.json", {"quantization_config": {"quant_method": "gptq", "bits": 4}}),
    "dtype": ("config.json", {"dtype": "os.system"}),
    "types": ("config.json", {"hidden_size": "many"}),
    "generation": ("generation_config.json", {"cache_config": 3, "watermarking_config": 7}),
    "tokenizer": ("tokenizer.json", {"model": {"type": "BPE", "vocab": {}, "merges": [["a"]]}}),
    "pickle": ("pytorch_model.bin", None),
}


@pytest.mark.parametrize("name", FOREIGN)
def test_foreign_model_is_one_line(name: str, model: PreTrainedModel, tokenizer, tmp_path: Path) -> None:
    """The line names the folder, and gives no advice to run code."""
    folder = export_model(model, tokenizer, tmp_path / "export")
    (folder / "checksums.json").unlink()
    file, changes = FOREIGN[name]
    if changes is None:
        torch.save({"weight": os.getcwd}, folder / file)
        (folder / "model.safetensors").unlink()
    else:
        (folder / file).write_text(json.dumps(json.loads((folder / file).read_text()) | changes))
    try:
        load_model(folder)
    except ValueError as failure:
        assert str(folder) in str(failure) and "\n" not in str(failure)
        assert "weights_only" not in str(failure)
