"""Export the model to `hf/`, with cards and plots."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fla_train.hub.checksums import find_export_damage
from fla_train.training.callback import Callback
from fla_train.training.failures import TrainingStopped
from fla_train.training.metrics import last_value, plot_losses
from fla_train.utils.filesystem import reason
from fla_train.utils.keys import key


@dataclass
class ExportKeys:
    export_every: int = key(at_least=0)


class Exports(Callback):
    """Export the model, and weights that callbacks add. All ranks call it; rank 0 writes."""

    error: str | None = None  # why the newest export is missing, on rank 0

    def due(self, step: int) -> bool:
        config, is_due = self.trainer.config, self.trainer.is_due
        every = (config.trainer.export_every, config.trainer.suite_every, config.hub.push_every)
        return not self.trainer.finished and any(map(is_due, every))

    def between_steps(self, step: int) -> None:
        self.export()

    def finish(self) -> None:
        """Export the last model while the checkpoint is written, unless an intact export exists.

        Raises:
            TrainingStopped: the last checkpoint or export could not be written.
        """
        self.export(last=True)
        self.trainer.timeline.mark("export")
        self.trainer.ensure_saved()
        if self.error is not None:
            raise TrainingStopped(f"no export of step {self.trainer.state.step} ({self.error}): start again")

    def export(self, *, last: bool = False) -> None:
        """Draw the plots and export this step's model. If that fails, training continues.

        Args:
            last: keep an intact export that already exists.
        """
        trainer, self.error = self.trainer, None
        step = trainer.state.step
        trainer.watchdog.beat(f"exporting step {step}")
        models: dict[str, Mapping[str, Any]] = {"hf": {}}
        for feature in trainer.features:
            for name, weights in feature.exported_weights().items():
                if unknown := weights.keys() - dict(trainer.model.named_parameters()):
                    raise TrainingStopped(f"{feature.name}: the model has no parameter {min(unknown)}")
                while name in models:  # two instances of a callback export the same name
                    name += "-2"
                models[name] = weights
        if trainer.rank == 0:  # other machines may see a shared folder late
            try:
                plots = self._draw()
                for name, weights in models.items():
                    path = trainer.folder.root / name / trainer.folder.export(step).name
                    if not (last and self._is_intact(path)):
                        self._write(path, weights, plots)
            except (AssertionError, AttributeError, LookupError, NameError, TypeError):  # a bug
                raise
            except Exception as error:
                self.error = reason(error)
                trainer.log(f"step {step:,}: NO EXPORT, {self.error}")
        trainer.mesh.wait()

    def _draw(self) -> list[Path]:
        folder = self.trainer.folder
        plots = [folder.accuracy_plot] if folder.accuracy_plot.is_file() else []
        if last_value(folder.metrics, "loss") is not None:
            plots.append(plot_losses([folder.root], folder.loss_plot))
        return plots

    def _is_intact(self, export: Path) -> bool:
        """Return whether an export exists and has no damaged file. Log damage."""
        if not export.is_dir():
            return False
        damage = find_export_damage(export)
        if damage is not None:
            self.trainer.log(f"export {export} is written again: {damage}")
        return damage is None

    def _write(self, path: Path, weights: Mapping[str, Any], plots: list[Path]) -> None:
        # Import late, because these import transformers' models, which commands and the launcher don't need.
        from fla_train.hub.export import export_model
        from fla_train.training.model import model_card, other_weights

        trainer = self.trainer
        with other_weights(trainer.model, weights):
            card = model_card(trainer.config, trainer.data, trainer.folder, trainer.state)
            export_model(trainer.model, trainer.data.tokenizer(), path, card, plots=plots)
        trainer.log(f"step {trainer.state.step:,}: exported {path}")
