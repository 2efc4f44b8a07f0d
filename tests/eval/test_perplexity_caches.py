"""The sweep on models that call their cache otherwise, lose their state, or have none."""

import math
from itertools import pairwise

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from fla_train.eval.perplexity import loss_table
from tests.eval.conftest import token_losses

EDGES = (0, 16, 32, 64)
SIZE = {"vocab_size": 320, "hidden_size": 32, "num_hidden_layers": 2}
HEADS = {"num_heads": 4, "head_dim": 16, "n_groups": 1, "chunk_size": 8}
ATTENTION = {"num_attention_heads": 2, "num_key_value_heads": 1, "intermediate_size": 32}
XLSTM = SIZE | {"hidden_size": 64, "embedding_dim": 64, "num_heads": 4, "num_blocks": 2, "chunk_size": 16}
BAMBA = {"mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 8, "mamba_chunk_size": 8}
MODELS = {
    "mamba": SIZE | {"state_size": 4},
    "falcon_mamba": SIZE | {"state_size": 4},
    "mamba2": SIZE | HEADS | {"state_size": 8},
    "rwkv": SIZE | {"attention_hidden_size": 32, "context_length": 128},
    "bamba": SIZE | ATTENTION | BAMBA | {"attn_layer_indices": [1], "pad_token_id": 0},
    "recurrent_gemma": SIZE | ATTENTION | {"block_types": ["recurrent", "attention"], "lru_width": 32},
    "xlstm": XLSTM,
    "square xlstm": XLSTM | {"qk_dim_factor": 1.0},
}
LOSES = ("mamba", "falcon_mamba")  # their forward of several tokens begins with an empty state


def built(name: str, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """With weights wide enough that early tokens matter."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(name.split()[-1], **MODELS[name])).eval()
    with torch.no_grad():
        for module in model.modules():
            if isinstance(module, torch.nn.Linear | torch.nn.Embedding):
                module.weight.normal_(0, 0.3)
    return model.to(dtype)


@pytest.fixture(scope="module")
def documents() -> list[list[int]]:
    draw = np.random.default_rng(0)
    return [draw.integers(3, 320, size=length).tolist() for length in (64, 40, 70)]


def expected(model: PreTrainedModel, documents: list[list[int]]) -> np.ndarray:
    """Sums by bucket from one forward over each document, NaN where it ends before."""
    sums = np.full((len(documents), len(EDGES) - 1), math.nan)
    for row, document in zip(sums, documents, strict=True):
        losses = token_losses(model, [2, *document])
        for j, (a, b) in enumerate(pairwise(EDGES)):
            row[j] = losses[a:b].sum() if b <= len(document) else math.nan
    return sums


@pytest.mark.parametrize(
    ("name", "chunk"),
    [
        *((name, 64) for name in MODELS),
        *((name, 1) for name in LOSES),
        *((name, 10) for name in ("mamba2", "rwkv", "square xlstm")),
    ],
)
def test_equals_one_pass(name: str, chunk: int, documents) -> None:
    """A chunk holds the document, or the model continues from its cache; Mamba by single tokens."""
    model = built(name)
    found = loss_table(model, documents, EDGES, prefix=[2], chunk=chunk, batch_size=2)
    assert found.cells[0] == pytest.approx(expected(model, documents), rel=1e-4, nan_ok=True)


@pytest.mark.parametrize(
    ("name", "chunk", "dtype"),
    [("mamba", 7, torch.bfloat16), ("falcon_mamba", 63, torch.float32), ("bamba", 63, torch.bfloat16)],
)
def test_a_model_that_loses_its_state_is_not_read_beyond_a_chunk(name, chunk, dtype, documents) -> None:
    with pytest.raises(ValueError, match=rf"\({name}\).*suite\.perplexity\.chunk"):
        loss_table(built(name, dtype), documents, EDGES, prefix=[2], chunk=chunk)


def test_a_model_without_a_cache(model, documents, monkeypatch) -> None:
    """One that has none in its output, and one that leaves it empty."""
    line = r"16.*suite\.perplexity\.chunk"
    with pytest.raises(ValueError, match=line):
        loss_table(built("recurrent_gemma"), documents, EDGES, prefix=[2], chunk=16)
    if model.config.model_type != "llama":
        return
    forward = model.forward
    monkeypatch.setattr(model, "forward", lambda ids, **options: forward(ids, use_cache=False))
    with pytest.raises(ValueError, match=line):
        loss_table(model, documents, EDGES, prefix=[2], chunk=16)
