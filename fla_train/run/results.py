"""Read run folders: config, metrics as a table, status, plot, checkpoints, the trained model."""

import json
import logging
import os
import re
from collections.abc import Iterable, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fla_train.hub.saved_config import read_saved
from fla_train.models.build import architecture
from fla_train.training.checkpoint import WEIGHTS, step_of
from fla_train.training.config import TrainConfig
from fla_train.training.load_checkpoint import load_file
from fla_train.training.metrics import draw_losses
from fla_train.training.plan import read_plan
from fla_train.training.resume import has_reached
from fla_train.training.run_folder import RunFolder, is_locked
from fla_train.utils.keys import rule
from fla_train.utils.overrides import flatten
from fla_train.utils.records import Record, read_metrics
from fla_train.utils.safe_files import read_json

if TYPE_CHECKING:  # each import needs a second
    import pandas
    from matplotlib.figure import Figure
    from transformers import PreTrainedModel

logger = logging.getLogger(__name__)


class Run:
    """Read a run that `fla-train` or `fla_train.train` has started.

    Attributes:
        path: the folder.
        name: name of the run in plots and tables.
        files: paths inside the folder.

    Raises:
        ValueError: the folder does not hold a run.
    """

    def __init__(self, folder: str | Path):
        self.path = Path(folder).expanduser().absolute()  # the working directory may change
        self.files = RunFolder(self.path)
        self.name = self.files.name
        if not self.files.config.is_file():
            raise ValueError(f"{folder} holds no run: it has no {self.files.config.name}")

    def __repr__(self) -> str:
        return f"Run({str(self.path)!r})"

    @cached_property
    def config(self) -> TrainConfig:
        """Return the config of the newest start, with every value filled in.

        Raises:
            OSError: the run has not been started.
            ValueError: it has keys of another version.
        """
        return read_plan(self.files.plan).config

    @cached_property
    def settings(self) -> dict[str, Any]:
        """Return the values of `config` by dotted key, of any version, or those of config.yaml."""
        resolved = self._read_plan().get("config")
        return dict(flatten(resolved if isinstance(resolved, dict) else read_saved(self.files.config)))

    @property
    def model_name(self) -> str:
        """Return architecture and number of parameters: `gla/50m`, `delta_net/0.3m`."""
        model = {k.removeprefix("model."): v for k, v in self.settings.items() if k.startswith("model.")}
        name = architecture(model)
        if (count := self.parameters) is None:
            return name
        millions = f"{count / 1e6:.0f}" if count >= 1e6 else f"{count / 1e6:.1g}"
        return f"{name}/{count / 1e9:.1f}b" if count >= 1e9 else f"{name}/{millions}m"

    @property
    def parameters(self) -> int | None:
        """Return the number of parameters from plan.json; None if that is missing or damaged."""
        count = self._read_plan().get("parameters_held")
        return count if isinstance(count, int) else None

    def _read_plan(self) -> dict[str, Any]:
        try:
            return read_json(self.files.plan)
        except (OSError, ValueError):
            return {}

    @property
    def records(self) -> list[Record]:
        """Return the records of metrics.jsonl in order."""
        return read_metrics(self.files.metrics)

    @property
    def metrics(self) -> "pandas.DataFrame":
        """Return metrics.jsonl as a table: a row for each step, a column for each key of docs/metrics.md."""
        import pandas

        return pandas.DataFrame(self.records or {"step": []}).groupby("step").last()

    @property
    def step(self) -> int:
        """Return the last step that has a record."""
        return int(max((record["step"] for record in self.records), default=0))

    @property
    def status(self) -> str:
        """Return `running`, `finished` (with its export and plot) or `stopped`."""
        if is_locked(self.files):
            return "running"
        step, target = self.step, self.settings.get("task.stop_at")
        ended = step >= self.settings["trainer.max_steps"] or has_reached(target, self.files, step)
        whole = ended and self.files.export(step).is_dir() and self.files.loss_plot.is_file()
        return "finished" if whole else "stopped"

    @property
    def checkpoints(self) -> dict[int, Path]:
        """Return the kept checkpoints by step."""
        return {step_of(path.name): path for path in self.files.store.list()}

    @property
    def best_checkpoint(self) -> Path | None:
        """Return the kept checkpoint with the lowest validation loss, or the newest if no loss is known."""
        kept, records = self.checkpoints, self.records
        losses = {r["step"]: r["validation_loss"] for r in records if r.get("validation_loss") is not None}
        best = min(kept.keys() & losses.keys(), key=losses.__getitem__, default=max(kept, default=None))
        return kept.get(best)

    def plot(self, metric: str = "loss") -> "Figure":
        """Plot a metric against training tokens. The training loss comes with the validation loss.

        Raises:
            ValueError: the run does not have this metric.
        """
        return draw_losses([self.path], metric=metric)

    def model(self, checkpoint: int | Path | None = None, device: str = "cpu") -> "PreTrainedModel":
        """Load the trained model in eval mode: the newest export, or the weights of one of `checkpoints`.

        Args:
            checkpoint: a step of `checkpoints`, or its folder; None: the newest export.

        Raises:
            ValueError: the export or the checkpoint does not exist, or files are missing or damaged.
        """
        from fla_train.hub.load import load_causal_lm

        if checkpoint is None:
            return load_causal_lm(self.path, device)
        kept = self.checkpoints
        folder = kept.get(checkpoint) if isinstance(checkpoint, int) else Path(checkpoint)
        if folder is None or not folder.is_dir():
            steps = ", ".join(map(str, kept)) or "none"
            raise ValueError(f"{self.path} has no checkpoint {checkpoint}: its steps are {steps}")
        from fla_train.training.model import build_model

        plan = read_plan(self.files.plan)
        model = build_model(plan.config, plan.open_data(), fresh=True)
        model.load_state_dict(load_file(folder / WEIGHTS))
        return model.to(device).eval()


def find_runs(places: Iterable[str | Path]) -> list[Run]:
    """Return the runs in or below these folders, including nested sweeps, in natural order of names.

    Raises:
        ValueError: a folder does not exist or does not hold a run.
    """
    runs: dict[Path, Run] = {}
    for place in map(os.path.expanduser, places):
        below = []
        for folder, inner, files in os.walk(place):
            if "config.yaml" in files and "checkpoints" in inner:
                below.append(Path(folder))
                inner.clear()
        inside = {path: Run(path) for path in sorted(below, key=_natural) if _is_readable(path)}
        if not inside:
            raise ValueError(f"{place}: {'no run' if os.path.exists(place) else 'no such folder'}")
        runs |= inside
    return list(runs.values())


def _is_readable(folder: Path) -> bool:
    """Return whether a folder's config belongs to a run. Warn if it is damaged or something else."""
    try:
        if Run(folder).settings.get("trainer.max_steps") is not None:
            return True
        reason = "it has no trainer.max_steps, and there is no plan.json"
    except (OSError, ValueError) as failure:
        reason = " ".join(str(failure).split())
    logger.warning("%s is left out, because its config.yaml does not belong to a run: %s", folder, reason)
    return False


def differences(runs: Sequence[Run]) -> list[dict[str, Any]]:
    """Return the settings of each run that differ between runs, by dotted key.

    Folders and machines do not count. Runs without a key, such as those of another library's model, do not
    make it differ.
    """
    settings = [run.settings for run in runs]
    names = dict.fromkeys(name for values in settings for name in values)
    differ = [
        name
        for name in names
        if rule(TrainConfig, "resume", name) != "free"
        and len({json.dumps(values[name]) for values in settings if name in values}) > 1
    ]
    return [{name: values[name] for name in differ if name in values} for values in settings]


def _natural(path: Path) -> list[tuple[int, str]]:
    """Return a sort key that puts job 10 after job 9."""
    return [(int(digits or 0), text) for digits, text in re.findall(r"(\d+)|(\D+)", str(path))]
