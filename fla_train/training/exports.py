"""Exports of a run: models in folders of their own, which `from_pretrained` and other programs load."""

from pathlib import Path

import torch.distributed as dist
from safetensors import SafetensorError

from fla_train.data.cache import PreparedData
from fla_train.hub import export_model, find_export_damage
from fla_train.training.checkpoint import TrainState
from fla_train.training.config import TrainConfig
from fla_train.training.failures import TrainingStopped
from fla_train.training.report import Reporter, model_card
from fla_train.training.run_folder import RunFolder
from fla_train.utils.filesystem import reason


class Exporter:
    """Exports the model of a run. All ranks call `export`, rank 0 writes."""

    def __init__(
        self, config: TrainConfig, data: PreparedData, folder: RunFolder, engine, reporter: Reporter
    ):
        self._config, self._data, self._folder = config, data, folder
        self._engine, self._reporter = engine, reporter

    def export(self, state: TrainState, *, last: bool = False) -> Path | None:
        """Export this step's model.

        Args:
            last: the run's last: one that is there already and whole stays, and an error ends the run.

        Returns:
            Its folder; on rank 0 None if it could not be written, which the others do not know.

        Raises:
            TrainingStopped: the last one could not be written.
        """
        path = self._folder.export(state.step)
        error = None
        # Rank 0 looks: other machines may see a shared folder late.
        if dist.get_rank() == 0 and not (last and self._is_whole(path)):
            error = self._export(state, path)
            outcome = f"exported {path}" if error is None else f"NO EXPORT, {error}"
            self._reporter.say(f"step {state.step:,}: {outcome}")
        if error is not None and last:
            raise TrainingStopped(
                f"the model of step {state.step} could not be exported ({error}): free space and give the "
                "same command again; it goes on from the last checkpoint"
            )
        dist.barrier()
        return path if error is None else None

    def _is_whole(self, export: Path) -> bool:
        """Whether there is an export with every file as it was written; a damaged one is named."""
        if not export.is_dir():
            return False
        damage = find_export_damage(export)
        if damage is not None:
            self._reporter.say(f"export {export} is written again: {damage}")
        return damage is None

    def _export(self, state: TrainState, path: Path) -> str | None:
        """Why the disk refused it, or None."""
        card = model_card(self._config, self._data, self._folder, state)
        try:
            export_model(self._engine.module, self._data.tokenizer(), path, card)
        except (OSError, SafetensorError) as failure:
            return reason(failure)
        return None
