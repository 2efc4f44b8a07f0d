"""Context of one forward pass, shared by all layers: padding, document bounds, positions, attention masks."""

from dataclasses import dataclass, fields, replace

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.cache_utils import Cache

from fla_train.models.configuration import DeltaProductConfig

Masks = dict[str, Tensor | None]  # the fields `padding_mask` and `visible` of a SequenceContext


@dataclass(frozen=True)
class SequenceContext:
    """One call's layout of its T new tokens, after those in the cache."""

    padding_mask: Tensor | None = None  # [B, T] bool, False at padding; None: no padding
    cu_seqlens: Tensor | None = None  # [S + 1] packed documents
    position_in_document: Tensor | None = None  # [T] distance from the document's start, with cu_seqlens
    positions: Tensor | None = None  # [T] positions in the stream, for attention layers
    visible: Tensor | None = None  # [B or 1, 1, T, keys] bool for attention layers; None: plain causal
    attentions: list[Tensor] | None = None  # where attention layers leave their softmax weights, if asked for

    @classmethod
    def build(
        cls,
        config: DeltaProductConfig,
        tokens: Tensor,
        attention_mask: Tensor | Masks | None = None,
        cu_seqlens: Tensor | None = None,
        cache: Cache | None = None,
        attentions: list[Tensor] | None = None,
    ) -> "SequenceContext":
        """Derive the layout for tokens [B, T, ...] without waiting for the device.

        Args:
            attention_mask: as `masks` takes it, or what `masks` has returned.
            cu_seqlens: [S + 1] bounds of the documents packed in one row (B = 1).
            cache: of the tokens before, as `cache_for` returns it.

        Raises:
            ValueError: when the arguments contradict each other.
        """
        batch, length = tokens.shape[:2]
        documents = in_document = positions = None
        if cu_seqlens is not None:
            if batch != 1:
                raise ValueError(f"cu_seqlens packs documents in one row: batch 1, not {batch}")
            position = torch.arange(length, device=tokens.device)
            cu_seqlens = cu_seqlens.to(position)  # searchsorted wants one dtype
            documents = torch.searchsorted(cu_seqlens[1:], position, right=True)
            in_document = position - cu_seqlens[documents]
        if config.attention_layers:
            positions = torch.arange(length, device=tokens.device) + _seen(config, cache, tokens.device)
        found = attention_mask
        if not isinstance(found, dict):
            found = masks(config, tokens, attention_mask, cache, documents)
        return cls(found["padding_mask"], cu_seqlens, in_document, positions, found["visible"], attentions)

    def to(self, device: torch.device | str | int) -> "SequenceContext":
        """The same on `device`; accelerate calls it where a `device_map` spreads the layers."""
        held = {field.name: getattr(self, field.name) for field in fields(self)}
        return replace(self, **{name: x.to(device) for name, x in held.items() if isinstance(x, Tensor)})


def document_bounds(
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
    """The `cu_seqlens` [S + 1] of packed documents, whichever argument gives them; None: rows are not packed.

    The first of these that is given is read; for all but `cu_seqlens` the host waits for the device.

    Args:
        attention_mask: [B, at least T]; 0 at padding, whose positions are not read.
        cu_seqlens: [S + 1], returned as it is.
        cu_seq_lens_q, cu_seq_lens_k: [S + 1], equal; `max_length_q` and `max_length_k` are not needed.
        seq_idx: [B, T], the number of each token's document.
        position_ids: [B, T], counting up by one, 0 again where a document starts.

    Raises:
        ValueError: for positions that jump, unequal bounds, or packed documents in more than one row.
    """
    if cu_seqlens is not None:
        return cu_seqlens
    if cu_seq_lens_q is not None or cu_seq_lens_k is not None:
        if cu_seq_lens_q is None or (cu_seq_lens_k is not None and not cu_seq_lens_q.equal(cu_seq_lens_k)):
            raise ValueError("cu_seq_lens_q and cu_seq_lens_k must be equal, the bounds of the documents")
        return cu_seq_lens_q
    numbers = position_ids if seq_idx is None else seq_idx
    if numbers is None or numbers.shape[-1] == 1:
        return None
    length = numbers.shape[-1]
    numbers = numbers.view(-1, length)
    starts = numbers[:, 1:] == 0 if seq_idx is None else numbers.diff() != 0
    if attention_mask is not None:
        unpadded = attention_mask[:, -length:].bool()
        pairs = unpadded[:, 1:] & unpadded[:, :-1]
        starts = starts & pairs
    if seq_idx is None:
        jumps = (numbers.diff() != 1) & ~starts
        if (jumps if attention_mask is None else jumps & pairs).any():
            raise ValueError(
                "position_ids must count up by one, and from 0 again where a packed document starts"
            )
    if not starts.any():
        return None
    if len(starts) != 1:
        raise ValueError(
            f"documents are packed in {len(starts)} rows: put all in one row, "
            "as transformers' DataCollatorWithFlattening does"
        )
    inner = starts[0].nonzero().flatten() + 1
    return torch.cat([inner.new_zeros(1), inner, inner.new_full((1,), length)])


def masks(
    config: DeltaProductConfig,
    tokens: Tensor,
    attention_mask: Tensor | None,
    cache: Cache | None = None,
    documents: Tensor | None = None,
) -> Masks:
    """What the new tokens [B, T, ...] may read: `padding_mask` and `visible` of a `SequenceContext`.

    Args:
        attention_mask: [B, seen + T], 0 at padding. Without attention layers only the last T columns are
            read, and after a cache there may be no others.
        cache: of the tokens before.
        documents: [T] number of each token's document, if several are packed.

    Raises:
        ValueError: for a mask of another shape.
    """
    batch, length = tokens.shape[:2]
    seen = _seen(config, cache, tokens.device)
    padding_mask = visible = None
    if attention_mask is not None:
        counted = cache is None or (bool(config.attention_layers) and isinstance(seen, int))
        columns = seen + length if counted else max(length, attention_mask.shape[-1])
        if attention_mask.shape != (batch, columns):
            raise ValueError(
                f"attention_mask has shape {list(attention_mask.shape)}, "
                f"expected [batch, seen + new tokens] = {[batch, columns]}"
            )
        padding_mask = attention_mask[:, -length:].bool()
    if config.attention_layers:
        layer = None if cache is None else cache.layers[config.attention_layers[0]]
        keys, first = (length, 0) if layer is None else layer.get_mask_sizes(length)
        window = config.sliding_window
        visible = _visible(length, seen, keys, first, window, attention_mask, documents, tokens.device)
    return {"padding_mask": padding_mask, "visible": visible}


def _seen(config: DeltaProductConfig, cache: Cache | None, device: torch.device) -> int | Tensor:
    """Tokens in the cache, by its first attention layer (0 without such layers); a tensor if it is static."""
    if cache is None or not config.attention_layers:
        return 0
    seen = cache.layers[config.attention_layers[0]].get_seq_length()
    return seen.to(device) if isinstance(seen, Tensor) else seen


def _visible(
    length: int,
    seen: int | Tensor,
    keys: int,
    first: int,
    window: int | None,
    attention_mask: Tensor | None,
    documents: Tensor | None,
    device: torch.device,
) -> Tensor | None:
    """Which keys, at positions `first` and on, each new token may attend to; None: plain causality.

    A static cache has keys beyond the newest token, which causality hides.
    """
    first_pass = isinstance(seen, int) and seen == 0 and keys == length
    if first_pass and attention_mask is None and documents is None and (window is None or window >= length):
        return None
    query = torch.arange(length, device=device)[:, None] + seen
    key = torch.arange(first, first + keys, device=device)[None, :]
    visible = key <= query
    if window is not None:
        visible = visible & (key > query - window)
    if documents is not None:
        visible = visible & (documents[:, None] == documents[None, :])
    visible = visible[None, None]
    if attention_mask is not None:
        # A padded query sees itself, so that no row of the softmax is empty.
        unpadded = attention_mask[:, first : first + keys].bool()
        unpadded = F.pad(unpadded, (0, keys - unpadded.shape[1]), value=True)[:, None, None, :]
        visible = (visible & unpadded) | (key == query)
    return visible
