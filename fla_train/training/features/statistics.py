"""Record statistics of every `trainer.stats_every`-th step: norms of weights and updates, gates of layers."""

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from fla_train.data.sampler import Batch
from fla_train.models.mixers.delta_product import DeltaProductMixer
from fla_train.training.callback import Callback


class Statistics(Callback):
    """Add to the metrics of chosen steps:

    - `param_norm` after the step, and `update_norm`, the norm of the difference it made
    - for each layer i that runs our operator, over the first sequence of the first micro-batch: `beta/i`, the
      mean step size; `beta_above_1/i`, the fraction of negative eigenvalues 1 - beta; `decay/i`, the mean of
      exp(g), with a forget gate

    A step with statistics holds a copy of the rank's partition of the weights.
    """

    def before_step(self, step: int, micro_batches: Sequence[Batch]) -> None:
        self._active = self.trainer.is_observed(step)
        if not self._active:
            return
        self._gates: dict[str, Tensor] = {}
        # Tokens of the first sequence, and how many of them this rank's columns hold.
        batch, part = micro_batches[0], micro_batches[0].context_part
        columns, parts = batch.input_ids.shape[1], (1 if part is None else part.group.size)
        self._length = batch.max_length_q or columns * parts
        self._seen = max(self._length - (0 if part is None else part.start(columns)), 0)
        self._before = [master.detach().clone() for master in self._masters()]
        modules = self.trainer.model.modules()
        self._mixers = [module for module in modules if isinstance(module, DeltaProductMixer)]
        for mixer in self._mixers:
            mixer.operator_inputs = self._observer(mixer)

    def after_step(self, step: int, metrics: dict[str, Tensor | float]) -> None:
        if not self._active:
            return
        for mixer in self._mixers:
            del mixer.operator_inputs  # removes the observer, which hides the method of the class
        context = self.trainer.mesh.context
        # Each rank has seen only its columns of the sequence.
        if context is not None and self._gates:
            sums = torch.stack(list(self._gates.values()))
            context.add_up(sums)
            self._gates = dict(zip(self._gates, sums.unbind(), strict=True))
        masters = self._masters()
        for old, master in zip(self._before, masters, strict=True):
            old.sub_(master.detach())
        squares = torch.stack([_sum_of_squares(masters), _sum_of_squares(self._before)])
        del self._before
        dist.all_reduce(squares)
        metrics |= self._gates
        metrics["param_norm"], metrics["update_norm"] = squares.sqrt().unbind()

    def _masters(self) -> Sequence[Tensor]:
        """Return this rank's partitions of the weights, padded with zeros."""
        return self.trainer.engine.optimizer.single_partition_of_fp32_groups

    def _observer(self, mixer: DeltaProductMixer) -> Callable[..., tuple[Tensor | None, ...]]:
        operator_inputs, layer = mixer.operator_inputs, mixer.layer_index

        def observe(*arguments: Tensor | None) -> tuple[Tensor | None, ...]:
            # Selective checkpointing needs the same operations when it recomputes a layer. So they are always
            # computed, and only the results of a recomputation and of later micro-batches are dropped.
            inputs = operator_inputs(*arguments)
            beta, g = (x if x is None else x.detach()[0, : self._seen] for x in inputs[3:])
            values = {"beta": beta, "beta_above_1": (beta > 1).to(beta)}
            if g is not None:
                values["decay"] = g.exp()
            for name, value in values.items():
                self._gates.setdefault(f"{name}/{layer}", value.flatten(1).mean(1).sum() / self._length)
            return inputs

        return observe


def _sum_of_squares(tensors: Sequence[Tensor]) -> Tensor:
    norms = [torch.linalg.vector_norm(tensor.detach(), dtype=torch.float64) for tensor in tensors]
    return torch.stack(norms).square().sum()
