"""The layers every block is made of: RMSNorm, the short convolution and the gated MLP."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.activations import ACT2FN


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

    def forward(self, x: Tensor, gate: Tensor | None = None) -> Tensor:
        """Normalise x [..., size]; a `gate` of its shape multiplies the result by silu(gate), in fp32 too."""
        dtype = matmul_dtype(x)
        wide = torch.promote_types(x.dtype, torch.float32)
        y = F.rms_norm(x.to(wide), self.weight.shape, self.weight.to(wide), self.eps)
        if gate is not None:
            y = y * F.silu(gate.to(wide))
        return y.to(dtype)


class ShortConvolution(nn.Module):
    """Causal depthwise convolution over time followed by SiLU: y_t = silu(sum_s weight[:, W-1-s] * x_{t-s}).

    It is written as W shifted multiply-adds, which on CPUs is as fast as a grouped `conv1d` and needs no
    transposes, and which makes the reset at document boundaries a mask per shift.
    """

    def __init__(self, channels: int, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(channels, 1, width))
        self.width = width

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
        length, history = x.shape[1], self.width - 1
        if state is None:
            x = F.pad(x, (0, 0, history, 0))
        else:
            x = torch.cat([state.transpose(1, 2).to(x.dtype), x], dim=1)
        taps = self.weight[:, 0].to(x.dtype).unbind(-1)
        y = x[:, history:] * taps[-1]
        for shift in range(1, self.width):
            past = x[:, history - shift : history - shift + length]
            if offsets is not None:
                past = past * (offsets >= shift).to(x.dtype)[:, None]
            y = torch.addcmul(y, past, taps[-1 - shift])
        return F.silu(y), x[:, length:].transpose(1, 2)


class GatedMLP(nn.Module):
    """SwiGLU: down(act(gate(x)) * up(x))."""

    def __init__(self, hidden_size: int, intermediate_size: int, activation: str) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(hidden_size, intermediate_size, bias=False)
        self.up_proj = nn.Linear(hidden_size, intermediate_size, bias=False)
        self.down_proj = nn.Linear(intermediate_size, hidden_size, bias=False)
        self.act = ACT2FN[activation]

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(self.act(self.gate_proj(x)) * self.up_proj(x))
