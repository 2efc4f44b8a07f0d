"""Validation during training: the mean loss per token, and how it falls with the context before the token."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
import torch.distributed as dist
from torch import Tensor

from fla_train.data.dataset import TokenDataset
from fla_train.data.sampler import Batch, PackedDataset, sequential_batches
from fla_train.training.config import TrainerConfig
from fla_train.utils.records import Record

PART_PERPLEXITY = "validation_perplexity/"  # key of a part's, before its name
Part = tuple[TokenDataset | PackedDataset, float]  # held-out sequences and their weight


@dataclass(frozen=True)
class Evaluation:
    """Mean losses in nats per target token over all ranks.

    Attributes:
        loss: of all targets.
        by_context: {"first-last": loss} of the targets that first to last tokens of their row or document
            precede; a bucket without targets is left out.
        bits_per_byte: of the targets' text; None where its bytes are not known.
    """

    loss: float
    by_context: dict[str, float]
    bits_per_byte: float | None = None


@torch.no_grad()
def evaluate(
    engine, batches: Iterable[Batch], *, seq_len: int, buckets: int, token_sizes: Tensor | None = None
) -> Evaluation:
    """Evaluate this rank's batches, on the engine's device; ranks may differ in their number.

    Args:
        seq_len: T, the longest context + 1.
        buckets: of equal width, into which contexts [1, T) are divided; at most T - 1.
        token_sizes: bytes of each token id, [ids] int64; None: not known.
    """
    buckets = min(buckets, seq_len - 1)
    device = engine.device
    sums = torch.zeros(3, buckets, device=device, dtype=torch.float64)  # losses, targets, bytes
    engine.eval()
    for batch in batches:
        with torch.autocast(
            device.type, engine.torch_autocast_dtype(), enabled=engine.torch_autocast_enabled()
        ):
            losses = engine.module.token_losses(batch.input_ids, cu_seqlens=batch.cu_seqlens)  # [B, T - 1]
        target = batch.labels[:, 1:] != -100
        bucket = (_context(batch) * buckets // seq_len).expand_as(losses)[target]
        sums[0].index_add_(0, bucket, losses[target].double())
        sums[1].index_add_(0, bucket, torch.ones_like(bucket, dtype=torch.float64))
        if token_sizes is not None:
            sums[2].index_add_(0, bucket, token_sizes.to(device)[batch.labels[:, 1:][target]].double())
    engine.train()
    dist.all_reduce(sums)
    total, targets, sizes = sums.tolist()
    means = {
        name: total[i] / targets[i] for i, name in enumerate(bucket_names(seq_len, buckets)) if targets[i]
    }
    bits = sum(total) / math.log(2) / sum(sizes) if sum(sizes) else None
    return Evaluation(sum(total) / max(1.0, sum(targets)), means, bits)


def validate_text(
    engine,
    parts: Mapping[str, Part],
    trainer: TrainerConfig,
    prepare: Callable[[Iterable[Tensor | Batch]], Iterable[Batch]],
    token_sizes: Tensor | None = None,
) -> Record:
    """Evaluate the first `trainer.eval_tokens` tokens of held-out text, shared out evenly among its parts.

    Args:
        parts: of a mixture by name, or the whole as ""; weights add up to 1.
        prepare: brings what is read to the engine's device.
        token_sizes: see `evaluate`.

    Returns:
        Loss, perplexity and bits per byte (where known) as weighted, all of each named part and, if asked
        for, the loss by context.
    """
    rank, world = dist.get_rank(), dist.get_world_size()
    limit = max(1, trainer.eval_tokens // len(parts) // trainer.seq_len)
    found = {}
    for name, (sequences, weight) in parts.items():
        read = sequential_batches(sequences, trainer.micro_batch_size, limit=limit, rank=rank, world=world)
        shape = {"seq_len": trainer.seq_len, "buckets": trainer.eval_buckets}
        found[name] = evaluate(engine, prepare(read), **shape, token_sizes=token_sizes), weight
    whole = weighted(list(found.values()))
    record: Record = {
        "validation_loss": whole.loss,
        "validation_perplexity": perplexity(whole.loss),
    }
    if whole.bits_per_byte is not None:
        record["validation_bits_per_byte"] = whole.bits_per_byte
    for name, (part, _) in found.items():
        if name:
            record[f"validation_loss/{name}"] = part.loss
            record[f"{PART_PERPLEXITY}{name}"] = perplexity(part.loss)
            if part.bits_per_byte is not None:
                record[f"validation_bits_per_byte/{name}"] = part.bits_per_byte
    if trainer.eval_buckets > 1:
        record |= {f"validation_loss_at/{key}": loss for key, loss in whole.by_context.items()}
    return record


def perplexity(loss: float) -> float:
    return math.exp(loss) if loss < 700 else math.inf


def bucket_names(seq_len: int, buckets: int) -> list[str]:
    """The contexts of each bucket, such as `1-255`: of bucket i those c with i <= c buckets / T < i + 1."""
    firsts = [max(1, -(-i * seq_len // buckets)) for i in range(buckets + 1)]
    return [f"{first}-{after - 1}" for first, after in pairwise(firsts)]


def weighted(parts: Sequence[tuple[Evaluation, float]]) -> Evaluation:
    """The mean over parts of a mixture, each with its weight; weights add up to 1."""
    by_context: dict[str, float] = {}
    for name in dict.fromkeys(name for part, _ in parts for name in part.by_context):
        known = [(part.by_context[name], weight) for part, weight in parts if name in part.by_context]
        by_context[name] = sum(loss * weight for loss, weight in known) / sum(weight for _, weight in known)
    counted = all(part.bits_per_byte is not None for part, _ in parts)
    bits = sum(part.bits_per_byte * weight for part, weight in parts) if counted else None
    return Evaluation(sum(part.loss * weight for part, weight in parts), by_context, bits)


def _context(batch: Batch) -> Tensor:
    """Tokens of the same row or document before each target, int64: [1, T - 1]."""
    positions = torch.arange(1, batch.input_ids.shape[1], device=batch.input_ids.device)
    if batch.cu_seqlens is None:
        return positions[None]
    bounds = batch.cu_seqlens.to(positions)
    return (positions - bounds[torch.searchsorted(bounds, positions, right=True) - 1])[None]
