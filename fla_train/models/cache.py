"""Check that transformers' `Cache` has places for recurrent states, and make it count tokens."""

import inspect

import torch
from torch import Tensor
from transformers import DynamicCache, GenerationMixin
from transformers.cache_utils import Cache, CacheLayerMixin, LinearAttentionLayer, StaticLayer

from fla_train.models.configuration import DeltaProductConfig

ARGUMENTS = inspect.signature(GenerationMixin.prepare_inputs_for_generation).parameters
CACHE_NAME = "cache" if "cache" in ARGUMENTS else "past_key_values"  # renamed in transformers 5.24


class CountingLayer(LinearAttentionLayer):
    """Cache entry of the first layer in a model without attention layers, which also counts tokens.

    transformers' entries of linear layers do not count, but `generate` needs the count to skip the prompt
    tokens in the cache. The count is a tensor on the model's device, so that a compiled decoding step is not
    recompiled as it grows.
    """

    def __init__(self, number_of_states: int, device: torch.device) -> None:
        super().__init__(number_of_states)
        self.cumulative_length = torch.zeros((), dtype=torch.long, device=device)
        if not torch.compiler.is_compiling():
            torch._dynamo.mark_static_address(self.cumulative_length)

    def get_seq_length(self) -> Tensor:
        """Return the number of tokens so far, including padding, as an integer tensor []."""
        return self.cumulative_length

    def reset(self) -> None:
        super().reset()
        self.cumulative_length.zero_()


class WindowLayer(StaticLayer):
    """Keys and values of the last tokens, the newest last, in tensors with fixed addresses.

    transformers' `StaticSlidingWindowLayer` counts its tokens on the host, which a CUDA graph cannot do.

    Args:
        max_cache_len: number of tokens; until it is full, the first entries have positions below 0.
    """

    is_sliding = True

    def update(
        self, key_states: Tensor, value_states: Tensor, *_: object, **__: object
    ) -> tuple[Tensor, Tensor]:
        """Append [B, H, T, D] new keys and values; return the whole window, [B, H, max_cache_len, D]."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        for held, new in ((self.keys, key_states), (self.values, value_states)):
            held.copy_(torch.cat([held, new], dim=2)[:, :, -self.max_cache_len :])
        self.cumulative_length.add_(key_states.shape[2])
        return self.keys, self.values

    def get_mask_sizes(self, query_length: int) -> tuple[int, Tensor]:
        """Return the window's size, and the position of its first entry after `query_length` more tokens."""
        return self.max_cache_len, self.cumulative_length + query_length - self.max_cache_len


CacheLayerMixin.register(CountingLayer)  # `Cache.get_seq_length` reads only layers of this class


def cache_for(
    past_key_values: Cache | None,
    config: DeltaProductConfig,
    use_cache: bool,
    device: torch.device,
    rows: int | None = None,
) -> Cache | None:
    """Return the caller's cache, a new one if `use_cache`, or None.

    The first layer of a model without attention layers becomes a `CountingLayer`.

    Args:
        rows: sequences that continue from the cache; None: not known.

    Raises:
        ValueError: the cache has no places for the layers' states, other rows, or supports rollback.
    """
    if past_key_values is None:
        if not use_cache:
            return None
        past_key_values = DynamicCache(config=config)
    layers = getattr(past_key_values, "layers", [])
    states = config.number_of_conv_states
    expected = [states if layer == "linear_attention" else 0 for layer in config.layer_types]
    if [getattr(layer, "number_of_states", 0) for layer in layers] != expected:
        raise ValueError("past_key_values lacks places for states: use DynamicCache(config=model.config)")
    if any(getattr(layer, "record_past", False) for layer in layers):
        raise ValueError("a recurrent state cannot be rolled back: this model cannot be an assistant_model")
    kept = [x.recurrent_states[0] if n else x.keys for x, n in zip(layers, expected, strict=True)]
    held = {len(state) for state in kept if state is not None}
    if rows is not None and held - {rows}:
        raise ValueError(f"past_key_values has {max(held)} rows, not {rows}: use reorder_cache(indices)")
    if not config.attention_layers and not isinstance(layers[0], CountingLayer):
        layers[0] = CountingLayer(states, device)
    return past_key_values


def count_tokens(cache: Cache, length: int) -> None:
    """Count `length` new tokens in a model without attention layers, whose cache would not."""
    if isinstance(cache.layers[0], CountingLayer):
        cache.layers[0].cumulative_length.add_(length)
