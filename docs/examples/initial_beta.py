"""Householder steps beyond the first ones that begin near the identity.

A problem may need fewer steps than num_householder. Then the others shrink the state, unless their beta is
0 or 2. Here beta = beta_max sigmoid(W_b x + c), with a learnt c for each step and head. It starts at 0 for
the first `free` steps and at `start` for the others.

    fla-train experiment=state_tracking/s3 scale=cpu model.num_householder=4 \\
        model.mixer=initial_beta:InitialBeta
"""

import torch
from torch import Tensor, nn

from fla_train.models.configuration import DeltaProductConfig
from fla_train.models.mixers import DeltaProductMixer


class InitialBeta(DeltaProductMixer):
    def __init__(
        self, config: DeltaProductConfig, layer_index: int = 0, *, free: int = 2, start: float = -4.0
    ) -> None:
        super().__init__(config, layer_index)
        offset = torch.zeros(config.num_householder, config.value_heads)
        offset[free:] = start
        self.offset = nn.Parameter(offset)
        self.offset._no_weight_decay = True

    def operator_inputs(
        self, q: Tensor, k: Tensor, v: Tensor, beta: Tensor, g: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None]:
        odds = self.offset.float().exp()  # sigmoid(b + c) = s e^c / (1 - s + s e^c) with s = sigmoid(b)
        beta = beta * odds / (1 + beta / self.beta_max * (odds - 1))
        return q, k, v, beta, g
