"""python scripts/analysis/remembrance.py CHECKPOINT documents.jsonl 8192 > remembrance.csv

Print the effective remembrance (Buitrago Ruiz and Gu, arXiv 2507.02782): how far a prediction depends on the
tokens before the last t ones of its context. EffRem_T(t) = d(q(. | x_0..T), q(. | x_T-t..T)) with the total
variation d(q, q') = 1/2 sum |q - q'|, mean over the longest documents. A model that overfits to its first
states keeps a large distance where the last part is almost the whole.
"""

import sys
from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import PreTrainedModel

from fla_train.eval.documents import file_documents, longest_documents, stack_tokens
from fla_train.eval.perplexity import forward
from fla_train.hub.load import document_prefix, load_model

DOCUMENTS, CHUNK = 8, 1024


@torch.inference_mode()
def prediction(model: PreTrainedModel, ids: Sequence[int], prefix: Sequence[int]) -> Tensor:
    """Return the probabilities of the token after `ids`, which follow `prefix`: [vocabulary] fp64."""
    stop = len(prefix) + len(ids)
    cache: dict = {}
    for start in range(0, stop, CHUNK):
        part = stack_tokens([ids], prefix, start, min(start + CHUNK, stop)).to(model.device)
        logits, cache = forward(model, part, cache, keep=stop > CHUNK)
    return logits[0, -1].double().softmax(-1)


def effective_remembrance(
    model: PreTrainedModel,
    documents: Sequence[Sequence[int]],
    sizes: Sequence[int],
    prefix: Sequence[int] = (),
) -> Tensor:
    """Return the distance for each document and size of the last part, [documents, sizes], from 0 to 1."""
    rows = []
    for document in documents:
        whole = prediction(model, document, prefix)
        parts = [prediction(model, document[len(document) - size :], prefix) for size in sizes]
        rows.append(torch.stack([(whole - part).abs().sum() / 2 for part in parts]))
    return torch.stack(rows).cpu()


def main(checkpoint: str, file: str, length: int) -> None:
    """Write the last part's tokens, the mean distance and its standard error as CSV."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model, tokenizer = load_model(checkpoint, device)
    documents = longest_documents(file_documents(file, tokenizer), DOCUMENTS, length, 20_000, progress=True)
    documents = [document[:length] for document in documents if len(document) >= length]
    if not documents:
        sys.exit(f"error: no document of {file} has {length} tokens")
    sizes = [1 << i for i in range((length - 1).bit_length())]
    remembrance = effective_remembrance(model, documents, sizes, document_prefix(model, tokenizer))
    errors = remembrance.std(0) / len(remembrance) ** 0.5  # NaN for one document
    print("last_tokens,effective_remembrance,standard_error")
    for size, mean, error in zip(sizes, remembrance.mean(0).tolist(), errors.tolist(), strict=True):
        print(f"{size},{mean:.4f},{error:.4f}")


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
