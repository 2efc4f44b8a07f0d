"""Check that a mixer keeps its contract (docs/mixers.md); `fla-doctor --mixer` prints the results.

Each check computes the same outputs of a small model in two ways. Its result is the largest difference
between the two, relative to the largest output.
"""

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers import StaticCache

from fla_train.models.configuration import DeltaProductConfig
from fla_train.models.modeling import DeltaProductForCausalLM

TOLERANCE = 1e-3  # of a result in fp32; a mixer that breaks its contract is off by much more
LENGTH, LENGTHS = 19, (19, 11, 4)  # of the rows, and of what padding leaves of them
PIECES = (1, 9, 2, 1, 6)  # tokens of consecutive calls with a cache

Pairs = list[tuple[Tensor, Tensor]]  # outputs, and what they must be equal to


def small_model(mixer: str, options: dict[str, Any]) -> DeltaProductForCausalLM:
    """Build a model of a class on the GPU, if there is one, with weights large enough that each matters.

    Raises:
        ValueError: the class can't be used.
    """
    torch.manual_seed(0)
    sizes = {"vocab_size": 64, "hidden_size": 64, "num_hidden_layers": 2, "num_heads": 4, "head_dim": 16}
    config = DeltaProductConfig(**sizes, initializer_range=0.3, mixer=mixer, mixer_options=options)
    return DeltaProductForCausalLM(config).eval().to("cuda" if torch.cuda.is_available() else "cpu")


def contract_checks(model: DeltaProductForCausalLM) -> dict[str, Callable[[], Pairs]]:
    """Return the checks by what each of them shows; those of a cache only for a mixer that takes one."""
    generator = torch.Generator().manual_seed(1)
    rows = torch.randint(1, model.config.vocab_size, (len(LENGTHS), LENGTH), generator=generator)
    shifted = torch.stack([row.roll(LENGTH - n) for row, n in zip(rows, LENGTHS, strict=True)])
    mask = (torch.arange(LENGTH) < torch.tensor(LENGTHS)[:, None]).long()
    rows, shifted, mask = rows.to(model.device), shifted.to(model.device), mask.to(model.device)

    @torch.no_grad()
    def logits(ids: Tensor, **options: Tensor | bool) -> Tensor:
        return model(ids, **options).logits

    def later_tokens() -> Pairs:
        return [(logits(rows[:, :7]), logits(rows)[:, :7])]

    def padding() -> Pairs:
        right = logits(rows, attention_mask=mask)
        left = logits(shifted, attention_mask=mask.flip(1))
        alone = [logits(row[None, :n])[0] for row, n in zip(rows, LENGTHS, strict=True)]
        unpadded = [(right[i, :n], left[i, -n:]) for i, n in enumerate(LENGTHS)]
        return [(x, row) for pair, row in zip(unpadded, alone, strict=True) for x in pair]

    def documents() -> Pairs:
        pieces = [rows[0, :8], rows[1, :1], rows[2, :13]]
        bounds = torch.tensor([0, 8, 8, 9, 22], device=rows.device)  # an empty document, too
        packed = logits(torch.cat(pieces)[None], cu_seqlens=bounds)[0]
        return [(packed, torch.cat([logits(piece[None])[0] for piece in pieces]))]

    @torch.no_grad()
    def cache() -> Pairs:
        pairs = []
        for cache in (None, StaticCache(config=model.config, max_cache_len=LENGTH)):
            parts = []
            for part in rows.split(PIECES, dim=1):
                output = model(part, past_key_values=cache, use_cache=True)
                cache = output.past_key_values
                parts.append(output.logits)
            pairs.append((torch.cat(parts, dim=1), logits(rows)))
        return pairs

    def beams() -> Pairs:
        options = {"num_beams": 2, "min_new_tokens": 5, "max_new_tokens": 5, "pad_token_id": 0}
        options |= {"do_sample": False, "attention_mask": mask.flip(1)[:, -6:]}
        found, expected = (model.generate(shifted[:, -6:], use_cache=x, **options) for x in (True, False))
        return [(found.double(), expected.double())]

    def gradients() -> Pairs:
        trained = copy.deepcopy(model).float().train()
        with torch.autocast(rows.device.type, dtype=torch.bfloat16):
            loss = trained(rows, labels=rows).loss
        found = torch.autograd.grad(loss, list(trained.parameters()))
        return [(grad, grad) for grad in found]  # the difference of two infinities is NaN

    checks = {
        "no output depends on a later token": later_tokens,
        "padding changes no other token": padding,
        "packed documents equal separate ones": documents,
        "gradients are finite in bf16": gradients,
    }
    if model.model.supports_cache:
        checks |= {"a cache continues a pass": cache, "a cache serves beam search": beams}
    return checks


def difference(pairs: Pairs) -> float:
    """Return the largest difference within pairs of tensors, relative to what is expected; NaN if one is."""
    errors = [(x - y).abs().max() / y.abs().max().clamp(min=1e-30) for x, y in pairs]
    return torch.stack(errors).max().item()
