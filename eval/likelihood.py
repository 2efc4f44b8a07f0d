"""Log-likelihoods of many continuations by a recurrent model, with little computed twice or for nothing.

Requests that share a context (the choices of one question) read it once: the state after it is copied to
each continuation, whatever the context's length. The others are sorted by length, so that a batch is hardly
padded. The output head sees only the positions that are asked about.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor
from tqdm import tqdm

from fla_train.models import DeltaProductForCausalLM

SHARE_FROM = 8  # tokens of a shared context from which a forward pass of its own pays
MAX_ROWS = 512  # continuations side by side: each has a state of its own
HEAD_ROWS = 8192  # positions whose logits exist at once

Answer = tuple[float, bool]


@dataclass(frozen=True)
class _Request:
    """Tokens that are only read, the inputs whose outputs count, and their targets (as many as inputs)."""

    index: int
    context: tuple[int, ...]
    inputs: list[int]
    targets: list[int]


def log_likelihoods(
    model: DeltaProductForCausalLM,
    requests: Sequence[tuple[Sequence[int], Sequence[int]]],
    *,
    max_length: int,
    batch_tokens: int,
    progress: bool = False,
) -> list[Answer]:
    """For each (context, continuation) the continuation's log-likelihood (nats), and whether it is greedy.

    Args:
        model: in eval mode.
        requests: token ids; both parts hold at least one token.
        max_length: tokens read at most; of longer requests the beginning is dropped.
        batch_tokens: tokens of a forward pass, padding included; halved when the GPU's memory is exceeded.
        progress: show a progress bar over requests.

    Raises:
        ValueError: an empty context, or a continuation that is empty or longer than `max_length`.
    """
    rows = [_cut(i, context, continuation, max_length) for i, (context, continuation) in enumerate(requests)]
    shared, alone = _by_context(rows)
    answers: list[Answer] = [(0.0, False)] * len(rows)
    with tqdm(total=len(rows), desc="log-likelihoods", unit="request", disable=not progress) as bar:
        for work, groups in ((_after_contexts, shared), (_whole, alone)):
            groups.sort(key=_cost, reverse=True)
            for row, answer in _batched(model, work, groups, batch_tokens):
                answers[row.index] = answer
                bar.update()
    return answers


def _cut(index: int, context: Sequence[int], continuation: Sequence[int], max_length: int) -> _Request:
    if not context or not 0 < len(continuation) <= max_length:
        raise ValueError(
            f"request {index} has {len(context)} tokens of context and {len(continuation)} of continuation: "
            f"there must be 1 or more of both, and {max_length} of the latter at most"
        )
    tokens = [*context, *continuation][-(max_length + 1) :]
    first = len(tokens) - len(continuation)  # the first target
    return _Request(index, tuple(tokens[: first - 1]), tokens[first - 1 : -1], tokens[first:])


def _by_context(rows: list[_Request]) -> tuple[list[list[_Request]], list[list[_Request]]]:
    """Groups that share a context worth sharing, and groups of one for all others."""
    groups: dict[tuple[int, ...], list[_Request]] = {}
    for row in rows:
        groups.setdefault(row.context, []).append(row)
    shared, alone = [], []
    for context, members in groups.items():
        if len(members) > 1 and len(context) >= SHARE_FROM:
            shared.append(members)
        else:
            alone += [[member] for member in members]
    return shared, alone


def _cost(group: list[_Request]) -> tuple[int, int]:
    """What a batch is padded to: the length of the context, then of the longest continuation."""
    return len(group[0].context), max(len(row.inputs) for row in group)


def _batched(
    model: DeltaProductForCausalLM,
    work: Callable[[DeltaProductForCausalLM, list[list[_Request]]], list[Answer]],
    groups: list[list[_Request]],
    batch_tokens: int,
) -> Iterator[tuple[_Request, Answer]]:
    """Run `work` on batches of sorted groups; on a GPU that runs out of memory, on halves of the batch."""
    waiting = list(_batches(groups, batch_tokens))[::-1]
    while waiting:
        batch = waiting.pop()
        try:
            answers = work(model, batch)
        except torch.OutOfMemoryError:
            if len(batch) == 1:
                raise
            torch.cuda.empty_cache()
            waiting += [batch[len(batch) // 2 :], batch[: len(batch) // 2]]
            continue
        yield from zip((row for group in batch for row in group), answers, strict=True)


def _batches(groups: list[list[_Request]], batch_tokens: int) -> Iterator[list[list[_Request]]]:
    batch: list[list[_Request]] = []
    rows = context = inputs = 0
    for group in groups:
        length, longest = _cost(group)
        context, inputs = max(context, length), max(inputs, longest)
        rows += len(group)
        too_many = (len(batch) + 1) * context + rows * inputs > batch_tokens or rows > MAX_ROWS
        if batch and too_many:
            yield batch
            batch, rows, context, inputs = [], len(group), length, longest
        batch.append(group)
    if batch:
        yield batch


@torch.inference_mode()
def _whole(model: DeltaProductForCausalLM, groups: list[list[_Request]]) -> list[Answer]:
    """Context and continuation in one pass, padded on the right: no position sees what comes after it."""
    rows = [row for group in groups for row in group]
    ids = _padded([[*row.context, *row.inputs] for row in rows], model.device)
    hidden = model.model(ids, use_cache=False).last_hidden_state  # [R, T, D]
    starts = [len(row.context) for row in rows]
    return _answers(model, hidden, rows, starts)


@torch.inference_mode()
def _after_contexts(model: DeltaProductForCausalLM, groups: list[list[_Request]]) -> list[Answer]:
    """Each context once, padded on the left so that all end together; then their continuations."""
    contexts = [group[0].context for group in groups]
    width = max(map(len, contexts))
    ids = _padded(contexts, model.device, left=True)  # [G, P]
    lengths = torch.tensor([len(context) for context in contexts], device=model.device)
    mask = torch.arange(width, device=model.device) >= width - lengths[:, None]  # [G, P]
    padded = len(set(map(len, contexts))) > 1
    cache = model.model(ids, attention_mask=mask if padded else None, use_cache=True).past_key_values
    owner = torch.tensor([g for g, group in enumerate(groups) for _ in group], device=model.device)  # [R]
    cache.reorder_cache(owner)

    rows = [row for group in groups for row in group]
    ids = _padded([row.inputs for row in rows], model.device)  # [R, L]
    if padded and model.config.attn is not None:  # a recurrent state has no padding in it; keys and values do
        mask = torch.cat([mask[owner], torch.ones_like(ids, dtype=torch.bool)], dim=1)  # [R, P + L]
    else:
        mask = None
    hidden = model.model(ids, attention_mask=mask, past_key_values=cache).last_hidden_state
    return _answers(model, hidden, rows, [0] * len(rows))


def _padded(rows: Sequence[Sequence[int]], device: torch.device, left: bool = False) -> Tensor:
    """Token ids [R, longest], zero where a row is shorter."""
    width = max(map(len, rows))
    ids = torch.zeros(len(rows), width, dtype=torch.long)
    for line, row in zip(ids, rows, strict=True):
        start = width - len(row) if left else 0
        line[start : start + len(row)] = torch.tensor(row)
    return ids.to(device)


def _answers(
    model: DeltaProductForCausalLM, hidden: Tensor, rows: list[_Request], starts: list[int]
) -> list[Answer]:
    """Sum of the targets' log-probabilities (fp32 or wider) and greediness, of targets from `starts` on."""
    counts = [len(row.targets) for row in rows]
    width = hidden.shape[1]
    where = [r * width + s + i for r, (s, n) in enumerate(zip(starts, counts, strict=True)) for i in range(n)]
    chosen = hidden.flatten(0, 1)[torch.tensor(where, device=hidden.device)]  # [N, D]
    targets = torch.tensor([token for row in rows for token in row.targets], device=hidden.device)  # [N]
    losses, greedy = [], []
    for part, target in zip(chosen.split(HEAD_ROWS), targets.split(HEAD_ROWS), strict=True):
        logits = model.lm_head(part)  # [n, vocabulary]
        wide = logits if logits.dtype == torch.float64 else logits.float()
        losses.append(F.cross_entropy(wide, target, reduction="none").double())
        greedy.append(logits.argmax(-1) == target)
    per_row = zip(torch.cat(losses).cpu().split(counts), torch.cat(greedy).cpu().split(counts), strict=True)
    return [(-loss.sum().item(), bool(same.all())) for loss, same in per_row]
