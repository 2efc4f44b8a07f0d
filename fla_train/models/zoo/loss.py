"""Training loss of other libraries' models: their backbone, then the fused linear cross-entropy.

`with_fused_loss` adds it to a model class. The class's own loss makes the logits of all tokens first. Here
neither training nor `token_losses` makes [B, T, vocabulary] logits, if HEADS describes how the class computes
logits from hidden states. Of any other class the loss is the cross-entropy of its logits.
"""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedConfig, PreTrainedModel, masking_utils
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

ROUNDING = 1e-4  # relative, more than that of fp32


def _soft_cap(logits: Tensor, cap: float | None) -> Tensor:
    return logits if cap is None else cap * torch.tanh(logits / cap)


# Functions that map the product of hidden states and head to logits, by model type. None: identity.
HEADS: dict[str, Callable[[Tensor, PreTrainedConfig], Tensor] | None] = {
    **dict.fromkeys(
        (
            "llama mistral mixtral qwen2 qwen2_moe qwen3 qwen3_moe qwen3_next olmo olmo2 olmo3 olmoe "
            "olmo_hybrid smollm3 gpt2 gpt_neox stablelm phi3 starcoder2 glm glm4 helium lfm2 "
            "mamba mamba2 signed_mamba "
            "gla retnet rwkv7 hgrn2 mesa_net kda delta_net gated_deltanet gated_deltaproduct"
        ).split()
    ),
    "cohere": lambda logits, config: logits * config.logit_scale,
    "cohere2": lambda logits, config: logits * config.logit_scale,
    "gemma2": lambda logits, config: _soft_cap(logits, config.final_logit_softcapping),
    "gemma3_text": lambda logits, config: _soft_cap(logits, config.final_logit_softcapping),
    "granite": lambda logits, config: logits / config.logits_scaling,
    "xlstm": lambda logits, config: _soft_cap(logits, config.output_logit_soft_cap),
}


class FusedLoss:
    """Mixin in front of a causal language model. In training, `forward` with labels returns only the loss."""

    def forward(
        self,
        *args: Tensor,
        labels: Tensor | None = None,
        num_items_in_batch: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        **inputs: Any,
    ) -> ModelOutput:
        """Compute the loss in training mode with `labels` [B, T]; otherwise run the class's own forward.

        Args:
            labels: shifted inside, -100 at positions without a target.
            num_items_in_batch: divisor of the summed loss; None: the number of targets. The load balancing
                loss of a mixture of experts, if the class has it on, is weighted by the fraction of these
                targets.
            cu_seqlens: [S + 1] bounds of the documents packed in one row (B = 1).
        """
        if labels is None or not self.training:
            if num_items_in_batch is not None:
                inputs["num_items_in_batch"] = num_items_in_batch
            return super().forward(*args, labels=labels, **inputs, **self._bounds(cu_seqlens))
        targets = next_tokens(labels)
        divisor = target_count(targets, num_items_in_batch)
        outputs, losses = self._losses(linear_cross_entropy, targets, *args, cu_seqlens=cu_seqlens, **inputs)
        loss = losses.sum() / divisor
        # The class's own loss weights the balancing loss by micro-batches.
        if getattr(self.config, "output_router_logits", False):
            balance = getattr(outputs, "aux_loss", None)
            if balance is None:
                balancing = sys.modules[type(self).__module__].load_balancing_loss_func
                experts, mask = (self.num_experts, self.num_experts_per_tok), inputs.get("attention_mask")
                balance = balancing(outputs.router_logits, *experts, mask)
            loss = loss + self.router_aux_loss_coef * balance * (targets != IGNORE).sum() / divisor
        return CausalLMOutput(loss=loss)

    @torch.no_grad()
    def token_losses(self, input_ids: Tensor, cu_seqlens: Tensor | None = None) -> Tensor:
        """Return -log p(input_ids[:, t + 1] | input_ids[:, : t + 1]) at each t, in fp32 [B, T - 1]."""
        inputs = {"input_ids": input_ids, "use_cache": False, "cu_seqlens": cu_seqlens}
        _, losses = self._losses(token_losses, next_tokens(input_ids), **inputs)
        return losses.view(input_ids.shape)[:, :-1]

    @torch.no_grad()
    def keeps_documents_apart(self) -> bool:
        """Return whether packed documents are independent, by a trial of a few tokens on the CPU."""
        ids, bounds = torch.arange(16)[None] % self.config.vocab_size, torch.tensor([0, 7, 16])
        training = self.training
        self.eval()
        alone = self.base_model(input_ids=ids[:, 7:], use_cache=False)[0]
        packed = self.base_model(input_ids=ids, use_cache=False, **self._bounds(bounds))[0][:, 7:]
        self.train(training)
        return bool((packed - alone).norm() < ROUNDING * alone.norm())

    def _losses(
        self,
        fused: Callable[[Tensor, Tensor, Tensor], Tensor],
        targets: Tensor,
        *args: Tensor,
        cu_seqlens: Tensor | None,
        **inputs: Any,
    ) -> tuple[ModelOutput, Tensor]:
        """Return the outputs of backbone or model, and the losses: those of `fused`, or [B T].

        Documents are packed only if the caller gives bounds or positions.

        Args:
            fused: function of hidden states, weight and targets that replaces a plain head.
            targets: [B, T].
        """
        packed = cu_seqlens is not None or len(args) > 1 or inputs.get("position_ids") is not None
        inputs |= self._bounds(cu_seqlens)
        targets, head = targets.flatten(), self.get_output_embeddings()
        if self.config.model_type not in HEADS:
            outputs = super().forward(*args, **inputs)
            return outputs, losses_of_logits(outputs.logits.flatten(0, 1), targets)
        with nullcontext() if packed else whole_rows():
            outputs = self.base_model(*args, **inputs)
        hidden, change = outputs[0].flatten(0, 1), HEADS[self.config.model_type]
        if change is None and is_plain(head):
            return outputs, fused(hidden.to(matmul_dtype(hidden)), head.weight, targets)

        def chunk_losses(hidden: Tensor, targets: Tensor) -> Tensor:
            logits = head(hidden.to(head.weight.dtype)).float()
            return losses_of_logits(logits if change is None else change(logits, self.config), targets)

        rows = max(1, CHUNK_ELEMENTS // self.config.vocab_size)
        chunks = zip(hidden.split(rows), targets.split(rows), strict=True)
        return outputs, torch.cat([checkpoint(chunk_losses, *chunk, use_reentrant=False) for chunk in chunks])

    def _bounds(self, cu_seqlens: Tensor | None) -> dict[str, Tensor]:
        """Return document bounds as the backbone accepts them: `cu_seqlens` for fla, otherwise positions."""
        if cu_seqlens is None:
            return {}
        if type(self).__module__.startswith("fla."):
            return {"cu_seqlens": cu_seqlens}
        tokens = torch.arange(int(cu_seqlens[-1]), device=cu_seqlens.device)
        starts = cu_seqlens[torch.searchsorted(cu_seqlens, tokens, right=True) - 1]
        return {"position_ids": (tokens - starts)[None]}


@contextmanager
def whole_rows() -> Iterator[None]:
    """Let transformers treat each row as one document, without synchronizing with the GPU.

    Otherwise its attention models read in each pass whether a row's positions start again (5.17 to 5.24).
    """
    original = masking_utils.find_packed_sequence_indices
    masking_utils.find_packed_sequence_indices = lambda position_ids: None
    try:
        yield
    finally:
        masking_utils.find_packed_sequence_indices = original


@cache
def with_fused_loss(cls: type[PreTrainedModel]) -> type[PreTrainedModel]:
    """Return a subclass of `cls` with `FusedLoss`, under the same name."""
    return type(cls.__name__, (FusedLoss, cls), {"__module__": cls.__module__})
