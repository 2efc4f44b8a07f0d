"""Read and plot the metrics of a run."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from fla_train.training.run_folder import RunFolder
from fla_train.utils.records import Record, read_metrics
from fla_train.utils.safe_files import read_json

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def last_value(path: Path, key: str) -> float | None:
    """Return the last finite value of a key of metrics.jsonl, or None."""
    values = [record[key] for record in read_metrics(path) if record.get(key) is not None]
    return values[-1] if values else None


def newest_validation(path: Path) -> Record:
    """Return the last record of a validation in metrics.jsonl, or an empty one."""
    return next((record for record in reversed(read_metrics(path)) if "validation_loss" in record), {})


def draw_losses(runs: Sequence[Path], labels: Sequence[str] = (), metric: str = "loss") -> "Figure":
    """Draw a metric of several runs against training tokens, so that runs with different batches compare.

    The training loss (line) comes with the validation loss (points) and the data's unigram entropy (dashes).
    A dotted line marks each resume.

    Args:
        runs: run folders.
        labels: labels in the legend; default: the runs' names.
        metric: a key of metrics.jsonl.

    Raises:
        ValueError: no folder holds this metric.
    """
    from matplotlib.ticker import EngFormatter

    from fla_train.utils.figure_style import CYCLE, new_axes

    axes = new_axes(8, 5)
    entropies = {}
    for number, run in enumerate(runs):
        records, color = read_metrics(RunFolder(run).metrics), CYCLE[number % len(CYCLE)]
        name = labels[number] if labels else RunFolder(run).name
        tokens, values = curve(records, metric)
        if not values:
            continue
        # Draw the training loss pale, or its noise hides the validation points. Mark the points of short
        # lines, because a line of one point is invisible.
        alpha = 0.5 if metric == "loss" else 1
        marker = "." if len(values) <= 32 else None
        axes.plot(tokens, values, color=color, lw=0.8, alpha=alpha, marker=marker, label=name)
        for i, resumed in enumerate(resumed_at(run)):
            axes.axvline(resumed, color=color, ls=":", lw=1, label=None if i else f"{name}, resumed")
        if metric == "loss":
            marks = {"ls": "none", "marker": "o", "ms": 5, "mec": "black", "mew": 0.7, "zorder": 3}
            axes.plot(*curve(records, "validation_loss"), color=color, label=f"{name}, validation", **marks)
            if (plan := RunFolder(run).plan).is_file():
                entropy = read_json(plan).get("unigram_entropy")
                if entropy is not None:
                    entropies[round(entropy, 4)] = entropy
    if not axes.lines:
        raise ValueError(f"no run has {metric}: docs/metrics.md lists the keys of metrics.jsonl")
    for entropy in entropies.values():
        axes.axhline(entropy, color="gray", ls="--", lw=1, label=f"unigram entropy {entropy:.2f}")
    axes.set(xlabel="training tokens", ylabel=metric + " (nats per token)" * metric.endswith("loss"))
    axes.xaxis.set_major_formatter(EngFormatter())
    axes.legend(fontsize="small")
    return axes.figure


def curve(records: Iterable[Record], metric: str) -> tuple[list[float], list[float]]:
    """Return the training tokens and the metric's values at them."""
    chosen = [r for r in records if r.get("tokens") is not None and r.get(metric) is not None]
    return [record["tokens"] for record in chosen], [record[metric] for record in chosen]


def plot_losses(runs: Sequence[Path], out: Path, labels: Sequence[str] = (), metric: str = "loss") -> Path:
    """Write `draw_losses` to the image file `out`, and return it."""
    figure = draw_losses(runs, labels, metric)
    out.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(out, dpi=120)
    return out


def resumed_at(run: Path) -> list[int]:
    """Return the training tokens at which a run resumed from a checkpoint, in ascending order."""
    return sorted({start.get("tokens") or 0 for start in RunFolder(run).start_records()} - {0})
