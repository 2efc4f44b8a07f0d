"""python scripts/analysis/transitions.py CHECKPOINT FOLDER [HEAD ...]

Draw the state transitions that a model has learned for each token of its synthetic task, a figure for each
layer: beta of every Householder step, the eigenvalues, and the effective dimension of the keys, for each
head, or for the given heads.

The transition of a head at a token is exp(g) prod_j (I - beta_j k_j k_j^T), applied from the left to the
state.
"""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from unittest.mock import patch

import numpy as np
import torch
from matplotlib.figure import Figure
from torch import Tensor, nn

from fla_train.eval.expressivity import trained_task
from fla_train.hub.checkpoint_config import resolve_checkpoint
from fla_train.hub.load import load_causal_lm
from fla_train.kernels.delta_product.recurrent import l2norm
from fla_train.models.mixers.delta_product import DeltaProductMixer
from fla_train.tasks.group_words import GroupWords
from fla_train.tasks.registry import tasks_for_testing
from fla_train.utils.figure_style import style

SEQUENCES = 64


@dataclass(frozen=True)
class Transitions:
    """Transitions of one layer at E tokens, each at the token's last occurrence; fp64.

    Attributes:
        tokens: [E] int64, ids.
        beta: [E, N, H].
        keys: [E, N, H, K], normalised.
        decay: [E, H], exp(g); 1 without forget gate.
    """

    tokens: Tensor
    beta: Tensor
    keys: Tensor
    decay: Tensor

    def matrices(self) -> Tensor:
        """Return the transition of each token, [E, H, K, K]: its Householder steps multiplied in order."""
        size = self.keys.shape[-1]
        product = torch.eye(size, dtype=self.keys.dtype).expand(*self.decay.shape, size, size)
        for j in range(self.beta.shape[1]):
            key = self.keys[:, j, :, :, None]  # [E, H, K, 1]
            product = product - self.beta[:, j, :, None, None] * key * (key.mT @ product)
        return self.decay[..., None, None] * product

    def effective_dimension(self) -> Tensor:
        """Return the number of directions that a head's keys use, [H]: 1 / sum of squared shares."""
        rows = self.keys.permute(2, 0, 1, 3).flatten(1, 2)  # [H, E * N, K]
        variances = torch.linalg.svdvals(rows - rows.mean(1, keepdim=True)).square()
        shares = variances / variances.sum(-1, keepdim=True).clamp(min=1e-300)
        return 1 / shares.square().sum(-1).clamp(min=1e-300)


@torch.no_grad()
def transitions(model: nn.Module, ids: Tensor, kept: Tensor) -> list[Transitions]:
    """Return the transitions of each recurrent layer at the tokens `kept` of ids [B, T]."""
    calls, original = [], DeltaProductMixer._recur

    def recur(mixer: DeltaProductMixer, inputs: tuple[Tensor | None, ...], *rest: object) -> object:
        _, k, _, beta, g = inputs
        calls.append((k, beta, g))
        return original(mixer, inputs, *rest)

    with patch.object(DeltaProductMixer, "_recur", recur):
        model(input_ids=ids.to(model.device), use_cache=False)
    flat = ids.flatten()
    tokens = kept[torch.isin(kept, flat)]
    last = torch.tensor([int((flat == token).nonzero()[-1]) for token in tokens])
    layers = []
    for k, beta, g in calls:
        keys, steps = l2norm(k.double()).flatten(0, 1).cpu()[last], beta.double().flatten(0, 1).cpu()[last]
        decay = torch.ones_like(steps[:, 0]) if g is None else g.double().exp().flatten(0, 1).cpu()[last]
        layers.append(Transitions(tokens, steps, keys, decay))
    return layers


def draw(layer: Transitions, file: Path, heads: Sequence[int]) -> None:
    """Draw a column for each of `heads`: betas by token above, eigenvalues below."""
    figure = Figure(figsize=(2.6 * len(heads) + 0.6, 5.2))
    axes = figure.subplots(2, len(heads), squeeze=False)
    values, dimensions = torch.linalg.eigvals(layer.matrices()), layer.effective_dimension()
    circle = np.exp(2j * np.pi * np.linspace(0, 1, 200))
    for head, (above, below) in zip(heads, axes.T, strict=True):
        for j in range(layer.beta.shape[1]):
            above.plot(layer.tokens, layer.beta[:, j, head], ".", label=f"Householder step {j + 1}")
        above.set(title=f"head {head}", xlabel="token id", ylim=(-0.1, 2.1))
        points = np.unique(values[:, head].numpy().round(2))  # most are 1
        below.plot(circle.real, circle.imag, color="0.8", lw=0.8)
        below.plot(points.real, points.imag, ".", alpha=0.6)
        below.set(xlim=(-1.15, 1.15), ylim=(-1.15, 1.15), aspect="equal", xlabel="real part of eigenvalues")
        below.set_title(f"keys: dimension {dimensions[head]:.2f}", fontsize="small")
    axes[0, 0].set_ylabel("beta")
    axes[1, 0].set_ylabel("imaginary part")
    axes[0, 0].legend(fontsize="x-small")
    figure.savefig(file, metadata={"Date": None})


def main(checkpoint: str, folder: Path, heads: Sequence[int] = ()) -> None:
    """Draw layer-N.svg for each recurrent layer."""
    source = resolve_checkpoint(checkpoint)
    model = load_causal_lm(source, "cuda" if torch.cuda.is_available() else "cpu", None)
    task = next(iter(tasks_for_testing(trained_task(model, source, None)).values()))
    kept = torch.as_tensor(task.elements) if isinstance(task, GroupWords) else torch.arange(task.vocab_size)
    folder.mkdir(parents=True, exist_ok=True)
    for number, layer in enumerate(transitions(model, task.batch(range(SEQUENCES)).input_ids, kept)):
        with style():
            draw(layer, folder / f"layer-{number}.svg", heads or range(layer.beta.shape[-1]))


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), [int(head) for head in sys.argv[3:]])
