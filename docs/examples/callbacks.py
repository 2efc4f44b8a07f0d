"""Callbacks from outside the package: an average of the weights, z-loss, and a custom metric with a state."""

import torch

from fla_train.training.callback import Callback


class Ema(Callback):
    """Export an exponential moving average of the weights, besides the weights, to `ema/step-XXXXXXX`."""

    def __init__(self, decay: float = 0.999):
        self.decay = decay

    def attach(self, trainer) -> None:
        super().attach(trainer)
        self.average = {name: p.detach().clone() for name, p in trainer.model.named_parameters()}

    def after_step(self, step: int, metrics: dict) -> None:
        weights = [p.detach() for p in self.trainer.model.parameters()]
        torch._foreach_lerp_(list(self.average.values()), weights, 1 - self.decay)

    def exported_weights(self) -> dict:
        return {"ema": self.average}

    def state_dict(self) -> dict:
        return self.average if self.trainer.rank == 0 else {}  # the same on all ranks

    def load_state_dict(self, states: list[dict]) -> None:
        for name, value in self.average.items():
            value.copy_(states[0][name])


class ZLoss(Callback):
    """Add `weight` times the mean of log(Z)^2 to the loss, with Z the sum of a token's exp(logits)."""

    def __init__(self, weight: float = 1e-4):
        self.weight = weight

    def attach(self, trainer) -> None:
        super().attach(trainer)
        trainer.model.get_output_embeddings().register_forward_hook(self.keep)

    def keep(self, head, inputs, logits) -> None:
        self.logits = logits  # with a hook the head is called on all tokens, [B * T, vocabulary]

    def after_loss(self, loss, outputs, batch, targets):
        rows, length = batch.input_ids.shape
        log_z = self.logits.float().logsumexp(-1).view(rows, length)[:, : batch.targets().shape[1]]
        log_z = log_z.masked_fill(batch.targets() == -100, 0)
        return loss + self.weight * log_z.square().sum() / targets


class SmoothLoss(Callback):
    """Record `smooth_loss`, a running mean of the loss, with each logged step."""

    def attach(self, trainer) -> None:
        super().attach(trainer)
        self.mean = torch.zeros((), device=trainer.engine.device)
        self.step_loss = torch.zeros_like(self.mean)

    def after_loss(self, loss, outputs, batch, targets):
        self.step_loss += outputs.loss.detach()
        return loss

    def after_step(self, step: int, metrics: dict) -> None:
        torch.distributed.all_reduce(self.step_loss)
        new = torch.where(self.mean == 0, self.step_loss, self.mean.lerp(self.step_loss, 0.1))
        self.mean = torch.where(new.isfinite(), new, self.mean)  # a skipped step may have an infinite loss
        self.step_loss = torch.zeros_like(self.mean)
        metrics["smooth_loss"] = self.mean

    def state_dict(self) -> dict:
        return {"mean": self.mean}

    def load_state_dict(self, states: list[dict]) -> None:
        self.mean = states[0]["mean"].to(self.mean.device, copy=True)
