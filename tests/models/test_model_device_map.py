"""Models that a `device_map` spreads: what accelerate keeps elsewhere, copies and moves changes no number."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from fla_train.models.modeling import DeltaProductForCausalLM

ON_DISK = ("model.layers.1", "model.norm", "lm_head")
HALF = {"model.embeddings": "cpu", "model.layers.0": "cpu"} | dict.fromkeys(ON_DISK, "disk")
ALL = {"": "disk"}


@pytest.fixture(params=[("gated_delta_product", ALL), ("hybrid", HALF)], ids=str)
def pair(
    request: pytest.FixtureRequest, build: Callable, tmp_path: Path
) -> tuple[DeltaProductForCausalLM, DeltaProductForCausalLM]:
    """A model in memory, and a copy with half or all of its weights on disk until a layer is called."""
    variant, places = request.param
    model = build(variant)
    model.save_pretrained(tmp_path / "model")
    spread = DeltaProductForCausalLM.from_pretrained(
        tmp_path / "model", dtype="auto", device_map=places, offload_folder=tmp_path / "offload"
    )
    spread.config.backend = model.config.backend
    assert spread.model.layers[1].mlp.down_proj.weight.is_meta and spread.lm_head.weight.is_meta
    return model, spread


def test_losses_logits_and_generation_are_the_same(pair, tokens: torch.Tensor) -> None:
    mask = torch.ones_like(tokens)
    mask[0, :5] = 0
    settings = {"attention_mask": mask, "max_new_tokens": 9, "do_sample": False, "pad_token_id": 0}
    expected, found = (
        [
            model.token_losses(tokens),
            model(tokens, labels=tokens).loss.detach(),
            model(tokens).logits.detach(),
            *(model.generate(tokens, num_beams=beams, **settings) for beams in (1, 2)),
        ]
        for model in pair
    )
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)
