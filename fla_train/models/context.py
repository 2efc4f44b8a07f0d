"""What all layers of one forward pass share: padding, document boundaries and the position in the stream."""

from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor

from fla_train.models.configuration import DeltaProductConfig


@dataclass(frozen=True)
class SequenceContext:
    """One call's layout of its T new tokens, after `seen` tokens in the cache."""

    seen: int
    keep: Tensor | None = None  # [B, T] bool, False at padding; None: no padding
    cu_seqlens: Tensor | None = None  # [S + 1] packed documents
    offsets: Tensor | None = None  # [T] distance from the document's start, with cu_seqlens
    visible: Tensor | None = None  # [B or 1, 1, T, keys] bool for attention layers; None: plain causal
    attentions: list[Tensor] | None = None  # where attention layers leave their softmax weights, if asked for

    @classmethod
    def build(
        cls,
        config: DeltaProductConfig,
        tokens: Tensor,
        attention_mask: Tensor | None,
        cu_seqlens: Tensor | None,
        seen: int,
        attentions: list[Tensor] | None = None,
    ) -> "SequenceContext":
        """Derive the layout for tokens [B, T, ...] without waiting for the device.

        Args:
            attention_mask: [B, seen + T], 0 at padding.
            cu_seqlens: [S + 1] bounds of the documents packed in one row (B = 1).

        Raises:
            ValueError: when the arguments contradict each other.
        """
        batch, length = tokens.shape[:2]
        keep = segments = offsets = visible = None
        if attention_mask is not None:
            if attention_mask.shape != (batch, seen + length):
                raise ValueError(
                    f"attention_mask has shape {list(attention_mask.shape)}, "
                    f"expected [batch, seen + new tokens] = {[batch, seen + length]}"
                )
            keep = attention_mask[:, seen:].bool()
        if cu_seqlens is not None:
            if batch != 1:
                raise ValueError(f"cu_seqlens packs documents in one row: batch 1, not {batch}")
            position = torch.arange(length, device=tokens.device)
            cu_seqlens = cu_seqlens.to(position)  # searchsorted wants one dtype
            segments = torch.searchsorted(cu_seqlens[1:], position, right=True)
            offsets = position - cu_seqlens[segments]
        if config.attn is not None:
            visible = _visible(
                length, seen, config.attn["window_size"], attention_mask, segments, tokens.device
            )
        return cls(seen, keep, cu_seqlens, offsets, visible, attentions)

    def to(self, device: torch.device | str | int) -> "SequenceContext":
        """The same on `device`: accelerate asks for it where a `device_map` spreads the layers."""
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
        attention_mask: [B, at least T]; what it calls padding may have any position.
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
        keep = attention_mask[:, -length:].bool()
        pairs = keep[:, 1:] & keep[:, :-1]
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


def _visible(
    length: int,
    seen: int,
    window: int | None,
    attention_mask: Tensor | None,
    segments: Tensor | None,
    device: torch.device,
) -> Tensor | None:
    """Which keys each new token may attend to, or None where plain causality says it all.

    Keys are the new tokens after what the cache kept: all `seen` tokens, or the last window - 1 of them.
    """
    past = seen if window is None else min(seen, window - 1)
    if past == 0 and attention_mask is None and segments is None and (window is None or window >= length):
        return None
    query = torch.arange(length, device=device)[:, None]
    key = torch.arange(-past, length, device=device)[None, :]
    visible = key <= query
    if window is not None:
        visible = visible & (key > query - window)
    if segments is not None:
        visible = visible & (segments[:, None] == segments[None, :])
    visible = visible[None, None]
    if attention_mask is not None:
        # A padded query sees itself, so that no row of the softmax is empty.
        unpadded = attention_mask[:, seen - past :].bool()[:, None, None, :]
        visible = (visible & unpadded) | (key == query)
    return visible
