"""Context of one forward pass, shared by all layers: padding, document bounds, positions, attention masks."""

from dataclasses import dataclass, field, replace

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

# What `document_bounds` takes of transformers' and TRL's collators, beside `position_ids`.
PACKING = ("cu_seq_lens_q", "cu_seq_lens_k", "seq_idx", "max_length_q", "max_length_k")


@dataclass(frozen=True)
class SequenceContext(MovableTensors):
    """One call's layout of its T new tokens, after those in the cache."""

    padding_mask: Tensor | None = None  # [B, T] bool, False at padding; None: no padding
    cu_seqlens: Tensor | None = None  # [S + 1] packed documents; of a part, those with tokens in it
    position_in_document: Tensor | None = None  # [T] distance from the document's start, with cu_seqlens
    positions: Tensor | None = None  # [T] in the sequence, padding included; for mixers of the user's own
    cos: Tensor | None = None  # [T, head size / 2] of the rotary angles, for attention layers; None: no RoPE
    sin: Tensor | None = None
    visible: dict[str, VisibleKeys] = field(default_factory=dict)  # by the kind of attention layer
    attentions: list[Tensor] | None = None  # where attention layers leave their softmax weights, if asked for
    part: ContextPart | None = None  # of the rows, where ranks share them; None: rows are whole
    states: CarriedStates | None = None  # that linear layers start from in place of zeros, and leave
    first_documents: Tensor | None = None  # [R] with states of packed rows: the document each row begins with
    last_documents: Tensor | None = None  # [R] and ends with

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
        """Derive the layout for tokens [B, T, ...] without waiting for the device.

        Args:
            attention_mask: as `masks` takes it, or what `masks` has returned.
            cu_seqlens: [S + 1] bounds of the documents packed in one row (B = 1).
            cache: of the tokens before, as `cache_for` returns it.
            longest: what no packed document is longer than, if the host knows; it saves attention time.
            part: the part of the rows that the tokens are; `cu_seqlens` has the bounds of the whole row.
            states: of B rows, or of the R equal rows that make up the packed one, each with own bounds.

        Raises:
            ValueError: when the arguments contradict each other.
        """
        length = tokens.shape[1]
        documents = in_document = positions = cos = sin = first_documents = last_documents = None
        start = 0 if part is None else part.start(length)
        if cu_seqlens is not None:
            if part is None:  # else the operator checks those of the part
                check_cu_seqlens(cu_seqlens, tokens)
            position = torch.arange(start, start + length, device=tokens.device)
            cu_seqlens = cu_seqlens.to(position)  # searchsorted wants one dtype
            documents = torch.searchsorted(cu_seqlens[1:], position, right=True)
            in_document = position - cu_seqlens[documents]
            if states is not None:
                by_row = documents.view(states.rows, -1)
                first_documents, last_documents = by_row[:, 0], by_row[:, -1]
                # A row's first document may have begun before it, and then its convolution's inputs did.
                first = (by_row == by_row[:, :1]).flatten()
                in_document = torch.where(first, in_document + config.conv_size - 1, in_document)
        found = attention_mask
        if not isinstance(found, dict):
            found = masks(config, tokens, attention_mask, cache)
        arguments = tokens, cache, found, documents, cu_seqlens, start
        visible = {
            kind: replace(_visible_keys(config, kind, *arguments), longest=longest)
            for kind in attention_kinds(config)
        }
        if config.mixer is not None:
            positions = torch.arange(length, device=tokens.device)
            positions = positions + (0 if cache is None else cache.get_seq_length())
        if visible and config.rope_theta is not None:
            queries = next(iter(visible.values())).queries  # the same for all kinds
            cos, sin = _rotary_angles(config, queries, tokens.dtype)
        padding_mask = found["padding_mask"]
        if part is not None and cu_seqlens is not None:
            cu_seqlens = part.bounds(cu_seqlens, length)
        return cls(
            *(padding_mask, cu_seqlens, in_document, positions, cos, sin, visible, attentions),
            *(part, states, first_documents, last_documents),
        )


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
    """The `cu_seqlens` [S + 1] of packed documents, whichever argument gives them; None: rows are not packed.

    The first of these that is given is read; for all but `cu_seqlens` the host waits for the device.

    Args:
        tokens: T, the new ones.
        attention_mask: [B, at least T]; 0 at padding, whose positions are not read.
        cu_seqlens: [S + 1], returned as it is.
        cu_seq_lens_q, cu_seq_lens_k: [S + 1], equal; `max_length_q` and `max_length_k` are not read here.
        seq_idx: [B, T], the number of each token's document.
        position_ids: [B, T], counting up by one, 0 again where a document starts.

    Raises:
        ValueError: for positions that jump or are not T, unequal bounds, or packed documents in more than
            one row.
    """
    if cu_seqlens is not None:
        return cu_seqlens
    if cu_seq_lens_q is not None or cu_seq_lens_k is not None:
        if cu_seq_lens_q is None or (cu_seq_lens_k is not None and not cu_seq_lens_q.equal(cu_seq_lens_k)):
            raise ValueError("cu_seq_lens_q and cu_seq_lens_k must be equal, the bounds of the documents")
        return cu_seq_lens_q
    numbers = position_ids if seq_idx is None else seq_idx
    if numbers is None:
        return None
    if numbers.shape[-1] != tokens:
        name = "position_ids" if seq_idx is None else "seq_idx"
        raise ValueError(f"{name} has shape {list(numbers.shape)}, expected [batch, new tokens = {tokens}]")
    if tokens == 1:
        return None
    numbers = numbers.view(-1, tokens)
    starts = numbers[:, 1:] == 0 if seq_idx is None else numbers.diff() != 0
    if attention_mask is not None:
        unpadded = attention_mask[:, -tokens:].bool()
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
    return torch.cat([inner.new_zeros(1), inner, inner.new_full((1,), tokens)])


def masks(
    config: DeltaProductConfig, tokens: Tensor, attention_mask: Tensor | None, cache: Cache | None = None
) -> Masks:
    """Which of the new tokens [B, T, ...] and of the keys are padding (False), None where nothing is.

    Args:
        attention_mask: [B, seen + T], 0 at padding. Without attention layers only the last T columns are
            read, and after a cache there may be no others.
        cache: of the tokens before.

    Raises:
        ValueError: for a mask of another shape.
    """
    batch, length = tokens.shape[:2]
    kinds = attention_kinds(config)
    found: Masks = dict.fromkeys(["padding_mask", *kinds])
    if attention_mask is None:
        return found
    seen = cache.layers[min(kinds.values())].get_seq_length() if cache is not None and kinds else 0
    counted = cache is None or (bool(kinds) and isinstance(seen, int))
    columns = seen + length if counted else max(length, attention_mask.shape[-1])
    if attention_mask.shape != (batch, columns):
        raise ValueError(
            f"attention_mask has shape {list(attention_mask.shape)}, "
            f"expected [batch, seen + new tokens] = {[batch, columns]}"
        )
    unpadded = attention_mask.bool()
    if length > 1 and kinds and not torch.compiler.is_compiling() and unpadded.all():
        return found  # `generate` gives a mask of ones; without it attention has faster kernels
    found["padding_mask"] = unpadded[:, -length:]
    for kind, layer in kinds.items():
        keys, first = (length, 0) if cache is None else cache.layers[layer].get_mask_sizes(length)
        part = unpadded[:, first : first + keys]
        found[kind] = F.pad(part, (0, keys - part.shape[1]), value=True)  # a static cache has free places
    return found


def attention_kinds(config: DeltaProductConfig) -> dict[str, int]:
    """The first layer of each kind of attention layers."""
    return {
        kind: config.layer_types.index(kind) for kind in sorted({*config.layer_types} - {"linear_attention"})
    }


def _visible_keys(
    config: DeltaProductConfig,
    kind: str,
    tokens: Tensor,
    cache: Cache | None,
    found: Masks,
    documents: Tensor | None,
    cu_seqlens: Tensor | None,
    start: int,
) -> VisibleKeys:
    """What the tokens [B, T, ...] see in layers of one kind; `documents` are their numbers [T].

    Tokens that are a part of their rows begin at `start`; the keys are those of the rows up to their end.
    """
    (batch, length), device = tokens.shape[:2], tokens.device
    seen, keys, first = start, start + length, 0
    if cache is not None:
        layer = cache.layers[attention_kinds(config)[kind]]
        seen, (keys, first) = layer.get_seq_length(), layer.get_mask_sizes(length)
        seen = seen.to(device) if isinstance(seen, Tensor) else seen
    position, bounds, key_bounds, starts = torch.arange(length, device=device), None, None, None
    query_documents = key_documents = None if documents is None else documents[None]
    if start and documents is not None:
        before = torch.searchsorted(cu_seqlens[1:], torch.arange(start, device=device), right=True)
        key_documents = torch.cat([before, documents])[None]
    if found[kind] is not None:
        number = position.new_zeros(()) if documents is None else documents
        query_documents, key_documents = number.expand(1, length), number.where(found[kind], PADDING)
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
        window=config.sliding_window if kind == "sliding_attention" else None,
        query_documents=query_documents,
        key_documents=key_documents,
        cu_seqlens=bounds,
        key_cu_seqlens=key_bounds,
        first=seen - first if isinstance(seen, int) else None,
        starts=starts,
    )


def _rotary_angles(
    config: DeltaProductConfig, positions: Tensor, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Cosine and sine [T, D/2] of position * theta^(-2i/D), in fp32 (fp64 for fp64 activations).

    An angle in fp32 would be off by 0.002 at position 32,768. A buffer would be rounded by the model's casts.
    """
    half = config.hidden_size // config.num_attention_heads // 2
    channel = torch.arange(half, device=positions.device, dtype=torch.float64)
    angle = positions[:, None] * config.rope_theta ** (-channel / half)
    wide = torch.promote_types(dtype, torch.float32)
    return angle.cos().to(wide), angle.sin().to(wide)
