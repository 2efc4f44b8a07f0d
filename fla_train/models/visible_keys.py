"""Visible keys of each token, stored as positions and document numbers from which parts of masks are made."""

from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

PADDING = -1  # replaces a document number


class MovableTensors:
    """Base of dataclasses that contain tensors or other instances, possibly in dicts."""

    def to(self, device: torch.device | str | int) -> "MovableTensors":
        """Move all tensors to `device`. accelerate calls this if a `device_map` spreads the layers."""

        def moved(value: Any) -> Any:
            if isinstance(value, dict):
                return {key: moved(item) for key, item in value.items()}
            return value.to(device) if isinstance(value, Tensor | MovableTensors) else value

        return replace(self, **{field.name: moved(getattr(self, field.name)) for field in fields(self)})


@dataclass(frozen=True)
class VisibleKeys(MovableTensors):
    """Keys visible to T new tokens in all attention layers of one type; S keys include the new tokens.

    A token sees earlier tokens of the same document and itself, within the window. A padding token is visible
    only to itself, so that no row of a softmax is empty. The whole [T, S] mask would grow with the square of
    the length, so `mask` makes parts of it from these vectors.
    """

    queries: Tensor  # [T] positions in the stream
    keys: Tensor  # [S]
    window: int | None = None  # number of visible tokens, including the token itself
    query_documents: Tensor | None = None  # [1, T] document numbers; None: one document per row
    key_documents: Tensor | None = None  # [B or 1, S], or PADDING
    cu_seqlens: Tensor | None = None  # int32 bounds of all documents, row after row; None: padding or a cache
    key_cu_seqlens: Tensor | None = None  # bounds of their keys, which may begin before the queries
    longest: int | None = None  # upper bound of the document lengths; None: the row length
    first: int | None = None  # index of the first query's key; None: known only on the device
    starts: list[int] | None = None  # first key of each query's document; None: not known on the host

    @property
    def plain(self) -> bool:
        """Return whether each token sees all earlier tokens, so that a causal kernel needs no mask."""
        length, keys = len(self.queries), len(self.keys)
        if self.first is None or self.query_documents is not None or keys != self.first + length:
            return False
        return length == 1 or (self.first == 0 and (self.window is None or self.window >= length))

    @cached_property
    def mask_of_step(self) -> Tensor:
        """Return `mask()` of one token, made once for all layers."""
        return self.mask()

    def key_range(self, start: int, stop: int) -> tuple[int, int]:
        """Return the range of keys that can be visible to the queries from `start` to `stop`."""
        low, high = 0, len(self.keys)
        if self.first is not None:
            high = min(high, self.first + stop)
            if self.window is not None:
                low = max(low, self.first + start - self.window + 1)
        if self.starts is not None:
            low = max(low, self.starts[start])
        return low, high

    def mask(self, queries: slice | None = None, keys: slice | None = None) -> Tensor:
        """Return the mask [B or 1, 1, queries, keys], True where a query sees a key. None: all indices."""
        # Torch 2.11 cannot trace these slices as defaults.
        queries, keys = queries or slice(None), keys or slice(None)
        query, key = self.queries[queries, None], self.keys[keys]
        visible = key <= query
        if self.window is not None:
            visible = visible & (key > query - self.window)
        visible = visible[None]
        if self.query_documents is not None:
            same = self.query_documents[:, queries, None] == self.key_documents[:, None, keys]
            visible = visible & (same | (key == query))
        return visible[:, None]
