"""Loss by token position. Documents are read in chunks, and the model's cache carries the state between them.

Memory is constant in length for recurrent models, and grows by keys and values only for others.

Targets of a sequence are counted from 0. Target i is predicted from a prefix token and the i tokens before
it. A *bucket* is a range of targets. All results follow from one table, the summed loss of each document in
each bucket.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from tqdm import tqdm
from transformers import PreTrainedModel

from fla_train.eval.documents import Spans, stack_tokens
from fla_train.eval.intervals import Estimate
from fla_train.eval.memory import in_halves
from fla_train.models.modeling import DeltaProductForCausalLM
from fla_train.utils.errors import described

# Names of the cache in a model's output: transformers from 5.24 on, most models before, Mamba, RWKV.
CACHES = ("cache", "past_key_values", "cache_params", "state")
# Tokens of the check that chunks with a cache reproduce a single forward pass.
CHECKED_TOKENS = 32
# Relative rounding of logits in fp32 (with TF32), and in 16 bits.
ROUNDING, COARSE_ROUNDING = 1e-3, 0.03


@dataclass(frozen=True)
class LossTable:
    """Summed losses by bucket, with a row for each document in each sequence.

    Attributes:
        edges: bucket j holds the targets edges[j] <= i < edges[j + 1]; edges[0] = 0.
        cells: [3, R, len(edges) - 1] float64: summed losses (nats), NaN where the sequence does not fill the
            bucket; number of targets; bytes of the targets' text, 0 if they are not known.
        sequences: [R] int64, number of the row's sequence.
        documents: [R] int64, number of its document.
    """

    edges: tuple[int, ...]
    cells: np.ndarray
    sequences: np.ndarray
    documents: np.ndarray

    def up_to(self, length: int) -> Estimate | None:
        """Average the first `length` targets (an edge) of all sequences that have them; None if none has."""
        last = self.edges.index(length)
        return next(self._estimates(last, [slice(0, last)]), None)

    def by_position(self, length: int) -> Iterator[tuple[int, int, Estimate]]:
        """Yield (start, end, estimate) of each bucket below `length`.

        Every point averages the same sequences, those that reach `length`, so the curve shows the model and
        not the choice of documents.
        """
        last = self.edges.index(length)
        estimates = self._estimates(last, [slice(j, j + 1) for j in range(last)])
        return zip(self.edges, self.edges[1:], estimates, strict=False)

    def _estimates(self, last: int, ranges: Sequence[slice]) -> Iterator[Estimate]:
        """Yield an estimate for each range of buckets, over sequences that fill the first `last` ones."""
        rows = ~np.isnan(self.cells[0, :, last - 1])
        if not rows.any():
            return
        documents, index = np.unique(self.documents[rows], return_inverse=True)
        sequences = len(np.unique(self.sequences[rows]))
        for buckets in ranges:
            totals = self.cells[:, rows, buckets].sum(axis=2)
            yield Estimate.of(*(np.bincount(index, x, len(documents)) for x in totals), sequences)

    @classmethod
    def joined(cls, tables: Sequence["LossTable"]) -> "LossTable":
        """Return the table of all ranks' sequences, whose numbers become distinct."""
        numbers = [table.sequences * len(tables) + rank for rank, table in enumerate(tables)]
        cells = np.concatenate([table.cells for table in tables], axis=1)
        documents = np.concatenate([table.documents for table in tables])
        return cls(tables[0].edges, cells, np.concatenate(numbers), documents)


def bucket_edges(lengths: Sequence[int], bucket: int, per_octave: int | None = None) -> tuple[int, ...]:
    """Return 0, every multiple of `bucket` up to the longest length, and the lengths.

    With `per_octave` a bucket that begins at token n is at least as wide as the largest power of two up to n
    divided by `per_octave`. A curve to a million tokens then has few points, evenly spaced on a logarithmic
    axis.
    """
    assert min(lengths) > 0 and bucket > 0
    edges, edge = {0, *lengths}, 0
    while edge <= max(lengths):
        edges.add(edge)
        octave = 2 ** (edge.bit_length() - 1) if edge else 0
        edge += max(bucket, octave // per_octave if per_octave else 0)
    return tuple(sorted(edges))


def loss_table(
    model: PreTrainedModel,
    sequences: Sequence[Sequence[int]],
    edges: Sequence[int],
    *,
    spans: Sequence[Spans] | None = None,
    token_sizes: np.ndarray | None = None,
    prefix: Sequence[int] = (),
    chunk: int = 1024,
    batch_size: int = 4,
    progress: bool = False,
) -> LossTable:
    """Run `model` over `sequences` and sum the losses by bucket and document.

    Args:
        model: any causal language model in eval mode, with a cache if sequences are longer than a chunk.
        sequences: token ids; one shorter than the first bucket gets rows of NaN.
        edges: see `LossTable`.
        spans: the documents in each sequence; None: each sequence is a document.
        token_sizes: bytes of each token id, see `token_bytes`; None: not known.
        prefix: the token before each sequence (usually the separator), if any. Without it the first token of
            a sequence is context only, and target 0 is the second.
        chunk: tokens per forward; memory is proportional to `batch_size * chunk * vocab_size`.
        batch_size: sequences per batch. A batch that exceeds the GPU's memory is read in halves.
        progress: show a progress bar over tokens.

    Raises:
        ValueError: the memory is too small for one sequence, or a sequence is longer than a chunk and the
            model does not carry its state from one to the next.
    """
    edges = tuple(edges)
    assert len(prefix) <= 1
    spans = spans or [((d, 0),) for d in range(len(sequences))]
    counts = [len(span) for span in spans]
    first_row = np.cumsum([0, *counts])
    cells = np.zeros((3, sum(counts), len(edges) - 1))
    cells[0] = np.nan
    # Each sequence is read up to its last full bucket.
    lengths = [max(e for e in edges if e <= max(len(prefix) + len(s) - 1, 0)) for s in sequences]
    longest_first = sorted(range(len(lengths)), key=lambda s: -lengths[s])
    ours = isinstance(model, DeltaProductForCausalLM) and model.config.mixer is None
    if max(lengths, default=0) > chunk and not ours:
        ids = stack_tokens([sequences[longest_first[0]]], prefix, 0, min(max(lengths), CHECKED_TOKENS))
        if problem := find_cache_problem(model, ids, chunk):
            limits = f"the model ({model.config.model_type}) {problem} and reads at most {chunk:,} tokens"
            raise ValueError(f"{limits}: raise suite.perplexity.chunk to the longest length")

    def read(members: Sequence[int]) -> list[np.ndarray]:
        rows = [sequences[s][: max(lengths[s] + 1 - len(prefix), 0)] for s in members]
        return _batch_sums(model, rows, [spans[s] for s in members], edges, prefix, chunk, token_sizes)

    remedy = f"the GPU's memory is too small for {chunk} tokens at once: lower suite.perplexity.chunk"
    with tqdm(total=sum(lengths), unit="token", unit_scale=True, desc="loss", disable=not progress) as bar:
        for start in range(0, len(lengths), batch_size):
            members = [s for s in longest_first[start : start + batch_size] if lengths[s]]
            if not members:
                break
            for s, summed in zip(members, in_halves(read, members, remedy), strict=True):
                full = edges.index(lengths[s])
                cells[:, first_row[s] : first_row[s + 1], :full] = summed[..., :full]
                bar.update(lengths[s])
    documents = np.array([document for span in spans for document, _ in span], np.int64)
    return LossTable(edges, cells, np.repeat(np.arange(len(sequences)), counts), documents)


@torch.inference_mode()
def find_cache_problem(model: PreTrainedModel, ids: Tensor, chunk: int) -> str | None:
    """Return why tokens read in chunks do not get the logits of one pass over all of them; None if they do.

    Some models of transformers fail this: Mamba's forward pass of several tokens begins with an empty state
    whatever the cache holds (so do Jamba's and Bamba's). The error in the logits is then larger than
    rounding, or, where the earlier tokens matter little, as large as if they had not been read.

    Args:
        model: in eval mode.
        ids: the beginning of a document, [1, T], T >= 2.
        chunk: tokens per forward pass.
    """
    ids = ids.to(model.get_input_embeddings().weight.device)
    half = ids.shape[1] // 2
    cache: dict[str, Any] = {}
    parts = []
    for part in ids.split(min(chunk, half), dim=1):
        if parts and not cache:
            return "keeps no cache"
        try:
            logits, cache = forward(model, part, cache, keep=True)
        except Exception as failure:  # whole documents in one chunk may still work
            return f"fails with its cache ({described(failure)[:200]})"
        parts.append(logits)
    # Logits of the second half: from chunks, from one pass, and from a pass that has not read the first half.
    carried = torch.cat(parts, dim=1)[:, half:].double()
    whole = forward(model, ids, {}, keep=False)[0][:, half:].double()
    alone = forward(model, ids[:, half:], {}, keep=False)[0].double()
    rounding = (COARSE_ROUNDING if model.dtype.itemsize < 4 else ROUNDING) * whole.norm()
    if (carried - whole).norm() > rounding:
        return "loses its state between chunks"
    # In earlier positions a short convolution, whose state is kept, hides the loss of another state.
    carried, whole, alone = (logits[:, logits.shape[1] // 2 :] for logits in (carried, whole, alone))
    bound = max(0.5 * (alone - whole).norm(), 8 * torch.finfo(model.dtype).eps * whole.norm())
    return "loses its state between chunks" if (carried - whole).norm() > bound else None


def forward(
    model: PreTrainedModel, ids: Tensor, cache: dict[str, Any], keep: bool
) -> tuple[Tensor, dict[str, Any]]:
    """Return logits [B, T, vocabulary] of `ids` [B, T], and the cache by its name if it is kept."""
    output = model(ids, use_cache=keep, **cache)
    name = next((name for name in CACHES if getattr(output, name, None) is not None), None)
    return output.logits, {} if name is None else {name: getattr(output, name)}


@torch.inference_mode()
def _batch_sums(
    model: PreTrainedModel,
    rows: list[Sequence[int]],
    spans: list[Spans],
    edges: tuple[int, ...],
    prefix: Sequence[int],
    chunk: int,
    token_sizes: np.ndarray | None,
) -> list[np.ndarray]:
    """Sum losses, targets and bytes of each row by document and bucket, [3, documents, buckets] float64.

    Rows are padded on the right, which no target sees.
    """
    device = model.get_input_embeddings().weight.device
    sizes = [len(prefix) + len(row) - 1 for row in rows]
    sums = [np.zeros((3, len(span), len(edges) - 1)) for span in spans]
    cache: dict[str, Any] = {}
    for start in range(0, max(sizes), chunk):
        stop = min(start + chunk, max(sizes))
        ids = stack_tokens(rows, prefix, start, stop + 1)  # [B, C + 1]
        moved = ids.to(device)
        logits, cache = forward(model, moved[:, :-1], cache, keep=max(sizes) > chunk)
        # Row by row in fp32 or fp64, because for all rows at once the logits would be copied.
        wide = torch.promote_types(logits.dtype, torch.float32)
        pairs = zip(logits, moved[:, 1:], strict=True)
        losses = torch.stack([F.cross_entropy(x.to(wide), y, reduction="none") for x, y in pairs])  # [B, C]
        # NaN marks buckets without targets, so the NaN of a model that diverged becomes infinite.
        losses = losses.nan_to_num(math.inf, math.inf).double().cpu().numpy()
        for row, size in enumerate(sizes):
            if (end := min(stop, size)) > start:
                # Add each target to the cell of its document and its bucket.
                targets, positions = ids[row, 1 : end - start + 1].numpy(), np.arange(start, end)
                firsts = [first for _, first in spans[row]]
                documents = np.searchsorted(firsts, positions + 1 - len(prefix), side="right") - 1
                buckets = np.searchsorted(edges, positions, side="right") - 1
                cells = documents * (len(edges) - 1) + buckets
                weights = [losses[row, : end - start], np.ones(len(cells))]
                weights += [] if token_sizes is None else [token_sizes[targets]]
                for total, weight in zip(sums[row], weights, strict=False):
                    np.add.at(total.reshape(-1), cells, weight)
    return sums
