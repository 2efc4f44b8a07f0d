"""What generation carries from call to call: constant memory, except for keys and values of attention."""

import torch
from torch import Tensor


class DeltaProductCache:
    """Per layer a dict of tensors whose first axis is the batch; empty until the layer's first call.

    A recurrent layer keeps `state` [B, H, K, V] in fp32 and the last W-1 inputs of its convolutions,
    `q_conv`, `k_conv` and `v_conv` [B, channels, W-1]. A hybrid attention layer keeps `keys` and `values`
    [B, H_kv, S, D], of the window's tokens if it has one.

    It serves `generate`, which needs `get_seq_length`, `reorder_cache` and `is_compileable`, without being a
    transformers `Cache`: those are built around keys and values that grow.
    """

    is_compileable = False

    def __init__(self, num_layers: int) -> None:
        self.layers: list[dict[str, Tensor]] = [{} for _ in range(num_layers)]
        self.seen_tokens = 0

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Tokens seen so far, padding included; the same for every layer."""
        return self.seen_tokens

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Keep the sequences `beam_idx` [B'] of the batch, in that order (beam search)."""
        for layer in self.layers:
            for name, tensor in layer.items():
                layer[name] = tensor.index_select(0, beam_idx.to(tensor.device))

    batch_select_indices = reorder_cache

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat each sequence `repeats` times, neighbours staying together."""
        for layer in self.layers:
            for name, tensor in layer.items():
                layer[name] = tensor.repeat_interleave(repeats, dim=0)

    def __deepcopy__(self, memo: dict[int, object]) -> "DeltaProductCache":
        """Clones, through which gradients flow on: torch deep-copies no tensor that has a history."""
        copied = type(self)(0)
        copied.layers = [{name: tensor.clone() for name, tensor in layer.items()} for layer in self.layers]
        copied.seen_tokens = self.seen_tokens
        return copied

    def memory_bytes(self) -> int:
        """Bytes held by the tensors of all layers."""
        return sum(t.numel() * t.element_size() for layer in self.layers for t in layer.values())


def cache_for(past_key_values: object, num_layers: int, use_cache: bool) -> DeltaProductCache | None:
    """The cache to run with: the caller's own, a new one when `use_cache`, or none.

    Raises:
        ValueError: for a cache of another class or of another number of layers, which could only be dropped.
    """
    if past_key_values is None:
        return DeltaProductCache(num_layers) if use_cache else None
    if not isinstance(past_key_values, DeltaProductCache):
        raise ValueError(
            f"past_key_values is a {type(past_key_values).__name__}, which has no place for the states: "
            f"pass fla_train.models.DeltaProductCache({num_layers}), or none and use_cache=True"
        )
    if len(past_key_values.layers) != num_layers:
        raise ValueError(
            f"past_key_values has {len(past_key_values.layers)} layers, the model has {num_layers}"
        )
    return past_key_values


def append_along_time(past: Tensor | None, new: Tensor, limit: int | None) -> tuple[Tensor, Tensor]:
    """Append new [B, H, T, D] to past [B, H, S, D]: the whole, and its last `limit` entries to keep."""
    whole = new if past is None else torch.cat([past, new], dim=2)
    kept = whole if limit is None else whole[:, :, max(whole.shape[2] - limit, 0) :]
    return whole, kept
