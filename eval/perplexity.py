"""Loss against position: documents read in chunks, the state carried through the cache, so that memory is
constant in length for recurrent models and grows by keys and values alone for others.

Targets of a document are counted from 0; target i is predicted from a prefix token and the i tokens before
it. A *bucket* is a range of targets. All results follow from one table, the summed loss of each document in
each bucket.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from tqdm import tqdm
from transformers import PreTrainedModel

from fla_train.eval.documents import stacked
from fla_train.models import DeltaProductForCausalLM

Z95 = 1.96
CACHES = ("past_key_values", "cache_params", "state")  # what models call what they carry: most, Mamba, RWKV
TRIED = 32  # tokens by which a model shows that it carries on
ROUNDING, COARSE_ROUNDING = 1e-3, 0.03  # of logits, relative: in fp32 (as TF32 has it), in 16 bits


@dataclass(frozen=True)
class Estimate:
    """Mean loss (nats per token) over documents, and what its spread says.

    Attributes:
        loss: mean over documents of each one's mean loss.
        stderr: normal standard error over documents; None for a single one or an infinite loss.
        documents: how many.
        losses: each one's mean loss.
    """

    loss: float
    stderr: float | None
    documents: int
    losses: tuple[float, ...]

    @classmethod
    def of(cls, losses: np.ndarray) -> "Estimate":
        """From one mean loss per document, shape [D], D >= 1."""
        n = len(losses)
        spread = float(losses.std(ddof=1) / math.sqrt(n)) if n > 1 and np.isfinite(losses).all() else None
        return cls(float(losses.mean()), spread, n, tuple(losses.tolist()))

    @property
    def perplexity(self) -> float:
        return _exp(self.loss)

    @property
    def interval(self) -> tuple[float, float] | None:
        """95% confidence interval of the perplexity, normal on the scale of the loss."""
        if self.stderr is None:
            return None
        return _exp(self.loss - Z95 * self.stderr), _exp(self.loss + Z95 * self.stderr)


def _exp(loss: float) -> float:
    """exp, at most the largest float: a model that diverges has a perplexity beyond all numbers."""
    return math.exp(min(loss, 700.0))


@dataclass(frozen=True)
class LossTable:
    """Summed losses by document and bucket.

    Attributes:
        edges: bucket j holds the targets edges[j] <= i < edges[j + 1]; edges[0] = 0.
        sums: [D, len(edges) - 1] float64, nats; NaN where the document does not fill the bucket.
    """

    edges: tuple[int, ...]
    sums: np.ndarray

    def up_to(self, length: int) -> Estimate | None:
        """The first `length` targets (an edge) of every document that has them; None if none has."""
        cumulative = self.sums[:, : self.edges.index(length)].sum(axis=1)
        losses = cumulative[~np.isnan(cumulative)] / length
        return Estimate.of(losses) if len(losses) else None

    def by_position(self, length: int) -> list[tuple[int, int, Estimate]]:
        """(start, end, estimate) of each bucket below `length`, over the documents that reach `length`.

        The same documents stand behind every point, so the curve shows the model and not the choice of
        documents.
        """
        last = self.edges.index(length)
        sums = self.sums[~np.isnan(self.sums[:, last - 1]), :last]
        bounds = list(zip(self.edges, self.edges[1:], strict=False))[:last]
        return [(a, b, Estimate.of(sums[:, j] / (b - a))) for j, (a, b) in enumerate(bounds)]


def bucket_edges(lengths: Sequence[int], bucket: int) -> tuple[int, ...]:
    """0, every multiple of `bucket` up to the longest length, and the lengths themselves.

    Raises:
        ValueError: no lengths, or numbers below 1.
    """
    if not lengths or min(lengths) < 1 or bucket < 1:
        raise ValueError(
            "suite.perplexity.lengths and suite.perplexity.bucket must hold integers of at least 1"
        )
    return tuple(sorted({0, *lengths, *range(bucket, max(lengths) + 1, bucket)}))


def loss_table(
    model: PreTrainedModel,
    documents: Sequence[Sequence[int]],
    edges: Sequence[int],
    *,
    prefix: Sequence[int] = (),
    chunk: int = 1024,
    batch_size: int = 4,
    progress: bool = False,
) -> LossTable:
    """Run `model` over `documents` and sum the losses by bucket.

    Args:
        model: any causal language model, with a cache if documents are longer than a chunk; in eval mode.
        documents: token ids; one shorter than the first bucket gets a row of NaN.
        edges: see `LossTable`.
        prefix: tokens before each document (usually the separator). Without any, a document's first token is
            context only and target 0 is its second.
        chunk: tokens per forward; memory is proportional to `batch_size * chunk * vocab_size`.
        batch_size: documents read side by side.
        progress: show a progress bar over tokens.

    A batch that exceeds the GPU's memory is read in halves.

    Raises:
        ValueError: a chunk or batch size below 1, the memory is too small for one document, or a document is
            longer than a chunk and the model does not carry its state from one to the next.
    """
    if chunk < 1 or batch_size < 1:
        raise ValueError("suite.perplexity.chunk and suite.perplexity.batch_size must be at least 1")
    edges = tuple(edges)
    sizes = [_targets(len(prefix) + len(document), edges) for document in documents]
    sums = np.full((len(documents), len(edges) - 1), np.nan)
    longest_first = sorted(range(len(sizes)), key=lambda d: -sizes[d])  # a batch holds ones of like length
    if sizes and sizes[first := longest_first[0]] > chunk and not isinstance(model, DeltaProductForCausalLM):
        _check_cache(model, stacked([documents[first]], prefix, 0, min(sizes[first], TRIED)), chunk)
    with tqdm(total=sum(sizes), unit="token", unit_scale=True, desc="loss", disable=not progress) as bar:
        for start in range(0, len(sizes), batch_size):
            members = [d for d in longest_first[start : start + batch_size] if sizes[d]]
            if not members:
                break
            rows = [documents[d][: max(sizes[d] + 1 - len(prefix), 0)] for d in members]
            summed = _sums(model, rows, prefix, edges, chunk, bar)  # [members, buckets]
            for d, row in zip(members, summed.tolist(), strict=True):
                full = edges.index(sizes[d])
                sums[d, :full] = row[:full]
    return LossTable(edges, sums)


def _targets(tokens: int, edges: tuple[int, ...]) -> int:
    """Targets to read of a row of `tokens`: up to an edge, since no full bucket needs more."""
    return max(edge for edge in edges if edge <= max(tokens - 1, 0))


@torch.inference_mode()
def _check_cache(model: PreTrainedModel, ids: Tensor, chunk: int) -> None:
    """That tokens read in chunks get the logits of one pass over all of them.

    Some of transformers' models do not: Mamba's forward of several tokens begins with an empty state whatever
    the cache holds, and goes on from it by single tokens only. So do its layers among others (Jamba, Bamba).
    That shows in the logits as more than rounding, or, where what was read before matters little, as an error
    as large as if it had not been read at all.

    Args:
        model: in eval mode.
        ids: the beginning of a document, [1, T], T >= 2.
        chunk: tokens per forward.

    Raises:
        ValueError: the model keeps no cache, fails with it, or loses what it has read.
    """
    ids = ids.to(model.get_input_embeddings().weight.device)
    half = ids.shape[1] // 2
    cache: dict[str, Any] = {}
    parts = []
    for part in ids.split(min(chunk, half), dim=1):
        if parts and not cache:
            raise ValueError(_beyond(model, chunk, "keeps no cache"))
        try:
            logits, cache = _forward(model, part, cache, keep=True)
        except Exception as failure:  # what goes wrong with a cache alone, whole documents may do without
            reason = f"{type(failure).__name__}: {' '.join(str(failure).split())[:200]}"
            raise ValueError(_beyond(model, chunk, f"fails with its cache ({reason})")) from failure
        parts.append(logits)
    carried = torch.cat(parts, dim=1)[:, half:].double()
    whole = _forward(model, ids, {}, keep=False)[0][:, half:].double()
    unread = _forward(model, ids[:, half:], {}, keep=False)[0].double() - whole
    error = carried - whole
    late = error.shape[1] // 2  # before it a short convolution, which is carried on, hides the lost state
    late_error, least = error[:, late:].norm(), 8 * torch.finfo(model.dtype).eps * whole[:, late:].norm()
    rounding = (COARSE_ROUNDING if model.dtype.itemsize < 4 else ROUNDING) * whole.norm()
    if error.norm() > rounding or late_error > max(0.5 * unread[:, late:].norm(), least):
        raise ValueError(_beyond(model, chunk, "loses its state between chunks"))


def _beyond(model: PreTrainedModel, chunk: int, fault: str) -> str:
    return (
        f"the model ({model.config.model_type}) {fault}: cannot be read beyond a chunk of {chunk:,} tokens; "
        "raise suite.perplexity.chunk to the longest length"
    )


def _forward(
    model: PreTrainedModel, ids: Tensor, cache: dict[str, Any], keep: bool
) -> tuple[Tensor, dict[str, Any]]:
    """Logits [B, T, vocabulary] of `ids` [B, T], and the cache after them by its name, if it is kept."""
    output = model(ids, use_cache=keep, **cache)
    kept = {name: getattr(output, name, None) for name in CACHES}
    return output.logits, {name: value for name, value in kept.items() if value is not None}


def _sums(
    model: PreTrainedModel,
    rows: list[Sequence[int]],
    prefix: Sequence[int],
    edges: tuple[int, ...],
    chunk: int,
    bar: tqdm,
) -> Tensor:
    """`_batch_sums`, in halves where the GPU's memory is too small for the whole."""
    done = bar.n
    try:
        return _batch_sums(model, rows, prefix, edges, chunk, bar)
    except torch.OutOfMemoryError:
        if len(rows) == 1:
            raise ValueError(
                f"the GPU's memory is too small for {chunk} tokens at once: lower suite.perplexity.chunk"
            ) from None
    torch.cuda.empty_cache()
    bar.n = done
    half = len(rows) // 2
    return torch.cat([_sums(model, part, prefix, edges, chunk, bar) for part in (rows[:half], rows[half:])])


@torch.inference_mode()
def _batch_sums(
    model: PreTrainedModel,
    rows: list[Sequence[int]],
    prefix: Sequence[int],
    edges: tuple[int, ...],
    chunk: int,
    bar: tqdm,
) -> Tensor:
    """Loss sums [B, buckets], float64 on the CPU. Rows are padded on the right: no target sees that."""
    device = model.get_input_embeddings().weight.device
    sizes = [len(prefix) + len(row) - 1 for row in rows]
    bounds = torch.tensor(edges[1:])
    sums = torch.zeros(len(rows), len(bounds), dtype=torch.float64)
    cache: dict[str, Any] = {}
    for start in range(0, max(sizes), chunk):
        stop = min(start + chunk, max(sizes))
        ids = stacked(rows, prefix, start, stop + 1).to(device)  # [B, C + 1]
        logits, cache = _forward(model, ids[:, :-1], cache, keep=max(sizes) > chunk)
        losses = torch.stack(list(map(_losses, logits, ids[:, 1:])))  # [B, C]
        losses = losses.nan_to_num(math.inf, math.inf)  # NaN marks a bucket without targets, not a lost model
        buckets = torch.bucketize(torch.arange(start, stop), bounds, right=True)
        sums.index_add_(1, buckets, losses.double().cpu())
        bar.update(sum(max(0, min(stop, size) - start) for size in sizes))
    return sums


def _losses(logits: Tensor, targets: Tensor) -> Tensor:
    """Losses [C] of one row, in fp32 or fp64. Row by row, so that no second copy of all logits is made."""
    return F.cross_entropy(
        logits if logits.dtype == torch.float64 else logits.float(), targets, reduction="none"
    )
