"""Context of a forward pass that all layers share: padding, document bounds, positions, attention masks."""

from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.cache_utils import Cache

from fla_train.kernels.context_parallel import ContextPart
from fla_train.kernels.delta_product.interface import check_cu_seqlens
from fla_train.models.carried_states import CarriedStates
from fla_train.models.configuration import DeltaProductConfig
from fla_train.models.visible_keys import PADDING, MovableTensors, VisibleKeys

Masks = dict[str, Tensor | None]  # `padding_mask` [B, T], and [B, keys] by the kind of attention layer


@dataclass(frozen=True)
class SequenceContext(MovableTensors):
    """One call's layout of its T new tokens, after those in the cache."""

    # [B, T] bool, False at padding; None: no padding
    padding_mask: Tensor | None = None
    # [S + 1] bounds of packed documents; with `part`, of those that have tokens in it
    cu_seqlens: Tensor | None = None
    # [T] distance from the document's start, with cu_seqlens
    position_in_document: Tensor | None = None
    # [T] in the sequence, including padding; for custom mixers
    positions: Tensor | None = None
    # [T, head size / 2] rotary angles for attention layers; None: no rotary positions
    cos: Tensor | None = None
    sin: Tensor | None = None
    # By the type of attention layer
    visible: dict[str, VisibleKeys] = field(default_factory=dict)
    # Attention layers append their softmax weights, if requested
    attentions: list[Tensor] | None = None
    # The part of the rows on this rank in context parallelism; None: whole rows
    part: ContextPart | None = None
    # Initial and final states of the linear layers; None: zeros
    states: CarriedStates | None = None
    # [R] first and last document of each row, with states of packed rows
    first_documents: Tensor | None = None
    last_documents: Tensor | None = None

    @classmethod
    def build(
        cls,
        config: DeltaProductConfig,
        tokens: Tensor,
        attention_mask: Tensor | Masks | None = None,
        cu_seqlens: Tensor | None = None,
        cache: Cache | None = None,
        attentions: list[Tensor] | None = None,
        longest: int | None = None,
        part: ContextPart | None = None,
        states: CarriedStates | None = None,
    ) -> "SequenceContext":
        """Derive the layout of tokens [B, T, ...] without synchronizing with the device.

        Args:
            attention_mask: as for `masks`, or its result.
            cu_seqlens: [S + 1] bounds of the documents packed in one row (B = 1).
            cache: of earlier tokens, from `cache_for`.
            longest: upper bound of the document lengths, if the host knows it; saves attention time.
            part: the part of the rows on this rank; `cu_seqlens` has the bounds of the whole row.
            states: of B rows, or of R equal rows that form the packed one.

        Raises:
            ValueError: the arguments contradict each other.
        """
        length = tokens.shape[1]
        layout: dict[str, Any] = {"attentions": attentions, "part": part, "states": states}
        documents, start = None, (0 if part is None else part.start(length))
        if cu_seqlens is not None:
            if part is None:  # otherwise the operator checks the bounds of the part
                check_cu_seqlens(cu_seqlens, tokens)
            position = torch.arange(start, start + length, device=tokens.device)
            cu_seqlens = cu_seqlens.to(position)  # searchsorted wants one dtype
            documents = torch.searchsorted(cu_seqlens[1:], position, right=True)
            in_document = position - cu_seqlens[documents]
            if states is not None:
                by_row = documents.view(states.rows, -1)
                layout |= {"first_documents": by_row[:, 0], "last_documents": by_row[:, -1]}
                if states.carries_inputs:
                    # A row may start inside a document. Then the convolution reads inputs before the row.
                    first = (by_row == by_row[:, :1]).flatten()
                    in_document = torch.where(first, in_document + config.conv_size - 1, in_document)
            layout["position_in_document"] = in_document
        layer_masks = attention_mask
        if not isinstance(layer_masks, dict):
            layer_masks = masks(config, tokens, attention_mask, cache)
        arguments = tokens, cache, layer_masks, documents, cu_seqlens, start, longest
        visible = {kind: _visible_keys(config, kind, *arguments) for kind in attention_kinds(config)}
        if config.mixer is not None:
            positions = torch.arange(length, device=tokens.device)
            layout["positions"] = positions + (0 if cache is None else cache.get_seq_length())
        if visible and config.rope_theta is not None:
            queries = next(iter(visible.values())).queries  # equal for all types
            layout["cos"], layout["sin"] = _rotary_angles(config, queries, tokens.dtype)
        if part is not None and cu_seqlens is not None:
            cu_seqlens = part.bounds(cu_seqlens, length)
        return cls(layer_masks["padding_mask"], cu_seqlens, visible=visible, **layout)


def document_bounds(
    tokens: int,
    attention_mask: Tensor | None,
    cu_seqlens: Tensor | None = None,
    position_ids: Tensor | None = None,
    *,
    cu_seq_lens_q: Tensor | None = None,
    cu_seq_lens_k: Tensor | None = None,
    seq_idx: Tensor | None = None,
    max_length_q: int | None = None,
    max_length_k: int | None = None,
) -> Tensor | None:
    """Return the `cu_seqlens` [S + 1] of packed documents from the first argument that has them, or None.

    `seq_idx` and `position_ids` make the host wait for the device.

    Args:
        tokens: T, the number of new tokens.
        attention_mask: [B, at least T]; 0 at padding, whose positions are ignored.
        cu_seqlens: [S + 1], returned unchanged.
        position_ids: [B, T], counting up by one, 0 again where a document starts.
        cu_seq_lens_q: [S + 1], from collators of transformers and TRL.
        seq_idx: [B, T], the number of each token's document.
        cu_seq_lens_k, max_length_q, max_length_k: not used here; collators pass them along.

    Raises:
        ValueError: positions jump, or packed documents are in more than one row.
    """
    bounds = cu_seq_lens_q if cu_seqlens is None else cu_seqlens
    if bounds is not None:
        return bounds
    numbers = position_ids if seq_idx is None else seq_idx
    if numbers is None or tokens == 1:
        return None
    if numbers.shape[-1] != tokens:
        raise ValueError(f"position_ids or seq_idx has shape {[*numbers.shape]}, expected [batch, {tokens}]")
    numbers = numbers.view(-1, tokens)
    if seq_idx is None:
        starts, jumps = numbers[:, 1:] == 0, numbers.diff() != 1
    else:
        starts = jumps = numbers.diff() != 0
    if attention_mask is not None:
        unpadded = attention_mask[:, -tokens:].bool()
        pairs = unpadded[:, 1:] & unpadded[:, :-1]
        starts, jumps = starts & pairs, jumps & pairs
    if (jumps & ~starts).any():
        raise ValueError("position_ids must count up by one, and from 0 again where a packed document starts")
    if not starts.any():
        return None
    if len(starts) != 1:
        raise ValueError(f"documents are packed in {len(starts)} rows: put all of them in one row")
    inner = starts[0].nonzero().flatten() + 1
    return torch.cat([inner.new_zeros(1), inner, inner.new_full((1,), tokens)])


def masks(
    config: DeltaProductConfig, tokens: Tensor, attention_mask: Tensor | None, cache: Cache | None = None
) -> Masks:
    """Return masks of the new tokens [B, T, ...] and of the keys, False at padding; None without padding.

    Args:
        attention_mask: [B, seen + T], 0 at padding. Without attention layers only the last T columns are
            used, and the columns of tokens in the cache may be absent.
        cache: of earlier tokens.

    Raises:
        ValueError: the mask has another shape.
    """
    batch, length = tokens.shape[:2]
    kinds = attention_kinds(config)
    layer_masks: Masks = dict.fromkeys(["padding_mask", *kinds])
    if attention_mask is None:
        return layer_masks
    seen = cache.layers[min(kinds.values())].get_seq_length() if cache is not None and kinds else 0
    counted = cache is None or (bool(kinds) and isinstance(seen, int))
    columns = seen + length if counted else max(length, attention_mask.shape[-1])
    if attention_mask.shape != (batch, columns):
        raise ValueError(f"attention_mask has shape {[*attention_mask.shape]} instead of {[batch, columns]}")
    unpadded = attention_mask.bool()
    if length > 1 and kinds and not torch.compiler.is_compiling() and unpadded.all():
        return layer_masks  # `generate` passes a mask of ones; without it attention has faster kernels
    layer_masks["padding_mask"] = unpadded[:, -length:]
    for kind, layer in kinds.items():
        keys, first = (length, 0) if cache is None else cache.layers[layer].get_mask_sizes(length)
        columns = unpadded[:, first : first + keys]
        # A static cache has room for later tokens.
        layer_masks[kind] = F.pad(columns, (0, keys - columns.shape[1]), value=True)
    return layer_masks


def attention_kinds(config: DeltaProductConfig) -> dict[str, int]:
    """Return the first layer of each type of attention layers."""
    return {
        kind: config.layer_types.index(kind) for kind in sorted({*config.layer_types} - {"linear_attention"})
    }


def _visible_keys(
    config: DeltaProductConfig,
    kind: str,
    tokens: Tensor,
    cache: Cache | None,
    layer_masks: Masks,
    documents: Tensor | None,
    cu_seqlens: Tensor | None,
    start: int,
    longest: int | None,
) -> VisibleKeys:
    """Return the keys that tokens [B, T, ...] see in layers of one type.

    Args:
        documents: [T] number of each token's document.
        start: position of the tokens in their rows in context parallelism; keys start at 0.
        longest: upper bound of the document lengths; None: not known.
    """
    (batch, length), device = tokens.shape[:2], tokens.device
    seen, keys, first = start, start + length, 0
    if cache is not None:
        layer = cache.layers[attention_kinds(config)[kind]]
        seen, (keys, first) = layer.get_seq_length(), layer.get_mask_sizes(length)
        seen = seen.to(device) if isinstance(seen, Tensor) else seen
    window = config.sliding_window if kind == "sliding_attention" else None
    if window is not None and isinstance(seen, int) and keys < min(window, seen + length):
        # transformers' cache raises an error only in layers of full attention.
        raise ValueError(f"a StaticCache of max_cache_len={keys} is full after {seen} tokens: make it longer")
    position = torch.arange(length, device=device)
    bounds = key_bounds = starts = None
    query_documents = key_documents = None if documents is None else documents[None]
    if start and documents is not None:
        before = torch.searchsorted(cu_seqlens[1:], torch.arange(start, device=device), right=True)
        key_documents = torch.cat([before, documents])[None]
    if layer_masks[kind] is not None:
        number = position.new_zeros(()) if documents is None else documents
        query_documents, key_documents = number.expand(1, length), number.where(layer_masks[kind], PADDING)
    elif isinstance(seen, int) and seen == start and keys == start + length:
        rows = torch.arange(batch + 1, device=device)
        bounds = rows * length if cu_seqlens is None else (cu_seqlens - start).clamp(0, length)
        key_bounds = rows * keys if cu_seqlens is None else cu_seqlens.clamp(max=keys)
        bounds, key_bounds = bounds.int(), key_bounds.int()
    if documents is not None and device.type == "cpu" and not torch.compiler.is_compiling():
        starts = cu_seqlens[documents].tolist()
    return VisibleKeys(
        queries=position + seen,
        keys=torch.arange(keys, device=device) + first,
        window=window,
        query_documents=query_documents,
        key_documents=key_documents,
        cu_seqlens=bounds,
        key_cu_seqlens=key_bounds,
        longest=longest,
        first=seen - first if isinstance(seen, int) else None,
        starts=starts,
    )


def _rotary_angles(
    config: DeltaProductConfig, positions: Tensor, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Return cosine and sine [T, D/2] of position * theta^(-2i/D), in fp32 (fp64 for fp64 activations).

    Angles are computed in fp64: fp32 would be off by 0.002 at position 32,768. They are not a buffer, because
    the model's casts would round it.
    """
    half = config.hidden_size // config.num_attention_heads // 2
    channel = torch.arange(half, device=positions.device, dtype=torch.float64)
    angle = positions[:, None] * config.rope_theta ** (-channel / half)
    wide = torch.promote_types(dtype, torch.float32)
    return angle.cos().to(wide), angle.sin().to(wide)
