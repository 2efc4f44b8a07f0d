"""Check that a mixer satisfies its contract (docs/mixers.md). `fla-doctor --mixer` prints the results.

Each check computes the outputs of a small model in two ways and returns the largest difference relative to
the largest output.
"""

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fla_train.models.configuration import DeltaProductConfig
from fla_train.models.modeling import DeltaProductForCausalLM

TOLERANCE = 1e-3  # rounding in fp32; violations of the contract are much larger
LENGTHS = (19, 11, 4)  # lengths of three rows, which are padded to the longest
Pairs = list[tuple[Tensor, Tensor]]  # outputs and expected values


def small_model(mixer: str, options: dict[str, Any]) -> DeltaProductForCausalLM:
    """Build a model on the GPU, if available, with weights so large that each affects the outputs.

    Raises:
        ValueError: the class can't be used.
    """
    torch.manual_seed(0)
    sizes = {"vocab_size": 64, "hidden_size": 64, "num_hidden_layers": 2, "num_heads": 4, "head_dim": 16}
    settings = {"use_forget_gate": True, "initializer_range": 0.3}
    config = DeltaProductConfig(**sizes, **settings, mixer=mixer, mixer_options=options)
    return DeltaProductForCausalLM(config).eval().to("cuda" if torch.cuda.is_available() else "cpu")


def contract_checks(model: DeltaProductForCausalLM) -> list[Callable[[], Pairs]]:
    """Return the checks of a model. The docstring of each is its name."""
    generator = torch.Generator().manual_seed(1)
    rows = torch.randint(1, model.config.vocab_size, (3, LENGTHS[0]), generator=generator).to(model.device)

    @torch.no_grad()
    def logits(ids: Tensor, **options: Tensor) -> Tensor:
        return model(ids, **options).logits

    def later_tokens() -> Pairs:
        """no output depends on a later token"""
        return [(logits(rows[:, :7]), logits(rows)[:, :7])]

    def padding() -> Pairs:
        """padding changes no other token"""
        shifted = torch.stack([row.roll(-n) for row, n in zip(rows, LENGTHS, strict=True)])
        mask = (torch.arange(LENGTHS[0]) < torch.tensor(LENGTHS)[:, None]).long().to(rows)
        right, left = logits(rows, attention_mask=mask), logits(shifted, attention_mask=mask.flip(1))
        alone = [logits(row[None, :n])[0] for row, n in zip(rows, LENGTHS, strict=True)]
        unpadded = [(right[i, :n], left[i, -n:]) for i, n in enumerate(LENGTHS)]
        return [(x, row) for pair, row in zip(unpadded, alone, strict=True) for x in pair]

    def documents() -> Pairs:
        """packed documents equal separate ones"""
        pieces = [rows[0, :8], rows[1, :1], rows[2, :13]]
        bounds = torch.tensor([0, 8, 8, 9, 22]).to(rows)  # includes an empty document
        packed = logits(torch.cat(pieces)[None], cu_seqlens=bounds)[0]
        return [(packed, torch.cat([logits(piece[None])[0] for piece in pieces]))]

    def gradients() -> Pairs:
        """gradients in bf16 and outputs of bf16 weights are finite"""
        trained = copy.deepcopy(model).float().train()
        with torch.autocast(rows.device.type, dtype=torch.bfloat16):
            loss = trained(rows, labels=rows).loss
        outputs = torch.autograd.grad(loss, list(trained.parameters()))
        outputs += (trained.bfloat16()(rows).logits.float(),)
        return [(x, x) for x in outputs]  # the difference of two infinities is NaN

    @torch.no_grad()
    def cached_steps() -> Pairs:
        """pieces read with a cache equal one pass"""
        cache, outputs = None, []
        for piece in rows.split([9, 1, 1, 2, 6], dim=1):
            output = model(piece, past_key_values=cache, use_cache=True)
            cache = output.past_key_values
            outputs.append(output.logits)
        return [(torch.cat(outputs, dim=1), logits(rows))]

    checks = [later_tokens, padding, documents, gradients]
    return [*checks, cached_steps] if model.model.supports_cache else checks


def difference(pairs: Pairs) -> float:
    """Return the largest difference within pairs of tensors, relative to the expected one; may be NaN."""
    errors = [(x - y).abs().max() / y.abs().max().clamp(min=1e-30) for x, y in pairs]
    return torch.stack(errors).max().item()
