"""`format=olmo_hybrid` against transformers' own class: logits, generation, both ways, refusals, recipes."""

import warnings
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, OlmoHybridConfig, OlmoHybridForCausalLM

from fla_train.hub.convert import convert_export
from fla_train.hub.export import export_model
from fla_train.hub.formats import olmo_hybrid
from fla_train.hub.load import load_causal_lm, load_model
from fla_train.models.configuration import DeltaProductConfig
from fla_train.models.modeling import DeltaProductForCausalLM

LAYERS = ["linear_attention", "full_attention"]
SIZE = {"vocab_size": 320, "hidden_size": 32, "num_hidden_layers": 2, "intermediate_size": 48}


def ours(**settings: object) -> DeltaProductForCausalLM:
    """Grouped value heads, keys and values of unequal sizes, grouped queries."""
    fields = SIZE | olmo_hybrid.IMPLIED | {
        "num_heads": 2, "num_v_heads": 4, "head_dim": 12, "expand_v": 1.5, "layer_types": LAYERS,
        "num_attention_heads": 4, "num_key_value_heads": 2, "rope_theta": None, "initializer_range": 0.1,
    }  # fmt: skip
    return randomised(DeltaProductForCausalLM(DeltaProductConfig(**(fields | settings))))


@torch.no_grad()
def randomised(model):
    """Norm weights of 1 and equal biases would hide an exchange of layers."""
    for parameter in model.parameters():
        parameter.add_(0.1 * torch.randn_like(parameter))
    return model.eval()


@torch.no_grad()
def assert_equal_logits(model, other):
    ids = torch.randint(0, 320, (2, 70))
    mask = torch.ones(2, 70, dtype=torch.long)
    mask[1, :9] = 0
    found, expected = (m(ids, attention_mask=mask).logits[mask.bool()] for m in (model, other))
    assert (found - expected).abs().max() <= 1e-5 * expected.abs().max()


@pytest.mark.parametrize(
    "settings",
    [{}, {"rope_theta": 100.0, "num_v_heads": None, "allow_neg_eigval": False, "tie_word_embeddings": True}],
    ids=["grouped", "rotary_tied"],
)
def test_transformers_runs_an_export_and_it_comes_back(settings, tmp_path: Path, tokenizer):
    model = ours(**settings)
    export_model(model, tokenizer, tmp_path / "ours")
    folder = convert_export(tmp_path / "ours", tmp_path / "theirs", "olmo_hybrid")
    theirs, report = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert type(theirs) is OlmoHybridForCausalLM and not any(report.values())
    assert_equal_logits(theirs, model)
    prompt = {"input_ids": torch.arange(9)[None], "attention_mask": torch.ones(1, 9, dtype=torch.long)}
    greedy = {"max_new_tokens": 12, "do_sample": False, "eos_token_id": None}
    assert torch.equal(theirs.generate(**prompt, **greedy), model.generate(**prompt, **greedy))
    with pytest.warns(UserWarning, match="OlmoHybridForCausalLM"):  # not ours, which the kernels run
        load_model(folder)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        load_model(tmp_path / "ours")
    back = convert_export(folder, tmp_path / "back", "hf")
    assert (back / "model.safetensors").read_bytes() == (tmp_path / "ours/model.safetensors").read_bytes()
    before, after = (DeltaProductConfig.from_pretrained(path) for path in (tmp_path / "ours", back))
    assert after.to_dict() == before.to_dict()


def test_a_model_of_transformers_loads_as_ours(tmp_path: Path):
    config = OlmoHybridConfig(
        **SIZE, num_attention_heads=2, layer_types=LAYERS, linear_key_head_dim=7, linear_value_head_dim=61,
        linear_num_value_heads=6, eos_token_id=None, pad_token_id=None,
    )  # fmt: skip
    theirs = randomised(OlmoHybridForCausalLM(config))
    export_model(theirs, None, tmp_path / "modules")  # the names of its modules
    theirs.save_pretrained(tmp_path / "saved")  # and those of transformers' files
    for folder in ("modules", "saved"):
        model = load_causal_lm(tmp_path / folder, translate=True)
        assert isinstance(model, DeltaProductForCausalLM) and model.config.rope_theta == 10000.0
        assert_equal_logits(model, theirs)


@pytest.mark.parametrize(
    ("settings", "names"),
    [
        ({"num_householder": 2, "use_forget_gate": False}, ["num_householder", "use_forget_gate"]),
        ({"o_norm_eps": None, "use_qk_norm": False}, ["o_norm_eps", "use_qk_norm"]),
        ({"layer_types": ["linear_attention", "sliding_attention"], "sliding_window": 8}, ["layer_types"]),
    ],
)  # fmt: skip
def test_a_setting_without_a_counterpart_is_named(settings, names):
    with pytest.raises(ValueError) as caught:
        olmo_hybrid.from_ours(ours(**settings).config, {})
    assert all(f"{name}=" in str(caught.value) or f"{name} has" in str(caught.value) for name in names)


@pytest.mark.parametrize(
    "setting",
    [{"attention_bias": True}, {"hidden_act": "gelu"}, {"head_dim": 8}, {"attention_dropout": 0.1},
     {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}}],
)  # fmt: skip
def test_a_setting_that_we_lack_is_named(setting):
    content = SIZE | {"num_attention_heads": 2, "layer_types": LAYERS} | setting
    with pytest.raises(ValueError, match=next(iter(setting))):
        olmo_hybrid.to_ours(content, {})
