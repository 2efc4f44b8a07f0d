"""Activation checkpointing: what of a layer is kept for the backward pass, and what is computed again."""

from functools import partial
from typing import TYPE_CHECKING

import torch
from torch.utils.checkpoint import create_selective_checkpoint_contexts

if TYPE_CHECKING:
    from transformers import PreTrainedModel

SELECTIVE = "selective"
_aten = torch.ops.aten
# Their results are kept. The rest costs less to run again: norms, convolutions, SwiGLU, gates, the operator.
KEPT = [
    _aten.mm.default,
    _aten.addmm.default,
    _aten._scaled_mm.default,
    _aten._flash_attention_forward.default,
    _aten._scaled_dot_product_flash_attention.default,
    _aten._scaled_dot_product_efficient_attention.default,
    _aten._scaled_dot_product_cudnn_attention.default,
    _aten._scaled_dot_product_flash_attention_for_cpu.default,
]


def checkpoint_activations(
    model: "PreTrainedModel", mode: bool | str, *, preserve_rng_state: bool = True
) -> None:
    """Turn on activation checkpointing of the layers of `model`. Losses and gradients do not change.

    Args:
        mode: True keeps the input of each layer and computes the layer again. "selective" also keeps the
            results of its matrix products with weights and of softmax attention. False keeps everything.
        preserve_rng_state: let recomputed layers draw the same random numbers. Reading the generator's state
            is not allowed while a CUDA graph is recorded. If false, layers must draw none.

    Raises:
        ValueError: the class has no gradient checkpointing.
    """
    if not mode:
        return
    if not model.supports_gradient_checkpointing:
        raise ValueError(
            f"{type(model).__name__} has no gradient checkpointing: "
            "set trainer.activation_checkpointing=false"
        )
    options = {"use_reentrant": False, "preserve_rng_state": preserve_rng_state}
    if mode == SELECTIVE:
        options["context_fn"] = partial(create_selective_checkpoint_contexts, KEPT)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=options)
