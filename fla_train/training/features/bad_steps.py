"""Skip steps whose loss or gradient is not finite or, optionally, whose loss spikes; clip gradients.

All of it is arithmetic on the device. The host never waits to learn whether a step was skipped, and every
rank decides alike, since loss and gradient norm are sums over all ranks.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fla_train.training.callback import Callback

WINDOW = 100  # steps: the running mean and variance weigh the newest loss by 1 / WINDOW


class BadSteps(Callback):
    """Decide which steps are skipped and how gradients are clipped, by loss and gradient norm.

    Args:
        max_grad_norm: larger gradients are scaled down to this norm; 0: never.
        spike_deviations: skip a step whose loss lies more than this many standard deviations above the
            running mean of the applied steps, once there were WINDOW of them; 0: never.
        statistics: count, mean and variance of earlier losses.
    """

    name = "bad_steps"

    def __init__(
        self,
        device: torch.device,
        *,
        max_grad_norm: float,
        spike_deviations: float = 0.0,
        statistics: Sequence[float] = (0.0, 0.0, 0.0),
    ):
        self._max_grad_norm, self._deviations = max_grad_norm, spike_deviations
        self._seen = torch.tensor(statistics, dtype=torch.float64, device=device)

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
        # The plain mean, until the window is full.
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
