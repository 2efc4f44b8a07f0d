"""The layers every block is made of: RMSNorm, the short convolution and the gated MLP."""

import torch
from torch import Tensor, nn
from transformers.activations import ACT2FN

from fla_train.kernels.neighbours import add_rms_norm, rms_norm, short_convolution, swiglu


def matmul_dtype(x: Tensor) -> torch.dtype:
    """The dtype a matmul of `x` runs in: autocast's where it is on, else that of `x`."""
    device = x.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else x.dtype


class RMSNorm(nn.Module):
    """y = weight * x / sqrt(mean(x^2) + eps) over the last axis, computed in fp32.

    Its output feeds matmuls, so it is returned in their dtype: one cast here, not one per projection.
    """

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size))
        self.eps = eps

    def forward(
        self, x: Tensor, gate: Tensor | None = None, residual: Tensor | None = None
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Normalise x [..., size].

        Args:
            gate: of the shape of `x`; its SiLU multiplies the result, in fp32 too.
            residual: instead of a gate: normalise residual + x, and return that sum as well.
        """
        if residual is None:
            return rms_norm(x, self.weight, self.eps, gate=gate, dtype=matmul_dtype(x))
        return add_rms_norm(x, residual, self.weight, self.eps, dtype=matmul_dtype(residual))


class ShortConvolution(nn.Module):
    """Causal depthwise convolution over time and SiLU: y_t = silu(sum_s weight[:, 0, W-1-s] * x_{t-s})."""

    def __init__(self, channels: int, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(channels, 1, width))

    def forward(
        self, x: Tensor, state: Tensor | None = None, offsets: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Convolve x [B, T, D].

        Args:
            state: the W-1 inputs before x, [B, D, W-1]; zeros when absent.
            offsets: distance of each token from its document's start, [T]; taps never reach beyond it.

        Returns:
            The output [B, T, D], and the last W-1 inputs [B, D, W-1] to continue from.
        """
        return short_convolution(x, self.weight, state=state, offsets=offsets)


class GatedMLP(nn.Module):
    """down(act(gate(x)) * up(x)); with SiLU, the usual activation, a SwiGLU."""

    def __init__(self, hidden_size: int, intermediate_size: int, activation: str) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(hidden_size, intermediate_size, bias=False)
        self.up_proj = nn.Linear(hidden_size, intermediate_size, bias=False)
        self.down_proj = nn.Linear(intermediate_size, hidden_size, bias=False)
        self.act = None if activation == "silu" else ACT2FN[activation]

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_proj(x), self.up_proj(x)
        return self.down_proj(swiglu(gate, up) if self.act is None else self.act(gate) * up)
