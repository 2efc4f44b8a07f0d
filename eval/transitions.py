"""State transitions of a model for each token: beta, keys, eigenvalues, dimension of the keys.

A head's transition at a token is exp(g) prod_j (I - beta_j k_j k_j^T), applied from the left to its state.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields

import torch
from torch import Tensor, nn

from fla_train.kernels.delta_product.recurrent import l2norm
from fla_train.models.mixers.delta_product import DeltaProductMixer


@dataclass(frozen=True)
class Transitions:
    """One layer's transitions at E tokens, each as it was where the token was read last; fp64.

    Attributes:
        tokens: [E] int64, ids.
        beta: [E, N, H].
        beta_spread: [E, N, H], the standard deviation of beta over what came before the token; 0 where a
            transition depends on its token only.
        keys: [E, N, H, K], normalised.
        decay: [E, H], exp(g); 1 without forget gate.
    """

    tokens: Tensor
    beta: Tensor
    beta_spread: Tensor
    keys: Tensor
    decay: Tensor

    def only(self, tokens: Sequence[int]) -> "Transitions":
        """Those of `tokens`, as far as they were read."""
        rows = torch.isin(self.tokens, torch.tensor(tokens))
        return Transitions(*(getattr(self, field.name)[rows] for field in fields(self)))

    def matrices(self) -> Tensor:
        """[E, H, K, K]: the transition of each token, its Householder steps multiplied in order."""
        size = self.keys.shape[-1]
        product = torch.eye(size, dtype=self.keys.dtype).expand(*self.decay.shape, size, size)
        for j in range(self.beta.shape[1]):
            key = self.keys[:, j, :, :, None]  # [E, H, K, 1]
            product = product - self.beta[:, j, :, None, None] * key * (key.mT @ product)
        return self.decay[..., None, None] * product

    def eigenvalues(self) -> Tensor:
        """[E, H, K] complex, of each transition."""
        return torch.linalg.eigvals(self.matrices())

    def explained_variance(self) -> Tensor:
        """[H, C]: share of the variance of a head's keys (all tokens and steps) in each component."""
        rows = self.keys.permute(2, 0, 1, 3).flatten(1, 2)  # [H, E * N, K]
        variances = torch.linalg.svdvals(rows - rows.mean(1, keepdim=True)).square()
        return variances / variances.sum(-1, keepdim=True).clamp(min=1e-300)

    def effective_dimension(self) -> Tensor:
        """[H]: (sum of variances)^2 / sum of their squares, the number of directions that the keys use."""
        shares = self.explained_variance()
        return 1 / shares.square().sum(-1).clamp(min=1e-300)


@contextmanager
def recorded(model: nn.Module) -> Iterator[dict[int, tuple[Tensor, Tensor, Tensor | None]]]:
    """While the block runs, k, beta and g of each recurrent layer's newest forward pass, by layer."""
    found: dict[int, tuple[Tensor, Tensor, Tensor | None]] = {}
    mixers = [module for module in model.modules() if isinstance(module, DeltaProductMixer)]
    for layer, mixer in enumerate(mixers):

        def recur(q, k, v, beta, g, context, cache, *, layer=layer, original=mixer._recur):
            found[layer] = (k, beta, g)
            return original(q, k, v, beta, g, context, cache)

        mixer._recur = recur  # shadows the method until it is deleted below
    try:
        yield found
    finally:
        for mixer in mixers:
            del mixer._recur


@torch.no_grad()
def transitions(model: nn.Module, input_ids: Tensor) -> list[Transitions]:
    """The transitions of each recurrent layer while `model` reads input_ids [B, T]; [] for other models."""
    with recorded(model) as found:
        model(input_ids=input_ids, use_cache=False)
    return [_by_token(input_ids.cpu(), *found[layer]) for layer in sorted(found)]


def _by_token(ids: Tensor, k: Tensor, beta: Tensor, g: Tensor | None) -> Transitions:
    flat = ids.flatten()
    keys = l2norm(k.double()).flatten(0, 1).cpu()  # [B * T, N, H, K]
    steps = beta.double().flatten(0, 1).cpu()
    decay = torch.ones(len(flat), steps.shape[-1], dtype=torch.float64)
    if g is not None:
        decay = g.double().exp().flatten(0, 1).cpu()
    tokens = flat.unique()
    last = torch.tensor([int((flat == token).nonzero()[-1]) for token in tokens])
    spreads = torch.stack([steps[flat == token].std(0, correction=0) for token in tokens])
    return Transitions(tokens, steps[last], spreads, keys[last], decay[last])
