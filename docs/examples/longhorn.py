"""Other step sizes of the delta rule through the same operator: Longhorn, and the exact solution.

A token changes the state by the differential equation dS/ds = k (v - S^T k)^T over a time beta. With
x = beta k.k, numerical methods for it are

    Euler            S + beta k (v - S^T k)^T      what DeltaNet computes, with keys of length 1
    implicit Euler   S + eps k (v - S^T k)^T       eps = beta / (1 + x), Longhorn (arXiv 2407.14207)
    exact            S + alpha k (v - S^T k)^T     alpha = (1 - exp(-x)) / k.k (arXiv 2512.12602)

The operator takes keys of length 1. With n = |k| a step of size eps is one of size eps n^2 with the key k / n
and the value v / n. Its eigenvalue 1 - eps n^2 lies in (0, 1) for any beta and k. (Longhorn's own code keeps
only the diagonal of k k^T; here it is whole.)

    fla-train model=gated_delta_net/tiny model.mixer=longhorn:Longhorn
    fla-train model=gated_delta_net/tiny model.mixer=longhorn:Longhorn 'model.mixer_options={exact: true}'
"""

import torch
from torch import Tensor

from fla_train.models.configuration import DeltaProductConfig
from fla_train.models.mixers import DeltaProductMixer

EPS = 1e-6  # the operator divides keys by sqrt(k.k + EPS)


class Longhorn(DeltaProductMixer):
    def __init__(self, config: DeltaProductConfig, layer_index: int = 0, *, exact: bool = False) -> None:
        super().__init__(config, layer_index)
        self.exact = exact

    def operator_inputs(
        self, q: Tensor, k: Tensor, v: Tensor, beta: Tensor, g: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None]:
        squared = k.to(beta).square().sum(-1) + EPS  # n^2, [B, T, N, H]
        x = beta * squared
        step = -torch.expm1(-x) if self.exact else x / (1 + x)
        return q, k, (v / squared.sqrt()[..., None]).to(v), step, g
