"""Define the protocol by which features extend the training loop. It is public for custom callbacks.

`trainer.callbacks=[package.module:Class]` adds a subclass of `Callback` to a run; docs/extending.md has
examples. The features in `training/features` implement the same protocol. Importing this module does not
import torch, so that the launcher can check callbacks cheaply.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from fla_train.utils.errors import described
from fla_train.utils.import_class import import_class

if TYPE_CHECKING:
    from torch import Tensor
    from transformers.modeling_outputs import CausalLMOutputWithPast

    from fla_train.data.sampler import Batch
    from fla_train.training.config import TrainConfig
    from fla_train.training.trainer import FinishedStep, Trainer
    from fla_train.utils.records import Record


class Callback:
    """Extend the training loop. Override the hooks you need; all ranks call each of them alike.

    The order of one step: `before_step`; for each micro-batch `model_inputs`, `run_pass`, `after_loss` and
    `after_backward`; the optimizer's update; `after_step`; `after_results` once results have reached the
    host; `between_steps` if it is `due`. Within each hook, features run in the order of the trainer's list.

    Attributes:
        name: key of the state in checkpoints.
        changes_in_place: whether the tensors of `state_dict` change in place before the optimizer's update.
            If so, a step waits for the end of their copy. It is set for callbacks outside this package.
        trainer: set by `attach`. It has `config`, `engine` (DeepSpeed's), `model`, `state` (step, sequences,
            tokens), `folder`, `rank` and `log`. Set `trainer.reached` to end the run after this step.
    """

    name = ""
    changes_in_place = False
    trainer: "Trainer"

    def check(self, config: "TrainConfig") -> Iterable[str]:
        """Return errors in this config, one line each, before anything is started."""
        return ()

    def memory(self, config: "TrainConfig") -> int:
        """Return the bytes of device memory that this callback uses on each rank, for the plan."""
        return 0

    def attach(self, trainer: "Trainer") -> None:
        """Prepare for training; the weights are loaded. An override calls `super().attach(trainer)`."""
        self.trainer = trainer

    def before_step(self, step: int, micro_batches: "Sequence[Batch]") -> None:
        """Prepare optimizer step `step` (from 1) on this rank's micro-batches."""

    def model_inputs(self, number: int, batch: "Batch") -> Mapping[str, Any]:
        """Return further keyword arguments of the model for micro-batch `number` of the step."""
        return {}

    def run_pass(self, inputs: Mapping[str, Any]) -> "Tensor | None":
        """Run the forward and backward pass in place of the engine; return the loss, or None to decline."""
        return None

    def after_loss(
        self, loss: "Tensor", outputs: "CausalLMOutputWithPast", batch: "Batch", targets: "Tensor"
    ) -> "Tensor":
        """Return the loss to differentiate: `loss`, or `loss` plus a term.

        Args:
            loss: fp32 scalar, sum of the micro-batch's token losses divided by `targets`. The step's loss is
                the sum over micro-batches and ranks, so divide a sum over tokens by `targets` too, and
                multiply any other term by `(batch.targets() != -100).sum() / targets`.
            outputs: of the model. Training computes no logits; hook the head to get them.
            batch: the micro-batch, with `input_ids` [B, T] and `targets()`, the token after each one, or -100
                without a target.
            targets: number of target tokens of the global batch; int64 scalar on the device.
        """
        return loss

    def after_backward(self, number: int) -> None:
        """Act after the backward pass of micro-batch `number`."""

    def after_step(self, step: int, metrics: "dict[str, Tensor | float]") -> None:
        """Act after the optimizer's update, whose kernels may still run.

        Args:
            metrics: add scalars, which may stay on the device. They are read with the step's loss and reach
                metrics.jsonl, TensorBoard and W&B if the step is logged.
        """

    def after_results(self, results: "Sequence[FinishedStep]") -> None:
        """Act after steps whose results have reached the host are logged, at most 10 steps late."""

    def due(self, step: int) -> bool:
        """Return whether to call `between_steps` after this step. The results are read before the call."""
        return False

    def between_steps(self, step: int) -> None:
        """Do periodic work before the step's checkpoint is saved."""

    def after_evaluation(self, step: int, record: "Record") -> None:
        """Act after a validation, and add to its record."""

    def exported_weights(self) -> "Mapping[str, Mapping[str, Tensor]]":
        """Return further weights to export: {name: {parameter: value}}.

        Rank 0 writes NAME/step-XXXXXXX, or NAME-2/step-XXXXXXX if another callback has taken NAME.
        """
        return {}

    def finish(self) -> None:
        """Act after the last step of the run, before its export."""

    def stop(self) -> None:
        """End background work when the run is asked to stop."""

    def summary(self) -> list[str]:
        """Return lines for the summary at the end of the run, on rank 0."""
        return []

    def state_dict(self) -> dict[str, Any]:
        """Return this rank's state: tensors and plain values in dicts and lists, or an empty dict.

        Tensors are copied to host memory in the background, before the next `before_step`.
        """
        return {}

    def load_state_dict(self, states: Sequence[dict[str, Any]]) -> None:
        """Restore the states of all ranks of a checkpoint, in rank order. Their number may have changed.

        Clone the tensors that you keep: they are mapped from the checkpoint's files, on the CPU.
        """


def make_callbacks(entries: Sequence[str | Mapping[str, Any]]) -> list[Callback]:
    """Create the callbacks that `trainer.callbacks` lists.

    Args:
        entries: `package.module:Class`, or a mapping with that as `class` and the constructor's arguments.

    Raises:
        ValueError: a class can't be imported or rejects its arguments; the line begins with the path.
    """
    callbacks: list[Callback] = []
    for entry in entries:
        options = dict(entry) if isinstance(entry, Mapping) else {"class": entry}
        path = str(options.pop("class", ""))
        if ":" not in path:
            raise ValueError(f"{entry} names no class: write package.module:Class, or a mapping with class")
        callback_class = import_class(path, Callback, "fla_train.training.callback.Callback")
        try:
            callback = callback_class(**options)
        except Exception as error:
            raise ValueError(f"{path}: its constructor raised {described(error)}") from error
        earlier = sum(other.name.partition("#")[0] == path for other in callbacks)
        callback.changes_in_place = type(callback).state_dict is not Callback.state_dict
        callback.name = f"{path}#{earlier + 1}" if earlier else path
        callbacks.append(callback)
    return callbacks
