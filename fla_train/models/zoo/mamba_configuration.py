"""Configuration of Mamba with signed eigenvalues; the model is in `mamba`."""

import math
from typing import Any

from transformers import PreTrainedConfig

from fla_train.models.configuration import drop_auto_map


class SignedMambaConfig(PreTrainedConfig):
    """Sizes of a Mamba; `allow_neg_eigval` extends its transitions from [0, 1] to [-1, 1]."""

    model_type = "signed_mamba"
    auto_map = {}  # noqa: RUF012  as in DeltaProductConfig

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
        return super().from_dict(drop_auto_map(cls, config_dict), **options)

    @property
    def inner_size(self) -> int:
        """Return the number of channels of the scan."""
        return self.expand * self.hidden_size

    @property
    def time_step_rank(self) -> int:
        return math.ceil(self.hidden_size / 16)
