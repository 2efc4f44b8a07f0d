"""python scripts/analysis/states.py CHECKPOINT documents.jsonl 32768 > states.csv

Print the norm and the effective rank of the recurrent state of each layer after 64, 128, 256, ... tokens, up
to the given length: means over heads and over the longest documents. Perplexity rises where the state leaves
the range that it had in training.
"""

import csv
import sys
from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import PreTrainedModel

from fla_train.eval.documents import file_documents, longest_documents, stack_tokens
from fla_train.hub.load import document_prefix, load_model
from fla_train.models.mixers.delta_product import DeltaProductMixer

DOCUMENTS, CHUNK = 4, 1024


def effective_rank(state: Tensor) -> Tensor:
    """Return exp of the entropy of the normalised singular values (Roy and Vetterli, 2007): [..., K, V] ->
    [...].

    It is 1 for rank one and min(K, V) for equal singular values.
    """
    state = state.double().cpu()
    values = torch.linalg.eigvalsh(state.mT @ state).clamp_min(0).sqrt()
    shares = values / values.sum(-1, keepdim=True).clamp_min(1e-300)
    return torch.special.entr(shares).sum(-1).exp()


@torch.inference_mode()
def state_rows(
    model: PreTrainedModel, documents: Sequence[Sequence[int]], length: int, prefix: Sequence[int] = ()
) -> list[dict[str, float]]:
    """Return `position`, `layer`, `norm` (Frobenius) and `effective_rank` of each recurrent layer.

    Args:
        model: in eval mode.
        documents: token ids, each of at least `length`; read side by side.
        length: the last position.
        prefix: tokens before each document; not counted.
    """
    names = [name for name, module in model.named_modules() if isinstance(module, DeltaProductMixer)]
    layers = [int(name.split(".")[-2]) for name in names]
    positions = [*(1 << i for i in range(6, length.bit_length()) if 1 << i < length), length]
    rows, cache, start = [], None, 0
    for position in positions:
        while start < position + len(prefix):
            end = min(start + CHUNK, position + len(prefix))
            ids = stack_tokens(documents, prefix, start, end).to(model.device)
            cache = model(ids, past_key_values=cache, use_cache=True, logits_to_keep=1).past_key_values
            start = end
        for layer in layers:
            state = cache.layers[layer].recurrent_states[0]  # [B, H, K, V]
            norm, rank = state.norm(dim=(-2, -1)).mean().item(), effective_rank(state).mean().item()
            rows.append({"position": position, "layer": layer, "norm": norm, "effective_rank": rank})
    return rows


def main(checkpoint: str, file: str, length: int) -> None:
    """Write the rows as CSV."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model, tokenizer = load_model(checkpoint, device)
    chosen = longest_documents(file_documents(file, tokenizer), DOCUMENTS, length, 20_000, progress=True)
    chosen = [document for document in chosen if len(document) >= length]
    if not chosen:
        sys.exit(f"error: no document of {file} has {length} tokens")
    rows = state_rows(model, chosen, length, document_prefix(model, tokenizer))
    writer = csv.DictWriter(sys.stdout, rows[0].keys())
    writer.writeheader()
    writer.writerows(rows)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
