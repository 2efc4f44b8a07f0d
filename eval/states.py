"""Statistics of the recurrent state by position: norm, effective rank, and histograms of beta and decay.

They explain a length-extrapolation curve: perplexity rises where the state leaves the range that it had in
training.
"""

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from fla_train.eval.documents import stacked
from fla_train.models.mixers.delta_product import DeltaProductMixer

BINS = 20
FIRST = 64  # the first position looked at


def positions_up_to(length: int) -> list[int]:
    """64, 128, 256, ... below `length`, and `length`."""
    doubled = [FIRST << i for i in range(max(length.bit_length() - FIRST.bit_length() + 1, 0))]
    return [*(position for position in doubled if position < length), length]


def effective_rank(state: Tensor) -> Tensor:
    """exp of the entropy of the normalised singular values (Roy and Vetterli, 2007): [..., K, V] -> [...].

    1 for rank one, min(K, V) for equal singular values; 0 for a state that is all zero, NaN for one that
    overflowed. On the CPU, and by way of the eigenvalues of S^T S: eight times faster there, while a GPU
    takes one matrix after another.
    """
    state = state.double().cpu()
    finite = state.isfinite().all(-1).all(-1)
    state = torch.where(finite[..., None, None], state, 0.0)
    values = torch.linalg.eigvalsh(state.mT @ state).clamp_min(0).sqrt()
    share = values / values.sum(-1, keepdim=True).clamp_min(torch.finfo(values.dtype).tiny)
    rank = torch.special.entr(share).sum(-1).exp()
    rank = torch.where(values.sum(-1) > 0, rank, 0.0)
    return torch.where(finite, rank, torch.nan)


@torch.inference_mode()
def state_statistics(
    model: PreTrainedModel,
    documents: Sequence[Sequence[int]],
    positions: Sequence[int],
    *,
    prefix: Sequence[int] = (),
    chunk: int = 1024,
) -> dict | None:
    """Statistics of every recurrent layer after the first `positions` tokens of documents.

    Args:
        model: in eval mode.
        documents: token ids, each of at least the last position's length; read side by side.
        positions: increasing; the statistics of the gates are over the tokens since the one before.
        prefix: tokens before each document; not counted in positions.
        chunk: tokens per forward.

    Returns:
        None for a model without recurrent layers, else plain numbers: `positions`, `layers` (their indices),
        `documents`, by position and layer `norm` (Frobenius) and `effective_rank` (means over heads and
        documents), `beta` and `decay` (fractions of values per bin; `decay` is exp(g), None without forget
        gate), and `beta_max`, the upper end of the bins of `beta`; those of `decay` end at 1.

    Raises:
        ValueError: a document is shorter than the last position.
    """
    mixers = {
        int(name.split(".")[-2]): module
        for name, module in model.named_modules()
        if isinstance(module, DeltaProductMixer)
    }
    if not mixers:
        return None
    if not documents or min(map(len, documents)) < positions[-1]:
        raise ValueError(f"state statistics need documents of at least {positions[-1]} tokens")
    device = model.get_input_embeddings().weight.device
    beta_max = max(mixer.beta_max for mixer in mixers.values())
    counts = {layer: torch.zeros(2, BINS, dtype=torch.float64, device=device) for layer in mixers}

    def watch(layer: int, mixer: nn.Module, inputs: tuple) -> None:
        beta, g = mixer.gates(inputs[0])
        counts[layer][0] += torch.histc(beta.float(), BINS, 0, beta_max)
        if g is not None:
            counts[layer][1] += torch.histc(g.float().exp(), BINS, 0, 1)

    hooks = [mixer.register_forward_pre_hook(partial(watch, layer)) for layer, mixer in mixers.items()]
    found: dict[str, list] = {"norm": [], "effective_rank": [], "beta": [], "decay": []}
    cache, start = None, 0
    try:
        for position in positions:
            stop = position + len(prefix)
            while start < stop:
                end = min(start + chunk, stop)
                ids = stacked(documents, prefix, start, end).to(device)
                cache = model(ids, past_key_values=cache, use_cache=True, logits_to_keep=1).past_key_values
                start = end
            states = [cache.layers[layer].recurrent_states[0] for layer in mixers]  # [B, H, K, V] each
            found["norm"].append([state.norm(dim=(-2, -1)).mean().item() for state in states])
            found["effective_rank"].append([effective_rank(state).mean().item() for state in states])
            shares = [count / count.sum(-1, keepdim=True).clamp_min(1) for count in counts.values()]
            found["beta"].append([share[0].tolist() for share in shares])
            found["decay"].append([share[1].tolist() for share in shares])
            for count in counts.values():
                count.zero_()
    finally:
        for hook in hooks:
            hook.remove()
    gated = any(mixer.config.use_forget_gate for mixer in mixers.values())
    return {
        "positions": list(positions),
        "layers": list(mixers),
        "documents": len(documents),
        "beta_max": beta_max,
        **found,
        "decay": found["decay"] if gated else None,
    }
