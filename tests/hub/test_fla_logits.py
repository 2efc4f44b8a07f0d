"""Logits of flash-linear-attention's own models, on a GPU, against ours for the same weights, both ways."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fla_train.hub.export import export_model
from fla_train.hub.load import load_causal_lm

pytestmark = pytest.mark.gpu
SIZE = {"vocab_size": 512, "hidden_size": 256, "num_hidden_layers": 4, "num_heads": 4}
LARGE = {"initializer_range": 0.1}  # weights at which every part bears on the logits
HEADS = {"head_dim": 64, "expand_v": 1.0}
GATES = {"use_forget_gate": True, "use_output_gate": False, "allow_neg_eigval": True}
ATTENTION = {"num_heads": 4, "num_kv_heads": 2}
WINDOWS = [{"layers": [1], **ATTENTION}, {"layers": [2], **ATTENTION, "window_size": 32}]
CELLS: dict[str, dict[str, Any]] = {
    "delta_net": {"model_type": "delta_net"},
    # With expand_k=0.5, K = 32 and V = 64, its kernel is wrong beyond 64 tokens (docs/exports_reference.md).
    "delta_net_gate": {"model_type": "delta_net", "use_gate": True, "allow_neg_eigval": True},
    "gated_deltanet": {"model_type": "gated_deltanet", **HEADS, "expand_v": 2.0},
    "gated_deltanet_grouped": {"model_type": "gated_deltanet", **HEADS, "num_v_heads": 8},
    "gated_deltaproduct_3": {"model_type": "gated_deltaproduct", **HEADS, **GATES, "num_householder": 3},
    "hybrid_windows": {"model_type": "gated_deltanet", **HEADS, "attn": WINDOWS},
}


def attention(q: Tensor, k: Tensor, v: Tensor, causal: bool, window_size: tuple[int, int]) -> Tensor:
    """flash_attn_func on [B, T, H, D], of a package that need not be installed."""
    distance = torch.arange(q.shape[1], device=q.device)
    distance = distance[:, None] - distance
    mask = (distance >= 0) & ((distance <= window_size[0]) | (window_size[0] < 0))
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True).transpose(1, 2)


@torch.no_grad()
def logits(model: nn.Module, length: int) -> Tensor:
    torch.manual_seed(1)
    ids = torch.randint(512, (2, length), device="cuda")
    return model.eval()(input_ids=ids, use_cache=False).logits.float()


def rms(x: Tensor) -> float:
    return x.square().mean().sqrt().item()


@pytest.mark.parametrize("cell", CELLS)
def test_logits_are_those_of_its_model(cell: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its bf16 logits differ from our fp32 ones as much as our bf16 ones do; the way back changes nothing."""
    pytest.importorskip("fla.models", reason="flash-linear-attention is not installed")
    from transformers import AutoConfig, AutoModelForCausalLM

    monkeypatch.setattr("fla.layers.attn.flash_attn_func", attention)
    torch.manual_seed(0)
    config = AutoConfig.for_model(**SIZE, **LARGE, **CELLS[cell])
    AutoModelForCausalLM.from_config(config).to(torch.bfloat16).save_pretrained(tmp_path / "theirs")
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "theirs", dtype=torch.bfloat16).cuda()
    narrow = load_causal_lm(tmp_path / "theirs", "cuda")
    wide = load_causal_lm(tmp_path / "theirs", "cuda", torch.float32)
    folder = export_model(narrow, None, tmp_path / "back", dtype=torch.bfloat16, format="fla")
    back, report = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.bfloat16, output_loading_info=True
    )
    assert not report["missing_keys"] and not report["unexpected_keys"]
    assert type(back) is type(theirs) and type(back).__module__.startswith("fla.")
    for length in (40, 200):  # its recurrent kernels run up to 64 tokens, its chunked ones beyond
        found, expected = logits(theirs, length), logits(wide, length)
        rounding = rms(logits(narrow, length) - expected)
        assert rounding < 0.1 * rms(expected)  # a wrong setting changes the logits by 13 % and more
        assert rms(found - expected) < 2 * rounding
        assert torch.equal(logits(back.cuda(), length), found)
