"""Effective remembrance: how far a prediction depends on what lies before the last tokens of its context.

Buitrago Ruiz and Gu (arXiv 2507.02782): EffRem_T(t) = d(q(. | x_0..T), q(. | x_t..T)), with the total
variation d(q, q') = 1/2 sum |q - q'|. A model that overfits to its first states keeps a large distance where
the last part is almost the whole.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from fla_train.eval.documents import stacked
from fla_train.eval.perplexity import forward


def part_sizes(length: int) -> list[int]:
    """1, 2, 4, ... tokens, below `length`."""
    return [1 << i for i in range((length - 1).bit_length())]


def effective_remembrance(
    model: PreTrainedModel,
    documents: Sequence[Sequence[int]],
    sizes: Sequence[int],
    *,
    prefix: Sequence[int] = (),
    chunk: int = 1024,
) -> np.ndarray:
    """Total variation between the next-token predictions from all of a document and from its last tokens.

    Args:
        model: in eval mode; with a cache if documents are longer than a chunk.
        documents: token ids; read one at a time.
        sizes: how many last tokens are read alone, from the zero state.
        prefix: tokens before a document, and before a part of it: both are read as a sequence is.
        chunk: tokens per forward.

    Returns:
        [documents, sizes] float64 in [0, 1].
    """
    found = np.empty((len(documents), len(sizes)))
    for row, document in zip(found, documents, strict=True):
        whole = _prediction(model, document, prefix, chunk)
        for i, size in enumerate(sizes):
            part = _prediction(model, document[len(document) - size :], prefix, chunk)
            row[i] = (whole - part).abs().sum().item() / 2
    return found


@torch.inference_mode()
def _prediction(model: PreTrainedModel, ids: Sequence[int], prefix: Sequence[int], chunk: int) -> Tensor:
    """[vocabulary] fp64: probabilities of the token after `ids`."""
    device = model.get_input_embeddings().weight.device
    stop = len(prefix) + len(ids)
    cache: dict = {}
    for start in range(0, stop, chunk):
        part = stacked([ids], prefix, start, min(start + chunk, stop)).to(device)
        logits, cache = forward(model, part, cache, keep=stop > chunk)
    return logits[0, -1].double().softmax(-1)
