"""Feature maps and norms of queries and keys, the ablation of arXiv 2406.06484, table 2.

    k = y / |y|_p,    y = phi(conv(W x)),    phi: SiLU, ReLU or 1 + ELU,    p: 1 or 2

The kernel of the convolution ends in a SiLU. Because silu(y) - silu(-y) = y, a second call with negated
weights removes it. Values keep theirs. The mixer needs `use_short_conv`.

The operator divides keys by their L2 norm. If k has L2 norm 1, then r k has L1 norm 1 for r = |y|_2 / |y|_1.
A step of size beta with the key r k equals one of size beta r^2 with the key k and the value v / r:

    S + beta r k (v - r S^T k)^T = S + beta r^2 k (v / r - S^T k)^T

The norm of a query only scales the output, whose RMSNorm removes it, so queries keep L2.

    fla-train model=delta_net/tiny model.mixer=feature_map:FeatureMap \\
        'model.mixer_options={phi: elu, norm: 1}'
"""

import torch.nn.functional as F
from torch import Tensor

from fla_train.kernels.fused_ops.short_conv import short_convolution
from fla_train.models.configuration import DeltaProductConfig
from fla_train.models.layers import ShortConvolution
from fla_train.models.mixers import DeltaProductMixer

EPS = 1e-6  # the operator divides by sqrt(y.y + EPS)
MAPS = {"silu": F.silu, "relu": F.relu, "elu": lambda y: 1 + F.elu(y)}


class Convolution(ShortConvolution):
    """The convolution without SiLU."""

    def forward(self, x: Tensor, state: Tensor | None, position: Tensor | None) -> tuple[Tensor, Tensor]:
        options = {"state": state, "position_in_document": position}
        y, last = short_convolution(x, self.weight, **options)
        return y - short_convolution(x, -self.weight, **options)[0], last


class FeatureMap(DeltaProductMixer):
    def __init__(
        self, config: DeltaProductConfig, layer_index: int = 0, *, phi: str = "silu", norm: int = 2
    ) -> None:
        super().__init__(config, layer_index)
        self.phi, self.norm = MAPS[phi], norm
        self.q_conv1d, self.k_conv1d = (
            Convolution(len(conv.weight), config.conv_size) for conv in (self.q_conv1d, self.k_conv1d)
        )

    def operator_inputs(
        self, q: Tensor, k: Tensor, v: Tensor, beta: Tensor, g: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None]:
        q, k = self.phi(q), self.phi(k)
        if self.norm == 1:
            y = k.to(beta)
            ratio = ((y.square().sum(-1) + EPS) / (y.abs().sum(-1).square() + EPS)).sqrt()  # [B, T, N, H]
            beta, v = beta * ratio**2, (v / ratio[..., None]).to(v)
        return q, k, v, beta, g
