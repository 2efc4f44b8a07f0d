"""The report of an evaluation: results.json, table.md and figures in one folder."""

import json
from pathlib import Path

from fla_train.eval.paper import paper_table


def write_report(folder: Path, record: dict) -> None:
    """Write results.json, table.md and, for a perplexity sweep, perplexity.png to `folder`.

    Args:
        folder: made if it does not exist; files of an earlier report are replaced.
        record: what `fla_train.eval.run.evaluate` collects; plain JSON.
    """
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "results.json").write_text(json.dumps(record, indent=2) + "\n")
    (folder / "table.md").write_text(table(record))
    if record["perplexity"]:
        plot_perplexity(folder / "perplexity.png", record)


def table(record: dict) -> str:
    """The results as Markdown."""
    parts = [f"# {record['suite']['name']}: {record['checkpoint']}\n"]
    for name, result in record["perplexity"].items():
        parts += [f"## Perplexity, {name}\n", _perplexity_table(result, record["trained_length"])]
    if record["paper_row"]:
        parts += ["## The papers' columns\n", paper_table(record["paper_row"])]
    if record["tasks"]:
        parts += ["## Tasks\n", _task_table(record["tasks"])]
        if record["suite"]["limit"]:
            parts.append(
                f"Only the first {record['suite']['limit']} examples of each task (suite.limit) were run.\n"
            )
    env = record["environment"]
    parts.append(
        f"{env['hardware']}, {env['dtype']}, torch {env['packages']['torch']}, "
        f"commit {env['commit'] or 'unknown'}\n"
    )
    return "\n".join(parts)


def _perplexity_table(result: dict, trained: int) -> str:
    lines = ["| context | perplexity | 95% interval | loss | documents |", "|---:|---:|:---:|---:|---:|"]
    for row in result["lengths"]:
        interval = "" if row["low"] is None else f"{row['low']:.3f} to {row['high']:.3f}"
        mark = " (trained)" if row["length"] == trained else ""
        cells = (f"{row['length']:,}{mark}", f"{row['perplexity']:.3f}", interval, f"{row['loss']:.4f}")
        lines.append(f"| {' | '.join(cells)} | {row['documents']} |")
    if result["not_reached"]:
        lines += ["", f"No document is long enough for {', '.join(map(str, result['not_reached']))}."]
    return "\n".join([*lines, ""])


def _task_table(tasks: dict[str, dict]) -> str:
    lines = ["| task | metric | value | standard error | examples | shots |", "|---|---|---:|---:|---:|---:|"]
    for name, result in tasks.items():
        if "error" in result:
            lines.append(f"| {name} | could not run: {result['error'].replace('|', '/')} | | | | |")
            continue
        for task, scores in result["scores"].items():
            for metric, value in scores.items():
                if metric in ("examples", "num_fewshot") or metric.endswith("_stderr"):
                    continue
                error = scores.get(f"{metric}_stderr")
                cells = (task, metric, f"{value:.4f}", "" if error is None else f"{error:.4f}")
                lines.append(f"| {' | '.join(cells)} | {scores['examples']} | {scores['num_fewshot']} |")
    return "\n".join([*lines, ""])


def plot_perplexity(file: Path, record: dict) -> None:
    """Perplexity against context length (left) and against position (right), the training length marked."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, (by_length, by_position) = plt.subplots(1, 2, figsize=(11, 4), layout="constrained")
    for name, result in record["perplexity"].items():
        rows = result["lengths"]
        _curve(by_length, [row["length"] for row in rows], rows, name, marker="o")
        rows = result["positions"]
        _curve(by_position, [(row["start"] + row["end"]) / 2 for row in rows], rows, name)
    by_length.set_xscale("log", base=2)
    ticks = sorted({row["length"] for result in record["perplexity"].values() for row in result["lengths"]})
    by_length.set_xticks(ticks, [str(tick) for tick in ticks])
    by_length.set(xlabel="context length (tokens)", ylabel="perplexity up to the length")
    by_position.set(
        xlabel="position in the document (tokens)", ylabel="perplexity in the bucket", xlim=(0, None)
    )
    for axes in (by_length, by_position):
        axes.axvline(
            record["trained_length"], color="0.4", linestyle="--", linewidth=1, label="training length"
        )
        axes.grid(alpha=0.3)
    by_length.legend(frameon=False)
    figure.suptitle(f"{record['checkpoint']} (bands: 95% interval over documents)", fontsize=9)
    figure.savefig(file, dpi=150)
    plt.close(figure)


def _curve(axes, x: list[float], rows: list[dict], name: str, **style) -> None:
    (line,) = axes.plot(x, [row["perplexity"] for row in rows], label=name, **style)
    if all(row["low"] is not None for row in rows):
        axes.fill_between(
            x, [r["low"] for r in rows], [r["high"] for r in rows], color=line.get_color(), alpha=0.2
        )
