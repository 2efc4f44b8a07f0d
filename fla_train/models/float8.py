"""Linear layers in float8 for training, with weights cast once per step.

Activations and weights are cast to e4m3, gradients to e5m2, each tensor with one dynamic scale. The products
of the forward pass, of the input's gradient and of the weight's gradient run in float8. Weights and their
gradients stay fp32.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from fla_train.kernels.fused_ops.float8 import (
    E4M3,
    E5M2,
    MULTIPLE,
    Float8Matrix,
    cast_float8,
    cast_swiglu,
    cast_swiglu_backward,
    float8_product,
    norm_scale,
    transpose_float8,
)
from fla_train.kernels.fused_ops.rms_norm import cast_rms_norm
from fla_train.kernels.weight_gradient import weight_gradient

LEAST_ROWS = 128  # smaller weights stay bf16: those of betas and decays have one row per head
GRADIENTS = E5M2


class Float8Weights:
    """Weights of a model's linear layers in e4m3, from the last call of `cast`.

    Marks the layers that may run in float8: both sizes are multiples of 16, with at least 128 outputs, except
    the head, whose product belongs to the loss. Layers of one input share a scale.
    """

    def __init__(self, model: nn.Module) -> None:
        head = model.get_output_embeddings()
        for layer in model.modules():
            if type(layer) is nn.Linear and layer is not head and layer.out_features >= LEAST_ROWS:
                if layer.in_features % MULTIPLE == layer.out_features % MULTIPLE == 0:
                    layer.float8 = self
        self._groups: dict[tuple[nn.Linear, ...], Float8Matrix] = {}
        self._norms: dict[nn.Module, tuple[Tensor, Tensor]] = {}

    def of(self, layers: tuple[nn.Linear, ...]) -> Float8Matrix:
        """Return the stacked weights [sum of rows, in_features] and their transpose."""
        if layers not in self._groups:
            self._groups[layers] = cast_float8(self._weights(layers), E4M3, dim=0)
        return self._groups[layers]

    def of_norm(self, norm: nn.Module) -> tuple[Tensor, Tensor]:
        """Return the scaled weight of an RMSNorm, and the inverse scale of its output."""
        if norm not in self._norms:
            self._norms[norm] = norm_scale(norm.weight.detach())
        return self._norms[norm]

    def cast(self) -> None:
        """Cast all weights again, in place, after an optimizer step."""
        for layers, out in self._groups.items():
            cast_float8(self._weights(layers), E4M3, dim=0, out=out)
        for norm, out in self._norms.items():
            for old, new in zip(out, norm_scale(norm.weight.detach()), strict=True):
                old.copy_(new)

    @staticmethod
    def _weights(layers: Sequence[nn.Linear]) -> list[Tensor]:
        return [layer.weight.detach() for layer in layers]


def runs_in_float8(layer: nn.Module, x: Tensor) -> bool:
    """Return whether `layer` multiplies x [..., in_features] in float8, which needs a suitable row count."""
    return hasattr(layer, "float8") and x.numel() // x.shape[-1] % MULTIPLE == 0


def float8_project(
    x: Tensor, layers: tuple[nn.Linear, ...], others: Sequence[nn.Linear], dtype: torch.dtype
) -> list[Tensor]:
    """Return outputs of `layers` in float8, then of `others` in `dtype`, for x [..., D]."""
    weights = [layer.weight for layer in (*layers, *others)]
    return list(_Float8Projections.apply(x, None, dtype, layers[0].float8.of(layers), len(layers), *weights))


def float8_mlp(
    x: Tensor, layers: Sequence[nn.Linear], dtype: torch.dtype, cast: Float8Matrix | None = None
) -> Tensor:
    """Compute down(silu(gate(x)) * up(x)) for x [..., D] in `dtype`; `cast` may pass x in e4m3.

    Args:
        layers: gate, up and down.
    """
    gate, up, down = layers
    casts = gate.float8.of((gate, up)), down.float8.of((down,))
    return _MLP.apply(x, cast, dtype, *casts, gate.weight, up.weight, down.weight)


def float8_norm_project(x: Tensor, norm: nn.Module, layer: nn.Linear, dtype: torch.dtype) -> Tensor:
    """Compute layer(norm(x)) for x [..., H, V] with concatenated norms, in `dtype`."""
    scaled, inverse = layer.float8.of_norm(norm)
    y, data, _ = cast_rms_norm(x, None, norm.weight, scaled, norm.eps, dtype=dtype, narrow=E4M3)
    cast = Float8Matrix(data.view(-1, layer.in_features), None, inverse)
    return _Float8Projections.apply(y.flatten(-2), cast, dtype, layer.float8.of((layer,)), 1, layer.weight)[0]


def float8_norm_mlp(
    update: Tensor, residual: Tensor, norm: nn.Module, layers: Sequence[nn.Linear], dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Return `float8_mlp` of norm(residual + update), and the sum."""
    scaled, inverse = layers[0].float8.of_norm(norm)
    y, data, total = cast_rms_norm(update, residual, norm.weight, scaled, norm.eps, dtype=dtype, narrow=E4M3)
    cast = Float8Matrix(data.flatten(0, -2), None, inverse)
    return float8_mlp(y, layers, dtype, cast), total


def _rows(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Reshape x [..., D] to a matrix."""
    return x.reshape(-1, x.shape[-1]).to(dtype)


def _kept(cast: Float8Matrix) -> tuple[Tensor, Tensor, bool]:
    """Return data and inverse scale for the backward pass, and whether it must still transpose the data."""
    plain = cast.transposed is None
    return (cast.data if plain else cast.transposed), cast.inverse, plain


class _Float8Projections(torch.autograd.Function):
    """Project x [..., D]; `weight` stacks the first `count` of `weights` in e4m3.

    With `cast`, x in e4m3, x itself only receives the gradient.
    """

    @staticmethod
    def forward(ctx, x, cast, dtype, weight, count, *weights) -> tuple[Tensor, ...]:
        cast = cast or cast_float8([_rows(x, dtype)], E4M3)
        *kept, ctx.plain = _kept(cast)
        others = [other.to(dtype) for other in weights[count:]]
        rows = [_rows(x, dtype)] if others else []
        ctx.save_for_backward(*kept, *rows, *others)
        ctx.weight, ctx.count = weight, count
        ctx.x_shape, ctx.x_dtype, ctx.dtype, ctx.weight_dtype = x.shape, x.dtype, dtype, weights[0].dtype
        outputs = [
            float8_product(cast.data, data, cast.inverse, weight.inverse, dtype, fast=True)
            for data in weight.data.split([len(rows) for rows in weights[:count]])
        ]
        outputs += [F.linear(*rows, other) for other in others]
        return tuple(y.view(*x.shape[:-1], -1) for y in outputs)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x_transposed, x_inverse, *rest = ctx.saved_tensors
        if ctx.plain:
            x_transposed = transpose_float8(x_transposed)
        weight, dtype = ctx.weight, ctx.dtype
        grads = [grad.reshape(-1, grad.shape[-1]) for grad in grads]
        d = cast_float8(grads[: ctx.count], GRADIENTS)
        dx = float8_product(d.data, weight.transposed, d.inverse, weight.inverse, dtype)
        dweight = float8_product(d.transposed, x_transposed, d.inverse, x_inverse, ctx.weight_dtype)
        dweights = [*dweight.split([grad.shape[1] for grad in grads[: ctx.count]])]
        if rest:
            rows, *others = rest
            for grad, other in zip(grads[ctx.count :], others, strict=True):
                dx = dx.addmm_(grad, other)
                dweights.append(weight_gradient(grad, rows, ctx.weight_dtype))
        return dx.view(ctx.x_shape).to(ctx.x_dtype), None, None, None, None, *dweights


class _MLP(torch.autograd.Function):
    """Apply the MLP to x and `cast`, both as in `_Float8Projections`; its weights also come in e4m3."""

    @staticmethod
    def forward(ctx, x, cast, dtype, gate_up_weight, down_weight, gate, up, down) -> Tensor:
        cast = cast or cast_float8([_rows(x, dtype)], E4M3)
        *kept, ctx.plain = _kept(cast)
        gate_up = float8_product(
            cast.data, gate_up_weight.data, cast.inverse, gate_up_weight.inverse, dtype, fast=True
        )
        y = cast_swiglu(gate_up)
        ctx.save_for_backward(*kept, gate_up, y.inverse)
        ctx.weights = gate_up_weight, down_weight
        ctx.x_shape, ctx.x_dtype, ctx.dtype, ctx.weight_dtype = x.shape, x.dtype, dtype, down.dtype
        z = float8_product(y.data, down_weight.data, y.inverse, down_weight.inverse, dtype, fast=True)
        return z.view(*x.shape[:-1], -1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dz: Tensor) -> tuple[Tensor | None, ...]:
        x_transposed, x_inverse, gate_up, y_inverse = ctx.saved_tensors
        if ctx.plain:
            x_transposed = transpose_float8(x_transposed)
        (gate_up_weight, down_weight), dtype = ctx.weights, ctx.dtype
        dz = cast_float8([dz.reshape(-1, dz.shape[-1])], GRADIENTS)
        dy = float8_product(dz.data, down_weight.transposed, dz.inverse, down_weight.inverse, dtype)
        d, y_transposed = cast_swiglu_backward(gate_up, dy, y_inverse, dtype=GRADIENTS)
        ddown = float8_product(dz.transposed, y_transposed, dz.inverse, y_inverse, ctx.weight_dtype)
        dx = float8_product(d.data, gate_up_weight.transposed, d.inverse, gate_up_weight.inverse, dtype)
        dgate_up = float8_product(d.transposed, x_transposed, d.inverse, x_inverse, ctx.weight_dtype)
        return dx.view(ctx.x_shape).to(ctx.x_dtype), None, None, None, None, *dgate_up.chunk(2), ddown
