"""Table, warnings and figure of models that were trained with several learning rates and seeds."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.ticker import EngFormatter, NullFormatter
from scipy.special import stdtrit

from fla_train.eval.figures import grid
from fla_train.eval.intervals import LEVEL, mean
from fla_train.eval.tables import markdown_table

POWER = 0.8  # probability with which the smallest detectable difference is detected
TRANSIENT = 0.5  # nats per doubling of the tokens
LOSS, FALL, DECODE = "validation loss", "loss fall per doubling", "decode ms/token"
FORMATS = {
    LOSS: ".4f",
    "bits per byte": ".4f",
    FALL: ".2f",
    "tokens/s": ",.0f",
    "memory (GiB)": ".2f",
    DECODE: ".2f",
}


def mean_table(runs: pd.DataFrame, models: pd.DataFrame) -> pd.DataFrame:
    """Return the mean of each metric over the seeds of each model, with its 95% interval by Student's t.

    Args:
        runs: one row for each number of a run: `model`, `seed`, `metric`, `value`.
        models: `parameters` and `learning_rate`, indexed by model.

    Returns:
        one row for each model and metric: `model`, `parameters`, `learning_rate`, `metric`, `seeds`, `value`,
        `stderr`, `low`, `high`, and the `detectable_difference` of the metric.
    """
    rows = []
    for metric, numbers in runs.groupby("metric", sort=False):
        values = {model: group.to_numpy() for model, group in numbers.groupby("model", sort=False).value}
        least = detectable_difference(list(values.values()))
        for model in models[models.index.isin(list(values))].itertuples():
            row = {"model": model.Index, "parameters": model.parameters, "learning_rate": model.learning_rate}
            row |= {"metric": metric, "seeds": len(values[model.Index])}
            row |= mean(values[model.Index], np.ones(row["seeds"]))._asdict()
            rows.append(row | {"detectable_difference": least})
    return pd.DataFrame(rows)


def detectable_difference(groups: Sequence[np.ndarray]) -> float | None:
    """Return the smallest difference between two models that a t test detects with a probability of 80%.

    The test is two-sided at 5%. The standard deviation over seeds is pooled over all models, and the number
    of seeds is the smallest of all models with at least two.

    Args:
        groups: values of each model, one for each seed.
    """
    groups = [values for values in groups if len(values) > 1 and np.isfinite(values).all()]
    if not groups:
        return None
    freedom = sum(len(values) - 1 for values in groups)
    variance = sum(((values - values.mean()) ** 2).sum() for values in groups) / freedom
    quantiles = stdtrit(freedom, (1 + LEVEL) / 2) + stdtrit(freedom, POWER)
    return float(quantiles * math.sqrt(2 * variance / min(map(len, groups))))


def fall_per_doubling(tokens: pd.Series, losses: pd.Series) -> float:
    """Return by how many nats the loss falls per doubling of the tokens, in the second half of the tokens.

    This is the slope of a least-squares line through the losses over log2(tokens). NaN for fewer than three
    losses.
    """
    late = (tokens > tokens.max() / 2) & np.isfinite(losses)
    return -float(np.polyfit(np.log2(tokens[late]), losses[late], 1)[0]) if late.sum() > 2 else math.nan


def find_warnings(table: pd.DataFrame, models: pd.DataFrame, sweep: pd.DataFrame) -> list[str]:
    """Return what makes the comparison doubtful: incomplete sweeps, divergence, edges, initial transients.

    Args:
        table: from `mean_table`.
        models: `entropy` of single tokens of the validation split, None if unknown, indexed by model.
        sweep: a row for each run of the sweep: `model`, `learning_rate`, `value` (infinite if it diverged,
            NaN if it is not over).
    """
    warnings, losses = [], table[table.metric == LOSS]
    for model, rates in sweep[sweep.value.isna()].groupby("model", sort=False).learning_rate:
        missing = ", ".join(map("{:g}".format, rates))
        warnings.append(f"{model}: the sweep is not complete, learning rates {missing} are left")
    for row in sweep[np.isinf(sweep.value)].itertuples():
        warnings.append(f"{row.model}: training diverged at learning rate {row.learning_rate:g}")
    for row in losses.itertuples():
        rates = sweep.learning_rate[sweep.model == row.model]
        if len(rates) > 1 and row.learning_rate in (rates.min(), rates.max()):
            warnings.append(f"{row.model}: the best rate, {row.learning_rate:g}, is at the edge of the sweep")
    for row in losses[np.isinf(losses.value)].itertuples():
        warnings.append(f"{row.model}: a seed diverged at the best learning rate, {row.learning_rate:g}")
    # Before a model has learned how frequent each token is, its loss may fall slowly.
    entropy = losses.model.map(models.entropy).astype(float)
    early = losses.value.between(entropy, math.inf, inclusive="left")
    transient = dict.fromkeys(losses.model[early], "the validation loss is above the unigram entropy")
    for row in table[(table.metric == FALL) & (table.value > TRANSIENT)].itertuples():
        transient[row.model] = (
            f"in the second half of training the loss still falls by {row.value:.2f} nats per doubling of "
            f"the tokens, more than {TRANSIENT}"
        )
    end = "the run ends in its initial transient, and the order of models may change with more tokens"
    return warnings + [f"{model}: {text}: {end}" for model, text in transient.items()]


def write_report(
    folder: Path,
    runs: pd.DataFrame,
    models: pd.DataFrame,
    sweep: pd.DataFrame,
    curves: Mapping[str, pd.DataFrame],
    notes: Sequence[str],
) -> None:
    """Write table.csv (each number), table.md and comparison.png.

    Args:
        runs, models: see `mean_table` and `find_warnings`.
        sweep: see `find_warnings`.
        curves: columns `tokens` and `loss` of a run of each model.
        notes: further sentences below the table.
    """
    table = mean_table(runs, models)
    table.to_csv(folder / "table.csv", index=False)
    losses = table[table.metric == LOSS].sort_values("value", kind="stable")
    lines = ["# Comparison", "", *markdown_table(_summary(table, losses)), ""]
    if pd.notna(difference := losses.detectable_difference.iloc[0]):
        lines.append(
            "- ± is half of a 95% interval over seeds. Smallest detectable difference of validation losses: "
            f"{difference:.4f} nats (two-sided 5% t test, {POWER:.0%} power, deviation pooled over models)."
        )
    lines += [f"- Warning: {text}." for text in find_warnings(table, models, sweep)]
    lines += [f"- {note}." for note in notes]
    (folder / "table.md").write_text("\n".join(lines) + "\n", encoding="utf-8")
    _draw(folder / "comparison", losses, sweep, curves)


def _summary(table: pd.DataFrame, losses: pd.DataFrame) -> pd.DataFrame:
    """Return a row of text for each row of `losses`, with a column for each metric."""
    cells = table.assign(cell=list(map(_cell, table.itertuples())))
    cells = cells.pivot(index="model", columns="metric", values="cell")[[*table.metric.unique()]].fillna("-")
    columns = {"parameters": "{:,}", "learning rate": "{:g}", "seeds": "{}"}
    texts = {name: losses[name.replace(" ", "_")].map(form.format) for name, form in columns.items()}
    return pd.DataFrame({"model": losses.model} | texts).merge(cells, left_on="model", right_index=True)


def _cell(row: Any) -> str:
    """Format a row of `mean_table` with half of its interval."""
    if math.isnan(row.value):
        return "-"
    form = FORMATS.get(row.metric, ".4g")
    return f"{row.value:{form}}" + ("" if pd.isna(row.low) else f" ± {row.high - row.value:{form}}")


def _draw(file: Path, losses: pd.DataFrame, sweep: pd.DataFrame, curves: Mapping[str, pd.DataFrame]) -> None:
    """Draw losses with intervals, losses against learning rates, and training curves; a color per model."""
    with grid(file, 1, 3, (4.2, 3.0)) as axes:
        final, rates, training = axes[0]
        for i, row in enumerate(losses.itertuples()):
            style = {"color": f"C{i}", "label": row.model}
            final.plot(row.value, i, marker="o", ls="none", **style)
            final.hlines(i, row.low, row.high, color=f"C{i}")
            swept = sweep[(sweep.model == row.model) & np.isfinite(sweep.value)].sort_values("learning_rate")
            rates.plot(swept.learning_rate, swept.value, marker="o", markersize=3, **style)
            training.plot(curves[row.model].tokens, curves[row.model].loss, linewidth=0.8, **style)
        final.set_yticks(range(len(losses)), losses.model)
        final.invert_yaxis()
        final.set(title="95% intervals over seeds", xlabel="validation loss (nats per token)")
        rates.set(title="learning rates", xlabel="peak learning rate", ylabel="validation loss")
        rates.set_xscale("log")
        ticks = sorted(sweep.learning_rate.unique())
        rates.set_xticks(ticks, [f"{rate:g}" for rate in ticks])
        rates.xaxis.set_minor_formatter(NullFormatter())
        training.set(title="first seed", xlabel="training tokens", ylabel="training loss")
        training.xaxis.set_major_formatter(EngFormatter())
