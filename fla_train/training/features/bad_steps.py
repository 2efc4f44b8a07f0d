"""Skip steps with a non-finite loss or gradient and, optionally, with a loss spike; clip gradients.

All arithmetic runs on the device, so the host never waits to learn whether a step was skipped. Every rank
makes an equal decision, because loss and gradient norm are sums over all ranks.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fla_train.training.callback import Callback

# Steps. The running mean and variance weigh the newest loss by 1 / WINDOW.
WINDOW = 100


class BadSteps(Callback):
    """Decide which steps are skipped and how gradients are clipped, by loss and gradient norm.

    Args:
        max_grad_norm: larger gradients are scaled down to this norm; 0: never.
        spike_deviations: skip a step whose loss is more than this many standard deviations above the running
            mean of the applied steps, after WINDOW applied steps; 0: never.
    """

    name = "bad_steps"

    def __init__(self, device: torch.device, *, max_grad_norm: float, spike_deviations: float = 0.0):
        self._max_grad_norm, self._deviations = max_grad_norm, spike_deviations
        # Count, mean and variance of the losses of applied steps.
        self._seen = torch.zeros(3, dtype=torch.float64, device=device)

    def decide(self, loss: Tensor, grad_norm: Tensor) -> tuple[Tensor, Tensor]:
        """Return the divisor of the gradients, and 1 if the step is to be skipped; fp32 scalars.

        The running mean and variance include the loss unless the step is skipped.

        Args:
            loss, grad_norm: fp64 scalars.
        """
        count, mean, variance = self._seen.unbind()
        skip = ~(torch.isfinite(loss) & torch.isfinite(grad_norm))
        if self._deviations:
            skip = skip | ((count >= WINDOW) & (loss > mean + self._deviations * variance.sqrt()))
        # Use the plain mean until the window is full.
        weight = 1 / torch.clamp(count + 1, max=WINDOW)
        delta = loss - mean
        seen = torch.stack(
            [count + 1, mean + weight * delta, (1 - weight) * (variance + weight * delta.square())]
        )
        self._seen = torch.where(skip, self._seen, seen)
        scale = torch.ones_like(grad_norm)
        if self._max_grad_norm:
            scale = torch.clamp((grad_norm + 1e-6) / self._max_grad_norm, min=1.0)
        return scale.float(), skip.float()

    def state_dict(self) -> dict[str, Any]:
        return {"losses": self._seen}

    def load_state_dict(self, states: Sequence[dict[str, Any]]) -> None:
        self._seen = states[0]["losses"].to(self._seen.device, copy=True)
