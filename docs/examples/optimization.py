"""A custom optimizer, Lion (arXiv 2302.06675), and a custom learning rate schedule."""

import torch


class Lion(torch.optim.Optimizer):
    """Move each weight by the sign of a running mean of its gradient."""

    def __init__(self, params, lr: float, weight_decay: float = 0.0, betas=(0.9, 0.99)):
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay, "betas": tuple(betas)})

    @torch.no_grad()
    def step(self, closure=None) -> None:
        for group in self.param_groups:
            now, later = group["betas"]
            for parameter in group["params"]:
                state = self.state[parameter]
                mean = state.setdefault("mean", torch.zeros_like(parameter))
                parameter.mul_(1 - group["lr"] * group["weight_decay"])
                parameter.add_(mean.lerp(parameter.grad, 1 - now).sign(), alpha=-group["lr"])
                mean.lerp_(parameter.grad, 1 - later)


def inverse_sqrt(step: int, peak: float, max_steps: int, warmup: int = 100) -> float:
    """Rise linearly for `warmup` steps, then fall as 1 / sqrt(step)."""
    return peak * min(step / warmup, (warmup / step) ** 0.5)
