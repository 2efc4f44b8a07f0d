"""Run one decoding step of a model with five to seven kernels per linear layer.

The kernels are the norm with all projections, the mixer, the output projection, the norm with SwiGLU, and the
down projection (`kernels/fused_ops/token_step.py`). For several sequences the norms are separate kernels.
Attention layers run unchanged.
"""

from itertools import accumulate

from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.cache_utils import Cache, LinearAttentionLayer

from fla_train.kernels.delta_product.interface import resolve_backend as resolve_operator
from fla_train.kernels.fused_ops.backend import resolve_backend
from fla_train.kernels.fused_ops.short_conv import MAX_TAPS
from fla_train.kernels.fused_ops.token_step import MAX_STATE, linear_step, merge, mixer_step
from fla_train.kernels.sizes import next_power_of_2
from fla_train.models.cache import count_tokens
from fla_train.models.context import Masks, SequenceContext
from fla_train.models.layers import RMSNorm
from fla_train.models.mixers.delta_product import DeltaProductMixer


def takes_fused_step(model: PreTrainedModel) -> bool:
    """Return whether the kernels support the model's linear layers."""
    config, weights = model.config, [p for p in model.parameters() if p.dim() == 2]
    return (
        resolve_operator(config.backend, model.device) == "triton"
        and resolve_backend("auto", weights[0]) == "triton"
        and config.hidden_act == "silu"
        and config.norm_after != "all"
        and config.value_heads == config.num_heads  # one program per head shifts the inputs of its q and k
        and (not config.use_short_conv or 1 < config.conv_size <= MAX_TAPS)
        and next_power_of_2(config.head_dim) * next_power_of_2(config.head_v_dim) <= MAX_STATE
        and len({p.dtype for p in weights}) == 1
    )


def fused_step(model: PreTrainedModel, token: Tensor, masks: Masks, cache: Cache) -> Tensor:
    """Return logits [B, vocabulary] after one more token [B, 1] of each sequence, and update the cache."""
    backbone, context = model.model, None
    x, update = None, backbone.embeddings(token)  # [B, 1, D] each; the residual stream is their sum
    if model.config.attention_layers:
        context = SequenceContext.build(model.config, update, masks, None, cache)

    def normed(norm: RMSNorm, *layers: nn.Linear, swiglu: bool = False) -> tuple[Tensor, Tensor]:
        weights = [layer.weight for layer in layers]
        return linear_step(update, *weights, residual=x, norm=norm.weight, eps=norm.eps, swiglu=swiglu)

    for layer, block in zip(cache.layers, backbone.layers, strict=True):
        if not isinstance(layer, LinearAttentionLayer):
            stream = (update, None) if x is None else (x, merge(update, x.dtype))
            x, update = block(*stream, context, cache=cache)
            continue
        projections = {name: getattr(block.attn, f"{name}_proj", None) for name in "qkvbag"}
        projections = {name: p for name, p in projections.items() if p is not None}
        y, x = normed(block.attn_norm, *projections.values())
        starts = accumulate((p.out_features for p in projections.values()), initial=0)
        y = _mix(block.attn, y, dict(zip(projections, starts, strict=False)), layer)
        update, _ = linear_step(y, block.attn.o_proj.weight, in_parts=True)
        y, x = normed(block.mlp_norm, block.mlp.gate_proj, block.mlp.up_proj, swiglu=True)
        update, _ = linear_step(y, block.mlp.down_proj.weight, in_parts=True)
    count_tokens(cache, 1)
    return normed(backbone.norm, model.lm_head)[0][:, 0]


def _mix(mixer: DeltaProductMixer, y: Tensor, columns: dict[str, int], layer: LinearAttentionLayer) -> Tensor:
    """Compute the input of `mixer.o_proj` from the other projections, which start at `columns` of y."""
    convolved = mixer.config.use_short_conv
    return mixer_step(
        y,
        columns,
        [getattr(mixer, f"{name}_conv1d").weight if convolved else None for name in "qkv"],
        [layer.conv_states[i] if convolved else None for i in range(3)],
        getattr(mixer, "A_log", None),
        getattr(mixer, "dt_bias", None),
        mixer.o_norm.weight,
        layer.recurrent_states[0],
        num_householder=mixer.config.num_householder,
        beta_max=mixer.beta_max,
        eps=mixer.o_norm.eps,
    )
