"""BadStepFilter: skip steps whose loss or gradient is not finite or, optionally, whose loss spikes.

All of it is arithmetic on the device. The host never waits to learn whether a step was skipped, and every
rank decides alike, since loss and gradient norm are sums over all ranks.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

WINDOW = 100  # steps: the running mean and variance weigh the newest loss by 1 / WINDOW


class BadStepFilter:
    """Decides which steps are skipped and how gradients are clipped, by loss and gradient norm.

    Args:
        max_grad_norm: norm to which larger gradients are scaled down; 0: never.
        spike_deviations: skip a step whose loss lies more than so many standard deviations above the running
            mean of the applied steps, once WINDOW of them were seen; 0: never.
        statistics: `statistics()` of an earlier filter, to continue.
    """

    def __init__(
        self,
        device: torch.device,
        *,
        max_grad_norm: float,
        spike_deviations: float = 0.0,
        statistics: Sequence[float] = (0.0, 0.0, 0.0),
    ):
        self._max_grad_norm, self._deviations = max_grad_norm, spike_deviations
        self._seen = torch.tensor(statistics, dtype=torch.float64, device=device)  # count, mean, variance

    def check(self, loss: Tensor, grad_norm: Tensor) -> tuple[Tensor, Tensor]:
        """For fp64 scalars: what gradients are to be divided by, and 1 if the step is to be skipped, fp32.

        The running mean and variance take the loss in unless the step is skipped.
        """
        count, mean, variance = self._seen.unbind()
        skip = ~(torch.isfinite(loss) & torch.isfinite(grad_norm))
        if self._deviations:
            spike = (count >= WINDOW) & (loss > mean + self._deviations * variance.sqrt())
            skip = skip | spike
        weight = 1 / torch.clamp(count + 1, max=WINDOW)  # the plain mean, until the window is full
        delta = loss - mean
        seen = torch.stack(
            [count + 1, mean + weight * delta, (1 - weight) * (variance + weight * delta.square())]
        )
        self._seen = torch.where(skip, self._seen, seen)
        scale = torch.ones_like(grad_norm)
        if self._max_grad_norm:
            scale = torch.clamp((grad_norm + 1e-6) / self._max_grad_norm, min=1.0)
        return scale.float(), skip.float()

    def statistics(self) -> list[float]:
        """Count, mean and variance of the losses so far. Waits for the device."""
        return self._seen.tolist()
