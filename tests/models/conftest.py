"""Small models that react: weights wide enough for every part to matter, fp64 for tight comparisons."""

import pytest
import torch
from small_models import small_config

import fla_train.models.auto  # noqa: F401
from fla_train.models.modeling import DeltaProductForCausalLM


@pytest.fixture
def build():
    """build(variant, **overrides) -> a seeded fp64 model in eval mode."""

    def make(variant: str = "gated_delta_product", **overrides) -> DeltaProductForCausalLM:
        torch.manual_seed(0)
        return DeltaProductForCausalLM(small_config(variant, **overrides)).double().eval()

    return make


@pytest.fixture
def tokens() -> torch.Tensor:
    """Three sequences of 19 random tokens; 0 is left to padding."""
    return torch.randint(1, 31, (3, 19), generator=torch.Generator().manual_seed(1))
