"""Loss curves as PNG. Several runs in one: `python -m fla_train.training.plots out.png runs/a runs/b`."""

import json
import sys
from pathlib import Path

from fla_train.training.run_folder import RunFolder
from fla_train.utils.records import read_metrics


def plot_losses(runs: list[Path], out: Path) -> Path:
    """Training loss (line), validation loss (points) and the data's unigram entropy (dashes) of run folders.

    Where a run was resumed stands a dotted line. The horizontal axis is training tokens, so that runs with
    other batches compare.

    Raises:
        ValueError: a folder holds no training losses.
    """
    from matplotlib.figure import Figure  # no pyplot: no global state, no display
    from matplotlib.ticker import EngFormatter

    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.add_subplot()
    entropies = {}
    for number, run in enumerate(runs):
        records = [r for r in read_metrics(RunFolder(run).metrics) if r.get("tokens") is not None]
        train = [r for r in records if r.get("loss") is not None]
        if not train:
            raise ValueError(f"{run} has no training losses to plot")
        name, color = RunFolder(run).name, f"C{number}"
        # Pale, or the noise of single steps hides the validation points.
        axes.plot(
            [r["tokens"] for r in train],
            [r["loss"] for r in train],
            color=color,
            lw=0.8,
            alpha=0.5,
            label=name,
        )
        validation = [r for r in records if "validation_loss" in r]
        axes.plot(
            [r["tokens"] for r in validation],
            [r["validation_loss"] for r in validation],
            color=color,
            ls="none",
            marker="o",
            ms=5,
            mec="black",
            mew=0.7,
            zorder=3,
            label=f"{name}, validation",
        )
        for i, tokens in enumerate(resumed_at(run)):
            axes.axvline(tokens, color=color, ls=":", lw=1, label=None if i else f"{name}, resumed")
        if (entropy := unigram_entropy(run)) is not None:
            entropies[round(entropy, 4)] = entropy
    for entropy in entropies.values():
        axes.axhline(entropy, color="gray", ls="--", lw=1, label=f"unigram entropy {entropy:.2f}")
    axes.set(xlabel="training tokens", ylabel="loss [nats per token]")
    axes.xaxis.set_major_formatter(EngFormatter())
    axes.grid(alpha=0.3)
    axes.legend(fontsize="small")
    out.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(out, dpi=120)
    return out


def resumed_at(run: Path) -> list[int]:
    """The training tokens at which a run went on from a checkpoint, ascending."""
    return sorted({start.get("tokens") or 0 for start in RunFolder(run).start_records()} - {0})


def unigram_entropy(run: Path) -> float | None:
    """Entropy of the validation tokens' frequencies (nats per token), from plan.json."""
    plan = run / "plan.json"
    return json.loads(plan.read_text()).get("unigram_entropy") if plan.is_file() else None


if __name__ == "__main__":
    print(plot_losses([Path(run) for run in sys.argv[2:]], Path(sys.argv[1])))
