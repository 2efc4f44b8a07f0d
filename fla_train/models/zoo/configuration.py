"""Settings of the baselines, without their models, which take seconds to import."""

import math
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from omegaconf import MISSING
from transformers import PreTrainedConfig


@dataclass
class BaselineConfig:
    """Which architecture takes the place of `model`, whose sizes it takes over."""

    kind: str = MISSING
    num_heads: int = MISSING
    allow_neg_eigval: bool = False


class SignedMambaConfig(PreTrainedConfig):
    """Sizes of a Mamba; `allow_neg_eigval` takes its transitions from [0, 1] to [-1, 1]."""

    model_type = "signed_mamba"

    vocab_size: int = 32
    hidden_size: int = 128
    num_hidden_layers: int = 2
    state_size: int = 16
    expand: int = 2
    conv_kernel: int = 4
    norm_eps: float = 1e-5
    initializer_range: float = 0.02
    allow_neg_eigval: bool = False

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **options: Any) -> "SignedMambaConfig":
        """As transformers does it, for a model that will follow: the Auto classes get to know ours."""
        import_module("fla_train.baselines.mamba")
        return super().from_dict(config_dict, **options)

    @property
    def inner_size(self) -> int:
        """Channels of the scan."""
        return self.expand * self.hidden_size

    @property
    def time_step_rank(self) -> int:
        return math.ceil(self.hidden_size / 16)
