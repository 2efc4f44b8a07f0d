"""Configuration of Mamba with signed eigenvalues (`mamba` has the model)."""

import math

from fla_train.models.auto import LazyModelConfig


class SignedMambaConfig(LazyModelConfig):
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

    @property
    def inner_size(self) -> int:
        """Channels of the scan."""
        return self.expand * self.hidden_size

    @property
    def time_step_rank(self) -> int:
        return math.ceil(self.hidden_size / 16)
