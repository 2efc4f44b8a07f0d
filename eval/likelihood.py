"""Log-likelihoods of continuations by a recurrent model that reads a shared context once.

Requests often share a context (the choices of one question). The last output of the context predicts the
first token of each continuation, and each continuation starts from a copy of the state after the context.
Contexts, continuations and requests without a shared context are sorted by length and cut into batches with
little padding. The output head computes logits only for the positions that are scored.
"""

from collections.abc import Callable, Iterator, Sequence
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor, nn
from tqdm import tqdm
from transformers import PreTrainedModel
from transformers.cache_utils import Cache

from fla_train.eval.memory import in_halves
from fla_train.kernels.fused_ops import consume_logits
from fla_train.models.modeling import DeltaProductForCausalLM

# A shared context gets a separate forward pass from this many tokens on.
SHARE_FROM = 8
# Most sequences in a batch, since each has its state.
MAX_ROWS = 512
# A batch of 1/16 of the allowed tokens keeps a GPU busy for the time of a launch. Beyond that size a
# batch ends when more than this fraction of it would be padding.
MIN_SHARE, MAX_PADDING = 16, 1 / 16
# Rows of OPT's and BART's tables before the first position.
SKIPPED_ROWS = 2
# Positions whose logits exist at once.
HEAD_ROWS = 8192

Answer = tuple[float, bool]
Item, Found = TypeVar("Item"), TypeVar("Found")


def position_limit(model: PreTrainedModel) -> int | None:
    """Return how many tokens `model` can read, or None without a limit (recurrent states, rotary angles).

    `max_position_embeddings` alone does not decide, since rotary models declare it but have no limit. A model
    has a limit if it holds a table with a row for each of these positions: an embedding besides that of the
    tokens (GPT-2, OPT, BERT), or a fixed buffer (CTRL, GPT-J). MPT builds attention biases for `max_seq_len`
    tokens.
    """
    if model.config.model_type == "mpt":
        return model.config.max_seq_len
    declared = getattr(model.config, "max_position_embeddings", None)
    if not declared:
        return None
    tokens = model.get_input_embeddings()
    for module in model.modules():
        if isinstance(module, nn.Embedding) and module is not tokens:
            if 0 <= module.num_embeddings - declared <= SKIPPED_ROWS:
                # RoBERTa counts positions from the row after that of the padding.
                before = 0 if module.padding_idx is None else module.padding_idx + 1
                return min(declared, module.num_embeddings - before)
        elif any(buffer.dim() == 2 and len(buffer) == declared for buffer in module.buffers(recurse=False)):
            return declared
    return None


@dataclass(frozen=True)
class _Request:
    """A context of at least one token, and the tokens to score, at least one."""

    index: int
    context: tuple[int, ...]
    targets: list[int]

    @property
    def inputs(self) -> list[int]:
        """The tokens that a forward pass reads: all but the last one."""
        return [*self.context, *self.targets[:-1]]


def log_likelihoods(
    model: DeltaProductForCausalLM,
    requests: Sequence[tuple[Sequence[int], Sequence[int]]],
    *,
    max_length: int,
    batch_tokens: int,
    progress: bool = False,
) -> list[Answer]:
    """Return each continuation's log-likelihood (nats), and whether it is the greedy choice.

    Args:
        model: in eval mode.
        requests: token ids of context and continuation, at least one token each.
        max_length: most tokens to read; longer requests lose their beginning.
        batch_tokens: tokens of a forward pass, padding included; halved when the GPU's memory is exceeded.
        progress: show a progress bar over requests.

    Raises:
        ValueError: an empty context, or a continuation that is empty or longer than `max_length`.
    """
    needed = max((len(continuation) for _, continuation in requests), default=0)
    rows = [_cut(i, *parts, max_length, needed) for i, parts in enumerate(requests)]
    shared, alone = _by_context(rows)
    answers: list[Answer] = [(0.0, False)] * len(rows)
    after_contexts = partial(_after_contexts, model, batch_tokens=batch_tokens)
    with tqdm(total=len(rows), desc="log-likelihoods", unit="request", disable=not progress) as bar:
        for group, found in _batched(after_contexts, shared, lambda group: group[0].context, batch_tokens):
            for row, answer in zip(group, found, strict=True):
                answers[row.index] = answer
            bar.update(len(group))
        for row, answer in _batched(partial(_whole, model), alone, lambda row: row.inputs, batch_tokens):
            answers[row.index] = answer
            bar.update()
    return answers


def _cut(
    index: int, context: Sequence[int], continuation: Sequence[int], max_length: int, needed: int
) -> _Request:
    """Return a request cut to `max_length`; `needed`: length of the longest continuation, for errors."""
    if not context or not continuation:
        raise ValueError(
            f"request {index} has {len(context)} tokens of context and {len(continuation)} of continuation: "
            "both need at least 1"
        )
    if len(continuation) > max_length:
        raise ValueError(
            f"the continuation of request {index} has {len(continuation)} tokens, and at most {max_length} "
            f"are read: set suite.max_length={needed} or more"
        )
    kept = min(len(context), max_length + 1 - len(continuation))
    return _Request(index, tuple(context[len(context) - kept :]), list(continuation))


def _by_context(rows: list[_Request]) -> tuple[list[list[_Request]], list[_Request]]:
    """Return groups of requests that share a long enough context, and all other requests."""
    groups: dict[tuple[int, ...], list[_Request]] = {}
    for row in rows:
        groups.setdefault(row.context, []).append(row)
    shared, alone = [], []
    for context, members in groups.items():
        if len(members) > 1 and len(context) >= SHARE_FROM:
            shared.append(members)
        else:
            alone += members
    return shared, alone


def _batched(
    work: Callable[[list[Item]], list[Found]],
    items: Sequence[Item],
    tokens: Callable[[Item], Sequence[int]],
    batch_tokens: int,
) -> Iterator[tuple[Item, Found]]:
    """Run `work` on batches of items of similar length, or on halves of a batch that exceeds the memory."""
    ordered = sorted(items, key=lambda item: len(tokens(item)), reverse=True)
    ends = _ends([len(tokens(item)) for item in ordered], batch_tokens)
    for start, end in zip([0, *ends], ends, strict=False):
        yield from zip(ordered[start:end], in_halves(work, ordered[start:end]), strict=True)


def _ends(lengths: Sequence[int], batch_tokens: int) -> list[int]:
    """Return where batches of decreasing `lengths` end: if full, or if large and with much padding.

    Padding ends a batch only if padding all remaining items to its width would cost more than another batch.
    """
    ends, start, real, left = [], 0, 0, sum(lengths)
    for i, length in enumerate(lengths):
        padded = (i - start + 1) * lengths[start]
        full = padded > batch_tokens or i - start == MAX_ROWS
        spared = (len(lengths) - i) * lengths[start] - left  # padding of all remaining items
        pays = min(padded, spared) > batch_tokens / MIN_SHARE
        wasteful = pays and padded - real - length > MAX_PADDING * padded
        if i > start and (full or wasteful):
            ends.append(i)
            start, real = i, 0
        real += length
        left -= length
    return [*ends, len(lengths)] if lengths else []


@torch.inference_mode()
def _whole(model: DeltaProductForCausalLM, rows: list[_Request]) -> list[Answer]:
    """Score requests in one pass over context and continuation, padded on the right."""
    ids = _padded([row.inputs for row in rows], model.device)
    hidden = model.model(ids, use_cache=False).last_hidden_state  # [R, T, D]
    return _answers(model, hidden, [len(row.context) - 1 for row in rows], [row.targets for row in rows])


@torch.inference_mode()
def _after_contexts(
    model: DeltaProductForCausalLM, groups: list[list[_Request]], *, batch_tokens: int
) -> list[list[Answer]]:
    """Score groups of requests: read each context once, padded on the left, then the rest of the targets."""
    contexts = [group[0].context for group in groups]
    width = max(map(len, contexts))
    ids = _padded(contexts, model.device, left=True)  # [G, P]
    lengths = torch.tensor([len(context) for context in contexts], device=model.device)
    mask = torch.arange(width, device=model.device) >= width - lengths[:, None]  # [G, P]
    padded = len(set(map(len, contexts))) > 1
    read = model.model(ids, attention_mask=mask if padded else None, use_cache=True)

    rows = [row.targets for group in groups for row in group]
    owners = torch.tensor([g for g, group in enumerate(groups) for _ in group], device=model.device)
    first = torch.tensor([targets[0] for targets in rows])
    found = _scores(model, read.last_hidden_state[owners, -1], first)
    answers = list(zip(*(part.tolist() for part in found), strict=True))

    def follow(batch: list[int]) -> list[Answer]:
        ids = _padded([rows[i][:-1] for i in batch], model.device)  # [R, L]
        owner = owners[torch.tensor(batch, device=model.device)]  # [R]
        seen = None  # a recurrent state holds no padding, but keys and values do
        if padded and model.config.attention_layers:
            seen = torch.cat([mask[owner], torch.ones_like(ids, dtype=torch.bool)], dim=1)  # [R, P + L]
        cache = _selected(read.past_key_values, owner)
        hidden = model.model(ids, attention_mask=seen, past_key_values=cache).last_hidden_state
        return _answers(model, hidden, [0] * len(batch), [rows[i][1:] for i in batch])

    longer = [i for i, targets in enumerate(rows) if len(targets) > 1]
    for i, (value, greedy) in _batched(follow, longer, lambda i: rows[i][:-1], batch_tokens):
        answers[i] = answers[i][0] + value, answers[i][1] and greedy
    each = iter(answers)
    return [list(islice(each, len(group))) for group in groups]


def _padded(rows: Sequence[Sequence[int]], device: torch.device, left: bool = False) -> Tensor:
    """Return token ids [R, longest], zero where a row is shorter."""
    width = max(map(len, rows))
    zeros = [[0] * (width - len(row)) for row in rows]
    full = [[*none, *row] if left else [*row, *none] for row, none in zip(rows, zeros, strict=True)]
    return _tensor(full).to(device)


def _tensor(numbers: list) -> Tensor:
    """Return a tensor of lists, through NumPy, because torch takes 0.2 microseconds for each number."""
    return torch.from_numpy(np.array(numbers))


def _selected(cache: Cache, rows: Tensor) -> Cache:
    """Return a copy of the cache for the sequences `rows` [R], which may repeat."""
    chosen = deepcopy(cache)
    chosen.reorder_cache(rows)
    return chosen


def _answers(
    model: DeltaProductForCausalLM, hidden: Tensor, starts: Sequence[int], rows: Sequence[Sequence[int]]
) -> list[Answer]:
    """Score each row of targets, which the outputs hidden [R, T, D] predict from `starts` on."""
    counts = torch.tensor([len(row) for row in rows])  # [R]
    owner = torch.arange(len(rows)).repeat_interleave(counts)  # [N]
    begin = torch.arange(len(rows)) * hidden.shape[1] + torch.tensor(starts) - (counts.cumsum(0) - counts)
    where = torch.arange(len(owner)) + begin[owner]
    asked = hidden.flatten(0, 1)[where.to(hidden.device)]  # [N, D]
    values, greedy = _scores(model, asked, _tensor([token for row in rows for token in row]))
    sums = torch.zeros(len(rows), dtype=values.dtype).index_add_(0, owner, values)
    misses = torch.zeros(len(rows), dtype=torch.int64).index_add_(0, owner, (~greedy).long())
    return list(zip(sums.tolist(), (misses == 0).tolist(), strict=True))


def _scores(model: DeltaProductForCausalLM, hidden: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Score each target [N] by the output hidden [N, D] of the position before it.

    Log-probabilities are computed in fp32, or in fp64 for logits in fp64.

    Returns:
        Log-probabilities fp64, and whether the target is the likeliest token; both [N] on the CPU.
    """
    values, greedy = [], []
    targets = targets.to(hidden.device)
    for part, tokens in zip(hidden.split(HEAD_ROWS), targets.split(HEAD_ROWS), strict=True):
        logits = model.lm_head(part)  # [n, vocabulary]
        greedy.append(logits.argmax(-1) == tokens)
        values.append(-consume_logits(logits, tokens, with_gradient=False)[0])
    return torch.cat(values).double().cpu(), torch.cat(greedy).cpu()
