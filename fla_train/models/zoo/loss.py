"""The training loss of other libraries' models: hidden states by the backbone, then the fused cross-entropy.

`with_fused_loss` adds it to a class of transformers' kind. The class's own loss first makes the logits of all
tokens. Here they are made in chunks: neither training nor `token_losses` has [B, T, vocabulary] logits.
"""

import copy
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel, masking_utils
from transformers.modeling_outputs import CausalLMOutput
from transformers.utils import ModelOutput

from fla_train.models.layer_sizes import CHUNK_ELEMENTS
from fla_train.models.layers import is_plain, matmul_dtype
from fla_train.models.loss import (
    IGNORE,
    linear_cross_entropy,
    losses_of_logits,
    next_tokens,
    target_count,
    token_losses,
)

PROBE = 50.0  # size of the logits by which a head is tried: a soft cap shows in them
TOLERANCE = 1e-2  # of them
ROUNDING = 1e-4  # relative, more than that of fp32


class FusedLoss:
    """Mixin in front of a causal language model: in training, `forward` with labels gives the loss only."""

    def forward(
        self,
        *args: Tensor,
        labels: Tensor | None = None,
        num_items_in_batch: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        **inputs: Any,
    ) -> ModelOutput:
        """The class's own forward, or in training mode with `labels` [B, T] the loss.

        Args:
            labels: shifted inside, -100 where there is no target.
            num_items_in_batch: what the summed loss is divided by; None: the number of targets. The load
                balancing loss of a mixture of experts, where the class has it on, is weighted by the share of
                these targets.
            cu_seqlens: [S + 1] bounds of the documents packed in one row (B = 1).
        """
        if labels is None or not self.training:
            return super().forward(*args, labels=labels, **inputs)
        targets = next_tokens(labels)
        divisor = target_count(targets, num_items_in_batch)
        outputs = self._run_backbone(*args, cu_seqlens=cu_seqlens, **inputs)
        hidden, targets = outputs[0].flatten(0, 1), targets.flatten()
        match self._kind_of_head(outputs):
            case "plain":
                weight = self.get_output_embeddings().weight
                total = linear_cross_entropy(hidden.to(matmul_dtype(hidden)), weight, targets)
            case "own":
                total = self._own_losses(outputs, hidden, targets).sum()
            case "unknown":
                inputs |= self._bounds(cu_seqlens)
                return super().forward(*args, labels=labels, num_items_in_batch=divisor, **inputs)
        loss = total / divisor
        if getattr(self.config, "output_router_logits", False):
            balance = self._head_outputs(outputs, hidden[:1]).aux_loss
            share = (targets != IGNORE).sum() / divisor
            loss = loss + self.router_aux_loss_coef * balance * share
        return CausalLMOutput(loss=loss)

    @torch.no_grad()
    def token_losses(self, input_ids: Tensor, cu_seqlens: Tensor | None = None) -> Tensor:
        """For evaluation: -log p(input_ids[:, t + 1] | input_ids[:, : t + 1]) at each t, fp32 [B, T - 1]."""
        inputs = {"input_ids": input_ids, "use_cache": False}
        outputs = self._run_backbone(**inputs, cu_seqlens=cu_seqlens)
        hidden, targets = outputs[0].flatten(0, 1), next_tokens(input_ids).flatten()
        match self._kind_of_head(outputs):
            case "plain":
                weight = self.get_output_embeddings().weight
                losses = token_losses(hidden.to(matmul_dtype(hidden)), weight, targets)
            case "own":
                losses = self._own_losses(outputs, hidden, targets)
            case "unknown":
                logits = super().forward(**inputs, **self._bounds(cu_seqlens)).logits
                losses = losses_of_logits(logits.flatten(0, 1), targets)
        return losses.view(input_ids.shape)[:, :-1]

    @torch.no_grad()
    def keeps_documents_apart(self) -> bool:
        """Whether a packed document is read as if it stood alone, tried on a few tokens on the CPU."""
        ids, bounds = torch.arange(16)[None] % self.config.vocab_size, torch.tensor([0, 7, 16])
        training = self.training
        self.eval()
        alone = self.base_model(input_ids=ids[:, 7:], use_cache=False)[0]
        packed = self.base_model(input_ids=ids, use_cache=False, **self._bounds(bounds))[0][:, 7:]
        self.train(training)
        return bool((packed - alone).norm() < ROUNDING * alone.norm())

    def _run_backbone(self, *args: Tensor, cu_seqlens: Tensor | None, **inputs: Any) -> ModelOutput:
        """The backbone's outputs. Only a caller that gives bounds or positions can have packed documents."""
        given = cu_seqlens is not None or len(args) > 1 or inputs.get("position_ids") is not None
        with nullcontext() if given else whole_rows():
            return self.base_model(*args, **(inputs | self._bounds(cu_seqlens)))

    def _bounds(self, cu_seqlens: Tensor | None) -> dict[str, Tensor]:
        """Document bounds as the backbone takes them: by flash-linear-attention's name, or as positions."""
        if cu_seqlens is None:
            return {}
        if type(self).__module__.startswith("fla."):
            return {"cu_seqlens": cu_seqlens}
        places = torch.arange(int(cu_seqlens[-1]), device=cu_seqlens.device)
        starts = cu_seqlens[torch.searchsorted(cu_seqlens, places, right=True) - 1]
        return {"position_ids": (places - starts)[None]}

    def _own_losses(self, outputs: ModelOutput, hidden: Tensor, targets: Tensor) -> Tensor:
        """[M] losses of the class's own logits of `hidden` [M, D]; 0 without a target."""

        def losses(hidden: Tensor, targets: Tensor) -> Tensor:
            return losses_of_logits(self._head_outputs(outputs, hidden).logits[0], targets)

        rows = max(1, CHUNK_ELEMENTS // self.config.vocab_size)
        chunks = zip(hidden.split(rows), targets.split(rows), strict=True)
        return torch.cat([checkpoint(losses, *chunk, use_reentrant=False) for chunk in chunks])

    def _head_outputs(self, outputs: ModelOutput, hidden: Tensor) -> ModelOutput:
        """What the class makes of hidden states [M, D] in place of those in the backbone's `outputs`."""
        given = copy.copy(outputs)
        given["last_hidden_state"] = hidden[None]
        head = copy.copy(self)
        head.__dict__["_modules"] = self._modules | {self.base_model_prefix: _Backbone(given)}
        ids = torch.zeros(1, len(hidden), dtype=torch.int64, device=hidden.device)
        return super(FusedLoss, head).forward(ids, use_cache=False)

    def _kind_of_head(self, outputs: ModelOutput) -> str:
        """How the class's logits follow from hidden states h, found out once, with large logits.

        "plain" is h W^T, "own" another function of h (with a bias, scale or soft cap), "unknown" the rest.
        """
        if "_kind" not in self.__dict__:
            self.__dict__["_kind"] = self._try_head(outputs)
        return self.__dict__["_kind"]

    @torch.no_grad()
    def _try_head(self, outputs: ModelOutput) -> str:
        head = self.get_output_embeddings()
        weight = head.weight
        with torch.autocast(weight.device.type, enabled=False):
            hidden = torch.arange(2 * weight.shape[1], device=weight.device).cos().to(weight).view(2, -1)
            expected = F.linear(hidden, weight)
            scale = PROBE / expected.abs().max()
            try:
                found = self._head_outputs(outputs, hidden * scale).logits[0]
            except Exception:  # whatever a class does that needs more than hidden states
                return "unknown"
        same = torch.allclose(found.float(), scale * expected, atol=TOLERANCE * PROBE, rtol=0)
        return "plain" if same and is_plain(head) else "own"


class _Backbone(nn.Module):
    """Stands in for a backbone and returns what it was given."""

    def __init__(self, outputs: ModelOutput) -> None:
        super().__init__()
        self.outputs = outputs

    def forward(self, *_: Any, **__: Any) -> ModelOutput:
        return self.outputs


@contextmanager
def whole_rows() -> Iterator[None]:
    """Within it transformers takes each row for one document, and does not wait for the GPU.

    Otherwise its attention models read in each pass whether a row's positions start again (5.17 to 5.24).
    """
    look = masking_utils.find_packed_sequence_indices
    masking_utils.find_packed_sequence_indices = lambda position_ids: None
    try:
        yield
    finally:
        masking_utils.find_packed_sequence_indices = look


@cache
def with_fused_loss(kind: type[PreTrainedModel]) -> type[PreTrainedModel]:
    """A subclass of `kind`, under its name, with `FusedLoss`."""
    return type(kind.__name__, (FusedLoss, kind), {"__module__": kind.__module__})
