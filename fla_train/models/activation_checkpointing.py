"""Activation checkpointing: recompute layers in the backward pass instead of keeping their activations."""

from functools import partial
from typing import TYPE_CHECKING

import torch
from torch.utils.checkpoint import create_selective_checkpoint_contexts

if TYPE_CHECKING:
    from transformers import PreTrainedModel

SELECTIVE = "selective"
# Results of these operations are kept in selective mode. Norms, convolutions, SwiGLU, gates and the operator
# are cheaper to recompute.
KEPT = [
    torch.ops.aten.mm.default,
    torch.ops.aten.addmm.default,
    torch.ops.aten._scaled_mm.default,
    torch.ops.aten._flash_attention_forward.default,
    torch.ops.aten._scaled_dot_product_flash_attention.default,
    torch.ops.aten._scaled_dot_product_efficient_attention.default,
    torch.ops.aten._scaled_dot_product_cudnn_attention.default,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
]


def checkpoint_activations(
    model: "PreTrainedModel", mode: bool | str, *, preserve_rng_state: bool = True
) -> None:
    """Turn on activation checkpointing of the layers of `model`. Losses and gradients do not change.

    Args:
        mode: True keeps the input of each layer and recomputes the layer. "selective" also keeps the results
            of its matrix products with weights and of softmax attention. False keeps everything.
        preserve_rng_state: let recomputed layers draw the same random numbers. It reads the generator's
            state, which is not possible while a CUDA graph is recorded. If false, layers must draw none.

    Raises:
        ValueError: the class does not support gradient checkpointing.
    """
    if not mode:
        return
    options = {"use_reentrant": False, "preserve_rng_state": preserve_rng_state}
    if mode == SELECTIVE:
        options["context_fn"] = partial(create_selective_checkpoint_contexts, KEPT)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=options)
