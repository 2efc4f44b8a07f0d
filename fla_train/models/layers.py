"""Layers of a block: RMSNorm, short convolution, gated MLP, and several projections in one matrix product."""

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from transformers.activations import ACT2FN

from fla_train.kernels.fused_ops.rms_norm import add_rms_norm, rms_norm
from fla_train.kernels.fused_ops.short_conv import short_convolution
from fla_train.kernels.fused_ops.side_by_side import SideBySideGradients
from fla_train.kernels.fused_ops.swiglu import swiglu_linear
from fla_train.kernels.weight_gradient import weight_gradient
from fla_train.models.float8 import (
    float8_mlp,
    float8_norm_mlp,
    float8_norm_project,
    float8_project,
    runs_in_float8,
)

ALIGNMENT = 64  # columns; pads rows of projections to 128 bytes in half precision


def matmul_dtype(x: Tensor) -> torch.dtype:
    """Return the dtype of a matrix product of `x`: autocast's if it is on, else that of `x`."""
    device = x.device.type
    on = device != "meta" and torch.is_autocast_enabled(device)
    return torch.get_autocast_dtype(device) if on else x.dtype


def project(x: Tensor, *layers: nn.Linear) -> list[Tensor]:
    """Apply several linear layers without bias to the same x [..., D] in one matrix product.

    If all gradients are columns of one tensor (`side_by_side`), the gradients of x and of the weights are one
    product each. Otherwise the backward pass accumulates the gradient of x inside its products (`addmm_`),
    because autograd would add the products one by one, reading two tensors of the size of x and writing a
    third each time. Layers with hooks, or of another class than `nn.Linear`, are called unchanged. Layers
    marked for float8 run in it.
    """
    if torch.is_grad_enabled() and all(map(is_plain, layers)):
        if float8 := tuple(layer for layer in layers if runs_in_float8(layer, x)):
            others = [layer for layer in layers if layer not in float8]
            outputs = float8_project(x, float8, others, matmul_dtype(x))
            by_layer = dict(zip((*float8, *others), outputs, strict=True))
            return [by_layer[layer] for layer in layers]
        return list(_Projections.apply(x, matmul_dtype(x), *(layer.weight for layer in layers)))
    return [layer(x) for layer in layers]


def is_plain(layer: nn.Module) -> bool:
    """Return whether `layer` computes x W^T, so that its weight may be used without calling the layer.

    accelerate replaces `forward` of the layers of a `device_map`. A weight that it offloaded exists only
    during that call; outside of it torch would read invalid memory without an error.
    """
    hooks = (layer._forward_hooks, layer._forward_pre_hooks, layer._backward_hooks, layer._backward_pre_hooks)
    replaced = "forward" in vars(layer)
    return type(layer) is nn.Linear and layer.bias is None and not replaced and not any(hooks)


def draw_time_steps(empty: Tensor) -> Tensor:
    """Fill `empty` with log-uniform time steps between 0.001 and 0.1; return their inverse softplus."""
    dt = empty.uniform_(math.log(1e-3), math.log(1e-1)).exp().clamp(min=1e-4)
    return dt + torch.log(-torch.expm1(-dt))


class _Projections(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dtype: torch.dtype, *weights: Tensor) -> tuple[Tensor, ...]:
        narrow, sizes = x.to(dtype), [len(weight) for weight in weights]
        sizes.append(-sum(sizes) % ALIGNMENT)
        wide = narrow.new_empty(sum(sizes), x.shape[-1])
        *slices, padding = wide.split(sizes)
        for target, weight in zip(slices, weights, strict=True):
            target.copy_(weight)
        padding.zero_()
        ctx.save_for_backward(narrow, wide)
        ctx.sizes, ctx.dtypes = sizes, (x.dtype, weights[0].dtype)
        ctx.side_by_side = SideBySideGradients(sizes)
        return torch.unsafe_split_with_sizes(F.linear(narrow, wide), sizes, -1)[:-1]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        dtype, weight_dtype = ctx.dtypes
        rows, needed = x.flatten(0, -2), ctx.needs_input_grad[2:]
        wide = None if torch.compiler.is_compiling() else ctx.side_by_side.collect(grads)
        if wide is not None:
            wide, dweights = wide.flatten(0, -2), [None] * len(needed)
            dx = wide @ weight
            if any(needed):
                *dweights, _ = weight_gradient(wide, rows, weight_dtype).split(ctx.sizes)
        else:
            *weights, _ = weight.split(ctx.sizes)
            grads = [grad.flatten(0, -2) for grad in grads]
            dx = grads[0] @ weights[0]
            for grad, weight in zip(grads[1:], weights[1:], strict=True):
                dx = dx.addmm_(grad, weight)
            dweights = (
                weight_gradient(grad, rows, weight_dtype) if need else None
                for grad, need in zip(grads, needed, strict=True)
            )
        return dx.view_as(x).to(dtype), None, *dweights


class RMSNorm(nn.Module):
    """y = weight * x / sqrt(mean(x^2) + eps) over the last axis, computed in fp32.

    The output has the dtype of matrix products, so it is cast once and not in each projection.
    """

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(
        self, x: Tensor, gate: Tensor | None = None, residual: Tensor | None = None
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Normalise x [..., size].

        Args:
            gate: of the shape of `x`, or with its last two axes merged; its SiLU multiplies the result in
                fp32.
            residual: normalise residual + x, and return that sum as well; excludes a gate.
        """
        if residual is None:
            return rms_norm(x, self.weight, self.eps, gate=gate, dtype=matmul_dtype(x))
        return add_rms_norm(x, residual, self.weight, self.eps, dtype=matmul_dtype(residual))


class ShortConvolution(nn.Module):
    """Causal depthwise convolution over time and SiLU: y_t = silu(sum_s weight[:, 0, W-1-s] * x_{t-s})."""

    def __init__(self, channels: int, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(channels, 1, width))
        self.weight.data[..., -1] = 1.0  # the SiLU alone, until a model draws its weights

    def forward(
        self, x: Tensor, state: Tensor | None = None, position_in_document: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Convolve x [B, T, D].

        Args:
            state: the W-1 inputs before x, [B, D, W-1]; zeros when absent.
            position_in_document: distance of each token from its document's start, [T]; taps never reach
                beyond it.

        Returns:
            The output [B, T, D], and the last W-1 inputs [B, D, W-1] to continue from.
        """
        return short_convolution(x, self.weight, state=state, position_in_document=position_in_document)


class ScaledEmbedding(nn.Embedding):
    """Embedding whose output is multiplied by `embed_scale`, a name that PEFT reads."""

    def __init__(self, rows: int, channels: int, embed_scale: float) -> None:
        super().__init__(rows, channels)
        self.embed_scale = embed_scale

    def forward(self, token: Tensor) -> Tensor:
        """Look up token ids [...] and return [..., channels]."""
        embedding = super().forward(token)
        return embedding if self.embed_scale == 1 else embedding * self.embed_scale


class GatedMLP(nn.Module):
    """down(act(gate(x)) * up(x)); with SiLU, the default, a SwiGLU."""

    def __init__(self, hidden_size: int, intermediate_size: int, activation: str) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(hidden_size, intermediate_size, bias=False)
        self.up_proj = nn.Linear(hidden_size, intermediate_size, bias=False)
        self.down_proj = nn.Linear(intermediate_size, hidden_size, bias=False)
        self.act = ACT2FN[activation]
        self.fused = activation == "silu"  # the kernel has no other activation

    def forward(self, x: Tensor) -> Tensor:
        """Map x [..., hidden_size] to the same shape."""
        if self.runs_in_float8(x):
            return float8_mlp(x, self.layers, matmul_dtype(x))
        gate, up = project(x, self.gate_proj, self.up_proj)
        if self.fused and is_plain(self.down_proj):
            return swiglu_linear(gate, up, self.down_proj.weight)
        return self.down_proj(self.act(gate) * up)

    @property
    def layers(self) -> tuple[nn.Linear, ...]:
        return self.gate_proj, self.up_proj, self.down_proj

    def runs_in_float8(self, x: Tensor) -> bool:
        """Return whether all products run in float8 for x [..., hidden_size]."""
        return (
            self.fused
            and torch.is_grad_enabled()
            and all(is_plain(layer) and runs_in_float8(layer, x) for layer in self.layers)
        )


def norm_project(norm: RMSNorm, x: Tensor, gate: Tensor | None, layer: nn.Linear) -> Tensor:
    """Compute layer(norm(x, gate)) for x [..., H, V] with concatenated norms; fused in float8."""
    y = x.flatten(-2)
    if gate is None and torch.is_grad_enabled() and is_plain(layer) and runs_in_float8(layer, y):
        return float8_norm_project(x, norm, layer, matmul_dtype(x))
    return project(norm(x, gate).flatten(-2), layer)[0]


def norm_mlp(norm: RMSNorm, update: Tensor, residual: Tensor, mlp: GatedMLP) -> tuple[Tensor, Tensor]:
    """Return residual + update, and the MLP of its norm; fused in float8."""
    if not mlp.runs_in_float8(update):
        y, total = norm(update, residual=residual)
        return total, mlp(y)
    y, total = float8_norm_mlp(update, residual, norm, mlp.layers, matmul_dtype(residual))
    return total, y
