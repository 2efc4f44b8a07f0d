"""Translate flash-linear-attention's checkpoints to ours and back, without that package."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub import save_torch_state_dict
from torch import Tensor

from fla_train.hub.card import CardInfo
from fla_train.hub.convert import convert_export
from fla_train.hub.export import export_model
from fla_train.hub.formats import fla
from fla_train.hub.load import load_causal_lm, load_model, trained_length
from fla_train.models.configuration import DeltaProductConfig
from fla_train.models.modeling import DeltaProductForCausalLM

SIZE = {"vocab_size": 320, "hidden_size": 48, "num_hidden_layers": 3, "num_heads": 3}
HEADS = {"head_dim": 16, "expand_v": 1.5}
DELTA_NET: dict[str, Any] = {"model_type": "delta_net", **SIZE}
GATED: dict[str, Any] = {"model_type": "gated_deltanet", **SIZE, **HEADS}
PRODUCT: dict[str, Any] = {"model_type": "gated_deltaproduct", **SIZE, **HEADS}
FULL = {"layers": [1], "num_heads": 4, "num_kv_heads": 2}
WINDOW = {"layers": [0], "num_heads": 4, "num_kv_heads": 2, "window_size": 5}
WIDE = {"expand_k": 1.5, "expand_v": 2.0, "allow_neg_eigval": True, "intermediate_size": 80}
# The content of config.json, by flash-linear-attention's names
CONTENTS = {
    "delta_net": DELTA_NET,
    "delta_net_wide": DELTA_NET | WIDE | {"use_gate": True},
    "gated_deltanet": GATED,
    "gated_deltanet_grouped": GATED | {"num_v_heads": 6},
    "gated_deltanet_tied": GATED | {"use_gate": False, "tie_word_embeddings": True, "use_short_conv": False},
    "gated_deltaproduct_2": PRODUCT
    | {"num_householder": 2, "use_forget_gate": True, "conv_size": 3, "norm_eps": 1e-5},
    "deltaproduct_3": PRODUCT | {"num_householder": 3, "allow_neg_eigval": True, "use_output_gate": False},
    "hybrid": GATED | {"attn": {**FULL, "rope_theta": 5e5}},
    "hybrid_windows": DELTA_NET | {"attn": [FULL, WINDOW]},
}
BY_NAME = pytest.mark.parametrize("name", CONTENTS)


def model_of(name: str) -> DeltaProductForCausalLM:
    """Return a model with weights so large that every module affects the logits."""
    torch.manual_seed(0)
    config, _ = fla.to_ours({**CONTENTS[name], "initializer_range": 0.2}, {})
    return DeltaProductForCausalLM(config)


@BY_NAME
def test_round_trip(name: str) -> None:
    """In both directions."""
    model = model_of(name)
    ours = model.state_dict()
    content, state = fla.from_ours(model.config, ours)
    given = {key: value for key, value in CONTENTS[name].items() if key != "attn"}
    assert {key: content[key] for key in given} == given
    config, weights = fla.to_ours(content, state)
    assert config.to_dict() == model.config.to_dict()
    assert fla.from_ours(config, weights)[0] == content
    assert weights.keys() == ours.keys() and all(weights[key] is tensor for key, tensor in ours.items())


@BY_NAME
def test_its_own_classes_have_these_weights_and_defaults(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("fla.models", reason="flash-linear-attention is not installed")
    from transformers import AutoConfig, AutoModelForCausalLM

    monkeypatch.setattr("fla.layers.attn.flash_attn_func", print)  # asked for by the constructor
    theirs = AutoConfig.for_model(**CONTENTS[name])
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(theirs)
    content, state = fla.from_ours(model_of(name).config, model_of(name).state_dict())
    theirs_state = model.state_dict()
    assert {n: t.shape for n, t in theirs_state.items()} == {n: t.shape for n, t in state.items()}
    assert content["architectures"] == [type(model).__name__]
    back = AutoConfig.for_model(**content)
    ignored = ("architectures", "intermediate_size", "initializer_range", "dtype")
    assert {k: v for k, v in back.to_dict().items() if k not in ignored} == {
        k: v for k, v in theirs.to_dict().items() if k not in ignored
    }


@pytest.mark.parametrize("key_dim", [49, 96, 107, 128])
def test_any_ratio_of_head_sizes(key_dim: int) -> None:
    for value_dim in range(1, 2 * key_dim):
        size = {"hidden_size": key_dim, "num_heads": 1, "num_hidden_layers": 1, "expand_k": 1.0}
        content = {"model_type": "delta_net", **size, "expand_v": value_dim / key_dim}
        config, _ = fla.to_ours(content, {})
        assert config.head_v_dim == value_dim
        ratio = fla.from_ours(config, {})[0]["expand_v"]
        assert ratio == pytest.approx(content["expand_v"], rel=1e-9)
        assert int(key_dim * ratio) == value_dim  # as its layer computes the size


@pytest.mark.parametrize(
    ("name", "setting"),
    [
        ("delta_net", {"use_beta": False}),
        ("gated_deltanet", {"output_gate_activation": "sigmoid"}),
        ("hybrid", {"attn": {**FULL, "qkv_bias": True}}),
        ("hybrid", {"attn": [FULL, {**WINDOW, "num_kv_heads": 4}]}),
    ],
)
def test_settings_that_we_lack_are_named(name: str, setting: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(setting))):
        fla.to_ours({**CONTENTS[name], **setting}, {})


@pytest.mark.parametrize(
    "setting",
    [
        {"hidden_act": "gelu"},
        {"mixer": "package.module:Class"},
        {"num_v_heads": 16, "num_householder": 2},
        {"rope_theta": None, "layer_types": ["linear_attention", "full_attention"]},
    ],
)
def test_settings_that_it_lacks_are_named(setting: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(setting))):
        fla.from_ours(DeltaProductConfig(**setting), {})


@torch.no_grad()
def logits(model: DeltaProductForCausalLM) -> Tensor:
    return model.eval()(torch.arange(40).view(2, 20) * 7 % 320).logits


@pytest.mark.parametrize("name", ["gated_deltanet_grouped", "deltaproduct_3", "hybrid_windows"])
def test_export_and_back(name: str, tokenizer, tmp_path: Path, run_command: Callable) -> None:
    """To flash-linear-attention's format and back by the command: the same logits bit for bit."""
    model, card = model_of(name), CardInfo(name="small", seq_len=77)
    export_model(model, tokenizer, tmp_path / "ours", card)
    for source, format, target in (("ours", "fla", "theirs"), ("theirs", "hf", "back")):
        words = f"checkpoint={tmp_path}/{source}", f"format={format}", f"output={tmp_path}/{target}"
        assert run_command("fla-export", *words)[0] == 0
    content = json.loads((tmp_path / "theirs/config.json").read_text())
    assert content["model_type"] == CONTENTS[name]["model_type"]
    assert "import fla.models" in (tmp_path / "theirs/README.md").read_text()
    for folder in ("theirs", "back"):
        loaded, words = load_model(tmp_path / folder)
        assert torch.equal(logits(loaded), logits(model)), folder
        assert trained_length(loaded) == 77
        assert words("a state").input_ids == tokenizer("a state").input_ids
        assert loaded.generation_config.eos_token_id == tokenizer.eos_token_id
    assert (tmp_path / "back/config.json").read_bytes() == (tmp_path / "ours/config.json").read_bytes()


@pytest.mark.parametrize("safe", [True, False])
def test_a_foreign_checkpoint_from_the_hub(safe: bool, tokenizer, tmp_path: Path, monkeypatch) -> None:
    """As flash-linear-attention saves one: several files, or one of torch, in bf16, with an unused weight."""
    model = model_of("gated_deltanet").bfloat16()
    repository = tmp_path / "cache/models--user--tiny"
    folder = repository / "snapshots" / ("1" * 40)
    folder.mkdir(parents=True)
    (repository / "refs").mkdir()
    (repository / "refs/main").write_text("1" * 40)
    (folder / "config.json").write_text(json.dumps({**CONTENTS["gated_deltanet"], "torch_dtype": "bfloat16"}))
    tokenizer.save_pretrained(folder)
    state = model.state_dict() | {"model.layers.0.attn.D": torch.ones(3)}
    if safe:
        save_torch_state_dict(state, folder, max_shard_size="50KB")
    else:
        torch.save(state, folder / "pytorch_model.bin")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    loaded = load_causal_lm("user/tiny")
    assert loaded.dtype == torch.bfloat16 and torch.equal(logits(loaded), logits(model))
    ours = load_model(convert_export("user/tiny", tmp_path / "ours", "hf"))[0]
    assert ours.dtype == torch.bfloat16 and torch.equal(logits(ours), logits(model))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda state: state.pop("model.layers.1.attn.g_proj.weight"), "g_proj"),
        (lambda state: state.update({"model.layers.1.attn.more.weight": torch.ones(2)}), "more"),
        (lambda state: state.update({"lm_head.weight": torch.ones(2, 2)}), "lm_head"),
    ],
)
def test_weights_that_do_not_fit(damage: Callable, message: str, tmp_path: Path) -> None:
    state = model_of("gated_deltanet").state_dict()
    damage(state)
    (tmp_path / "config.json").write_text(json.dumps(CONTENTS["gated_deltanet"]))
    save_torch_state_dict(state, tmp_path)
    with pytest.raises(ValueError, match=message):
        load_causal_lm(tmp_path)


def test_a_run_keeps_the_class_that_it_trained(tmp_path: Path) -> None:
    """An export of `model=fla/...` is read by that class, unless it is translated."""
    record = CardInfo(config="model: {source: fla, model_type: gated_deltanet}\n")
    folder = export_model(model_of("gated_deltanet"), None, tmp_path / "theirs", record, format="fla")
    ours = load_causal_lm(convert_export(folder, tmp_path / "ours", "hf"))
    assert isinstance(ours, DeltaProductForCausalLM)
    try:
        assert type(load_causal_lm(folder)).__module__.startswith("fla.")
    except ValueError as refusal:
        assert "pip install flash-linear-attention" in str(refusal)
