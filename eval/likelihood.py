"""Log-likelihoods of continuations by a recurrent model that reads a shared context once.

Requests often share a context (the choices of one question). The last output of a context predicts the first
token of each continuation, and each continuation starts from a copy of the state after the context. Contexts
and continuations are sorted by length and cut into batches with little padding. The output head computes
logits only for the positions that are scored.
"""

from collections.abc import Iterator, Sequence
from copy import deepcopy
from itertools import islice

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from tqdm import tqdm

from fla_train.eval.memory import in_halves
from fla_train.kernels.fused_ops import consume_logits
from fla_train.models.modeling import DeltaProductForCausalLM

# Most sequences in a batch, since each has its state.
MAX_ROWS = 512
# Positions whose logits exist at once.
HEAD_ROWS = 8192

Answer = tuple[float, bool]


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
        torch.OutOfMemoryError: the GPU's memory is too small for a single request.
    """
    groups: dict[tuple[int, ...], list[int]] = {}  # requests by context
    for i, (context, continuation) in enumerate(requests):
        if not context:
            raise ValueError(f"request {i} has no token of context")
        if not 0 < len(continuation) <= max_length:
            raise ValueError(f"request {i} has {len(continuation)} tokens, suite.max_length={max_length}")
        groups.setdefault(tuple(context[len(continuation) - max_length - 1 :]), []).append(i)
    contexts = list(groups)

    def score(batch: Sequence[int]) -> list[list[Answer]]:
        members = [[requests[i][1] for i in groups[contexts[c]]] for c in batch]
        return _score(model, [contexts[c] for c in batch], members, batch_tokens)

    answers: list[Answer] = [(0.0, False)] * len(requests)
    with tqdm(total=len(requests), desc="log-likelihoods", unit="request", disable=not progress) as bar:
        for batch in _batches(contexts, batch_tokens):
            for c, scored in zip(batch, in_halves(score, batch), strict=True):
                for i, answer in zip(groups[contexts[c]], scored, strict=True):
                    answers[i] = answer
                bar.update(len(scored))
    return answers


def _batches(rows: Sequence[Sequence[int]], batch_tokens: int) -> Iterator[list[int]]:
    """Yield the numbers of rows of similar length, the longest first, for batches of `batch_tokens`."""
    order, start = sorted(range(len(rows)), key=lambda i: -len(rows[i])), 0
    while start < len(order):
        size = min(max(1, batch_tokens // len(rows[order[start]])), MAX_ROWS)
        yield order[start : start + size]
        start += size


@torch.inference_mode()
def _score(
    model: DeltaProductForCausalLM,
    contexts: Sequence[Sequence[int]],
    continuations: Sequence[Sequence[Sequence[int]]],
    batch_tokens: int,
) -> list[list[Answer]]:
    """Score the continuations of each context: read each context once, then the rest of the continuations."""
    # Read the contexts, padded on the left.
    ids, mask = _padded(contexts, "left", model.device)  # [G, P]
    padded = not mask.all()
    read = model.model(ids, attention_mask=mask if padded else None, use_cache=True)

    # The outputs of the contexts predict the first tokens.
    rows = [row for group in continuations for row in group]
    counts = torch.tensor([len(group) for group in continuations])
    owners = torch.arange(len(contexts)).repeat_interleave(counts).to(model.device)
    first = _scores(model, read.last_hidden_state[owners, -1], torch.tensor([row[0] for row in rows]))
    answers = list(zip(*(part.tolist() for part in first), strict=True))

    # The other tokens follow copies of the states.
    def follow(batch: Sequence[int]) -> list[Answer]:
        ids, valid = _padded([rows[i][:-1] for i in batch], "right", model.device)  # [R, L]
        owner = owners[list(batch)]
        seen = None  # a recurrent state holds no padding, but keys and values do
        if padded and model.config.attention_layers:
            seen = torch.cat([mask[owner], torch.ones_like(valid)], dim=1)  # [R, P + L]
        cache = deepcopy(read.past_key_values)
        cache.reorder_cache(owner)
        hidden = model.model(ids, attention_mask=seen, past_key_values=cache).last_hidden_state
        targets = torch.cat([torch.tensor(rows[i][1:]) for i in batch])
        scored, valid = _scores(model, hidden[valid], targets), valid.cpu()
        values, greedy = torch.zeros(valid.shape, dtype=torch.float64), torch.ones_like(valid)
        values[valid], greedy[valid] = scored
        return list(zip(values.sum(1).tolist(), greedy.all(1).tolist(), strict=True))

    longer = [i for i, row in enumerate(rows) if len(row) > 1]
    for batch in _batches([rows[i][:-1] for i in longer], batch_tokens):
        members = [longer[n] for n in batch]
        for i, (value, greedy) in zip(members, in_halves(follow, members), strict=True):
            answers[i] = answers[i][0] + value, answers[i][1] and greedy
    each = iter(answers)
    return [list(islice(each, len(group))) for group in continuations]


def _padded(rows: Sequence[Sequence[int]], side: str, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return token ids [R, longest], padded with zeros on a side, and which of them are tokens."""
    tensors = [torch.from_numpy(np.array(row)) for row in rows]  # torch.tensor takes four times as long
    ids = pad_sequence(tensors, batch_first=True, padding_value=-1, padding_side=side).to(device)
    return ids.clamp_min(0), ids >= 0


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
