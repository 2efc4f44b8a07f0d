"""Which keys each token may attend to, kept as positions and document numbers; masks are made in parts."""

from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

PADDING = -1  # in place of a document's number


class MovableTensors:
    """Base of dataclasses that hold tensors, or others of these, also in dicts."""

    def to(self, device: torch.device | str | int) -> "MovableTensors":
        """The same on `device`; accelerate calls it where a `device_map` spreads the layers."""

        def moved(value: Any) -> Any:
            if isinstance(value, dict):
                return {key: moved(item) for key, item in value.items()}
            return value.to(device) if isinstance(value, Tensor | MovableTensors) else value

        return replace(self, **{field.name: moved(getattr(self, field.name)) for field in fields(self)})


@dataclass(frozen=True)
class VisibleKeys(MovableTensors):
    """The keys that T new tokens may attend to in all attention layers of one kind, S keys with the new ones.

    A token sees the tokens of its own document up to itself, within the window. A padding token is seen by
    itself only, so that no row of a softmax is empty. The whole [T, S] mask would grow with the square of the
    length; from these vectors `mask` makes any part of it.
    """

    queries: Tensor  # [T] positions in the stream
    keys: Tensor  # [S]
    window: int | None = None  # how many tokens a token sees, itself included
    query_documents: Tensor | None = None  # [1, T] numbers of documents; None: one in each row
    key_documents: Tensor | None = None  # [B or 1, S], or PADDING
    cu_seqlens: Tensor | None = None  # int32 bounds of all documents, row after row; None: padding or a cache
    key_cu_seqlens: Tensor | None = None  # those of their keys, which may begin before the queries
    longest: int | None = None  # what no document of `cu_seqlens` is longer than; None: a row
    first: int | None = None  # index of the first query's own key; None: known on the device only
    starts: list[int] | None = None  # by query, the first key of its document; None: not known on the host

    @property
    def plain(self) -> bool:
        """Whether a kernel's own causality says it all: no token sees less than all before it."""
        length, keys = len(self.queries), len(self.keys)
        if self.first is None or self.query_documents is not None or keys != self.first + length:
            return False
        return length == 1 or (self.first == 0 and (self.window is None or self.window >= length))

    @cached_property
    def mask_of_step(self) -> Tensor:
        """`mask()`, made once for all layers: for one token, where it is small."""
        return self.mask()

    def key_range(self, start: int, stop: int) -> tuple[int, int]:
        """Indices from and to which keys can be visible to the queries from `start` to `stop`."""
        low, high = 0, len(self.keys)
        if self.first is not None:
            high = min(high, self.first + stop)
            if self.window is not None:
                low = max(low, self.first + start - self.window + 1)
        if self.starts is not None:
            low = max(low, self.starts[start])
        return low, high

    def mask(self, queries: slice | None = None, keys: slice | None = None) -> Tensor:
        """True where a query sees a key, [B or 1, 1, queries, keys]. None: all of them."""
        queries, keys = queries or slice(None), keys or slice(None)  # torch 2.11 traces no such defaults
        query, key = self.queries[queries, None], self.keys[keys]
        visible = key <= query
        if self.window is not None:
            visible = visible & (key > query - self.window)
        visible = visible[None]
        if self.query_documents is not None:
            same = self.query_documents[:, queries, None] == self.key_documents[:, None, keys]
            visible = visible & (same | (key == query))
        return visible[:, None]
