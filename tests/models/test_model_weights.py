"""Names, initialisation, saving and loading of the weights."""

import math

import pytest
import torch
from small_models import small_config
from transformers import AutoModelForCausalLM

from fla_train.models.modeling import DeltaProductForCausalLM


def test_state_dict_is_the_layout_of_flash_linear_attention():
    model = DeltaProductForCausalLM(small_config(num_hidden_layers=1, expand_v=1.5))
    hidden, vocab, mlp, heads, n, k, v = 16, 31, 24, 2, 2, 8, 12
    expected = {
        "model.embeddings.weight": (vocab, hidden),
        "model.layers.0.attn_norm.weight": (hidden,),
        "model.layers.0.attn.q_proj.weight": (heads * k, hidden),
        "model.layers.0.attn.k_proj.weight": (n * heads * k, hidden),
        "model.layers.0.attn.v_proj.weight": (n * heads * v, hidden),
        "model.layers.0.attn.b_proj.weight": (n * heads, hidden),
        "model.layers.0.attn.a_proj.weight": (heads, hidden),
        "model.layers.0.attn.A_log": (heads,),
        "model.layers.0.attn.dt_bias": (heads,),
        "model.layers.0.attn.q_conv1d.weight": (heads * k, 1, 4),
        "model.layers.0.attn.k_conv1d.weight": (n * heads * k, 1, 4),
        "model.layers.0.attn.v_conv1d.weight": (n * heads * v, 1, 4),
        "model.layers.0.attn.g_proj.weight": (heads * v, hidden),
        "model.layers.0.attn.o_norm.weight": (v,),
        "model.layers.0.attn.o_proj.weight": (hidden, heads * v),
        "model.layers.0.mlp_norm.weight": (hidden,),
        "model.layers.0.mlp.gate_proj.weight": (mlp, hidden),
        "model.layers.0.mlp.up_proj.weight": (mlp, hidden),
        "model.layers.0.mlp.down_proj.weight": (hidden, mlp),
        "model.norm.weight": (hidden,),
        "lm_head.weight": (vocab, hidden),
    }
    assert {name: tuple(t.shape) for name, t in model.state_dict().items()} == expected


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("variant", ["gated_delta_product", "olmo_hybrid"])
def test_save_and_load_keep_every_parameter(tmp_path, build, tokens, variant, tied):
    model = build(variant, tie_word_embeddings=tied).float()
    model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert type(loaded) is DeltaProductForCausalLM
    assert (loaded.lm_head.weight is loaded.model.embeddings.weight) == tied
    saved, found = dict(model.named_parameters()), dict(loaded.named_parameters())
    assert saved.keys() == found.keys()
    assert [name for name in saved if not torch.equal(saved[name], found[name])] == []
    loaded.config.backend = model.config.backend
    with torch.no_grad():
        torch.testing.assert_close(loaded.eval()(tokens).logits, model(tokens).logits)


def test_loading_in_bf16_keeps_the_gate_parameters_in_fp32(tmp_path, build, tokens):
    build().float().save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    mixer = loaded.model.layers[0].attn
    assert mixer.A_log.dtype == mixer.dt_bias.dtype == torch.float32
    assert mixer.q_proj.weight.dtype == torch.bfloat16
    assert loaded.generate(tokens[:, :5], max_new_tokens=3, pad_token_id=0).shape == (3, 8)
    loaded(tokens, labels=tokens).loss.backward()
    assert mixer.A_log.grad.dtype == torch.float32 and mixer.A_log.grad.any()


@pytest.mark.parametrize("tied", [True, False])
def test_options_of_the_initialisation_change_the_layers_they_name_and_no_others(tied):
    """Weights are drawn in the same order, so each layer differs from the default by one factor."""
    sizes = {"hidden_size": 64, "num_hidden_layers": 2, "initializer_range": 0.02}
    kinds = {"tie_word_embeddings": tied, "layer_types": ["linear_attention", "full_attention"]}
    models = []
    for options in ({}, {"scale_output_init": True, "embedding_init_std": 0.5}):
        torch.manual_seed(0)
        models.append(DeltaProductForCausalLM(small_config(**sizes, **kinds, **options)))
    plain, changed = (dict(model.named_parameters()) for model in models)
    for name, weight in plain.items():
        factor = 1.0
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            factor = 1 / math.sqrt(2 * 2)
        elif name == "model.embeddings.weight":
            factor = 0.5 / 0.02
        torch.testing.assert_close(changed[name], factor * weight, rtol=0 if factor == 1 else 1e-5, atol=0)
    models[1].init_weights()
    assert abs(models[1].model.embeddings.weight.std() - 0.5) < 0.05  # not drawn over by the head
    assert (abs(models[1].lm_head.weight.std() - 0.5) < 0.05) == tied


@pytest.mark.parametrize("tied", [True, False])
def test_the_embedding_multiplier_scales_the_input_and_not_the_head(build, tokens, tied):
    plain, scaled = (build(tie_word_embeddings=tied, embedding_multiplier=factor) for factor in (1.0, 3.0))
    scaled.load_state_dict(plain.state_dict())
    with torch.no_grad():
        expected = plain(inputs_embeds=3.0 * plain.get_input_embeddings()(tokens)).logits
        torch.testing.assert_close(scaled(tokens).logits, expected)


def test_parameters_made_on_meta_are_initialised_and_not_drawn_again_by_loading(tmp_path):
    sizes = {"hidden_size": 128, "num_heads": 64, "head_dim": 4, "num_hidden_layers": 1}
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(small_config(**sizes, initializer_range=0.02))
    assert all(p.is_meta for p in model.parameters())
    model.to_empty(device="cpu")
    for parameter in model.parameters():
        torch.nn.init.constant_(parameter, math.nan)
    torch.manual_seed(0)
    model.init_weights()
    for name, parameter in model.named_parameters():
        assert parameter.isfinite().all(), name
        if parameter.dim() >= 2:
            assert abs(parameter.mean()) < 0.003 and abs(parameter.std() - 0.02) < 0.003, name
        elif name.endswith("norm.weight"):
            assert (parameter == 1).all(), name
    mixer = model.model.layers[0].attn
    a, log_dt = mixer.A_log.exp(), torch.nn.functional.softplus(mixer.dt_bias).log()
    assert 0 < a.min() < 1 and 15 < a.max() <= 16 and 5 < a.mean() < 11  # U(0, 16), 64 draws
    assert math.log(1e-3) - 1e-3 <= log_dt.min() and log_dt.max() <= math.log(1e-1) + 1e-3
    assert -5.1 < log_dt.mean() < -4.1  # U(log 1e-3, log 1e-1)

    for parameter in model.parameters():
        torch.nn.init.constant_(parameter, 7.25)  # a value that initialisation never gives
    model.save_pretrained(tmp_path)
    for name, parameter in AutoModelForCausalLM.from_pretrained(tmp_path).named_parameters():
        assert (parameter == 7.25).all(), name
