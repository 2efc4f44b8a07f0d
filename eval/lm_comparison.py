"""Compare language models of equal size, data and recipe: list the runs, evaluate them, merge their results.

python -m fla_train.eval.lm_comparison plan [NAME...]                  a run a line: name, overrides
python -m fla_train.eval.lm_comparison evaluate FOLDER [KEY=VALUE...]  perplexity to 32k of the runs there
python -m fla_train.eval.lm_comparison write FOLDER PAGE               tables and figure, behind a mark

`scripts/reproduce_lm.sh` calls all three. `write` reads metrics.jsonl, plan.json, environment.json and the
results of `evaluate` only, so that runs of several machines can be merged.
"""

import json
import statistics
import sys
import textwrap
from collections.abc import Iterator, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

import torch
import yaml
from omegaconf import OmegaConf

from fla_train.eval.compare import load_record
from fla_train.eval.config import EvalConfig, PerplexityConfig, SuiteConfig
from fla_train.eval.figures import grid, legend, mark_training, short
from fla_train.eval.paper import fixed
from fla_train.eval.run import evaluate
from fla_train.utils.records import read_metrics
from fla_train.utils.safe_files import read_json, read_yaml

SKIPPED = "skipped"  # written into a run folder by scripts/reproduce_lm.sh: why it did not end
UNREAD = "unread"  # written by `evaluate`: why a model is read over one chunk only, or not at all
REPORT = Path("eval", "length")  # of `evaluate`, in a run folder
MARK = "<!-- What follows is written by fla_train.eval.lm_comparison. -->\n"
TOLERANCE = 0.03  # how far a number of parameters may be from the median
WIDTH = 120  # of a page's lines, but for tables
AT = "validation_loss_at/"
LENGTHS = PerplexityConfig(
    layout="packed",
    lengths=[2048, 4096, 8192, 16384, 32768],
    bucket=1024,
    documents=16,
    scan=None,
    chunk=2048,
    batch_size=16,
)
USAGE = "usage: lm_comparison plan [NAME...] | evaluate FOLDER [KEY=VALUE...] | write FOLDER PAGE"


def read_models() -> dict[str, dict[str, str]]:
    """The compared models by name, as lm_comparison.yaml has them: title and overrides."""
    return yaml.safe_load((files("fla_train.eval") / "lm_comparison.yaml").read_text())


def plan(names: Sequence[str]) -> list[str]:
    """A line for each run: its name and the overrides of `fla-train`.

    Raises:
        ValueError: there is no such model.
    """
    models = read_models()
    if unknown := [name for name in names if name not in models]:
        raise ValueError(f"there is no model {unknown[0]}: choose from {', '.join(models)}")
    return [f"{name} {models[name]['overrides']}" for name in names or models]


def evaluate_runs(home: Path, options: Sequence[str] = ()) -> None:
    """Read the validation split at each length with every exported run that has not been read, in turn.

    Args:
        home: folder of the runs.
        options: other values of `PerplexityConfig`, such as `lengths=[64,128]`.
    """
    config = OmegaConf.merge(OmegaConf.structured(LENGTHS), OmegaConf.from_dotlist(list(options)))
    for name in read_models():
        run = home / name
        if not any(run.glob("hf/step-*")) or (run / REPORT / "results.json").is_file():
            continue
        (run / UNREAD).unlink(missing_ok=True)
        try:
            (found,) = _read(run, OmegaConf.to_object(config)).values()
            if "error" in found:  # a model whose cache does not reproduce a single forward pass
                (run / UNREAD).write_text(f"is read over one chunk only: {found['error']}\n")
                within = [length for length in config.lengths if length <= config.chunk]
                _read(run, OmegaConf.to_object(OmegaConf.merge(config, {"lengths": within})))
            print(f"evaluated    {run}", flush=True)
        except (ValueError, RuntimeError) as error:  # a package is missing, or the GPU's memory is too small
            reason = " ".join(str(error).split())
            (run / UNREAD).write_text(f"could not be evaluated: {reason}\n")
            print(f"not read     {run}: {reason}", flush=True)


def _read(run: Path, config: PerplexityConfig) -> dict[str, dict]:
    suite = SuiteConfig(name=REPORT.name, perplexity=config)
    dtype = "bfloat16" if torch.cuda.is_available() else "auto"
    request = EvalConfig(checkpoint=str(run), output=str(run / REPORT), dtype=dtype, suite=suite)
    return evaluate(request, progress=False)[1]["perplexity"]


def results(home: Path) -> dict[str, dict[str, Any]]:
    """What each finished run in `home` gave, by name.

    Raises:
        ValueError: there is none, or they were trained on other data, or on other numbers of tokens.
    """
    found = {name: row for name in read_models() if (row := _result(home / name)) is not None}
    if not found:
        raise ValueError(f"{home} holds no finished run: run scripts/reproduce_lm.sh first")
    for key in ("data", "tokens", "seed"):
        values = {name: row[key] for name, row in found.items()}
        if len(set(values.values())) > 1:
            listed = ", ".join(f"{name} {value}" for name, value in values.items())
            raise ValueError(f"these runs can't be compared, their {key} differ: {listed}")
    return found


def _result(run: Path) -> dict[str, Any] | None:
    """None: the run has not ended."""
    records = read_metrics(run / "metrics.jsonl")
    tested = [record for record in records if "validation_loss" in record]
    if not tested or not (run / "plan.json").is_file():
        return None
    run_plan = read_json(run / "plan.json")
    if tested[-1]["tokens"] < run_plan["tokens"]:
        return None
    training = [record for record in records if "tokens_per_second" in record]
    measured = training[len(training) // 5 :]  # the first ones compile kernels
    return {
        "data": Path(run_plan["data_folder"]).name,
        "tokens": run_plan["tokens"],
        "seed": read_yaml(run / "config.yaml")["seed"],
        "parameters": run_plan["parameters_held"],
        "loss": tested[-1]["validation_loss"],
        "bits_per_byte": tested[-1].get("validation_bits_per_byte"),
        "by_position": {
            key.removeprefix(AT): value for key, value in tested[-1].items() if key.startswith(AT)
        },
        "tokens_per_second": statistics.median(record["tokens_per_second"] for record in measured),
        "memory_gib": max(record["memory_gib"] for record in measured),
        "hardware": read_json(run / "environment.json")["hardware"],
        "curve": [[record["tokens"], record["loss"]] for record in training],
        "length": _length(run),
    }


def _length(run: Path) -> dict[str, Any]:
    """The rows of `evaluate` by length and by position, without those of single documents."""
    if not (run / REPORT / "results.json").is_file():
        return {}
    record = load_record(run / REPORT)
    (found,) = record["perplexity"].values()
    if "error" in found:
        return {}
    kept = ("length", "start", "end", "loss", "perplexity", "bits_per_byte", "documents", "sequences")
    parts = {
        part: [{key: row[key] for key in kept if key in row} for row in found[part]]
        for part in ("lengths", "positions")
    }
    return parts | {"trained_length": record["trained_length"], "data": found["data"]["fingerprint"]}


def tables(found: dict[str, dict[str, Any]]) -> list[str]:
    """Three tables in Markdown: sizes, losses and speed; perplexity by length; loss by position."""
    models, rows = read_models(), list(found.values())
    lengths = sorted({line["length"] for row in rows for line in row["length"].get("lengths", [])})
    positions = list(dict.fromkeys(key for row in rows for key in row["by_position"]))
    runs = [["model", "parameters", "validation loss", "bits per byte", "tokens/s", "GiB"]]
    by_length = [["perplexity at", *map(short, lengths)]]
    by_position = [["loss after ... tokens", *positions]]
    for name, row in found.items():
        title, bits = models[name]["title"], row["bits_per_byte"]
        at = {line["length"]: line["perplexity"] for line in row["length"].get("lengths", [])}
        losses = [row["by_position"].get(key) for key in positions]
        sizes = [f"{row['parameters']:,}", f"{row['loss']:.3f}", "-" if bits is None else f"{bits:.4f}"]
        runs.append([title, *sizes, f"{row['tokens_per_second']:,.0f}", f"{row['memory_gib']:.1f}"])
        by_length.append([title, *(fixed(at[length], 2) if length in at else "-" for length in lengths)])
        by_position.append([title, *("-" if loss is None else f"{loss:.3f}" for loss in losses)])
    return ["\n".join(_table(table)) for table in (runs, by_length, by_position)]


def markdown(found: dict[str, dict[str, Any]], home: Path, figure: str) -> str:
    """Tables, figure and notes of the runs.

    Args:
        found: what `results` returned.
        home: folder of the runs, for the reasons why others are missing.
        figure: link to the figure.
    """
    first, rows = next(iter(found.values())), list(found.values())
    hardware = "; ".join(sorted({row["hardware"] for row in rows}))
    setting = (
        f"{first['tokens']:,} tokens each, seed {first['seed']}, the same data in the same order. Hardware: "
        f"{hardware}. One seed; tokens/s are medians of `fla-train`, GiB the peak."
    )
    picture = f"![training loss, loss by position, perplexity by length]({figure})"
    notes = (textwrap.fill(f"- {note}", WIDTH, subsequent_indent="  ") for note in _notes(found, home))
    return "\n\n".join([textwrap.fill(setting, WIDTH), *tables(found), picture, "\n".join(notes)]) + "\n"


def _table(rows: Sequence[Sequence[str]]) -> list[str]:
    head, *body = (f"| {' | '.join(row)} |" for row in rows)
    return [head, f"|---{'|---:' * (len(rows[0]) - 1)}|", *body]


def _notes(found: dict[str, dict[str, Any]], home: Path) -> Iterator[str]:
    """How equal the sizes are, which models are read over short contexts only, which did not run; and why."""
    counts = {name: row["parameters"] for name, row in found.items()}
    median = statistics.median(counts.values())
    spread = max(abs(count / median - 1) for count in counts.values())
    yield f"Parameters differ from their median by {spread:.1%} at most (allowed: {TOLERANCE:.0%})."
    for name, model in read_models().items():
        for file in (UNREAD, SKIPPED):
            if (note := home / name / file).is_file():
                reason = note.read_text().strip().removeprefix("error: ").removesuffix(".")
                yield f"{model['title']} {'did not run: ' if file == SKIPPED else ''}{reason}."
        if name not in found and not (home / name / SKIPPED).is_file():
            yield f"{model['title']} has not been run."


def draw(found: dict[str, dict[str, Any]], file: Path) -> None:
    """Training loss, loss by position, perplexity by context length: a line for each run; PNG and PDF."""
    models = read_models()
    with grid(file, 1, 3, (5.2, 4.0)) as axes:
        training, by_position, by_length = axes[0]
        for number, (name, row) in enumerate(found.items()):
            style = {"color": f"C{number % 10}", "ls": "-" if number < 10 else "--", "lw": 1.2}
            training.plot(*zip(*row["curve"], strict=True), label=models[name]["title"], **style)
            lines, places = row["length"].get("lengths", []), row["length"].get("positions", [])
            middles = [(place["start"] + place["end"]) / 2 for place in places]
            by_position.plot(middles, [place["loss"] for place in places], **style)
            at = [line["length"] for line in lines], [line["perplexity"] for line in lines]
            by_length.plot(*at, marker="o", ms=3, **style)
        late = [loss for row in found.values() for _, loss in row["curve"][len(row["curve"]) // 10 :]]
        training.set(xlabel="training tokens", ylabel="training loss [nats per token]")
        training.set_ylim(min(late) * 0.97, max(late) * 1.03)
        by_position.set(xlabel="position (tokens)", ylabel="loss [nats per token]")
        by_length.set(xlabel="context length (tokens)", ylabel="perplexity up to the length", yscale="log")
        lengths = {line["length"] for row in found.values() for line in row["length"].get("lengths", [])}
        by_length.set_xscale("log", base=2)
        by_length.set_xticks(sorted(lengths), [short(length) for length in sorted(lengths)])
        for panel in (by_position, by_length):
            mark_training(panel, [row["length"] for row in found.values() if row["length"]], label=False)
        for panel in axes[0]:
            panel.grid(alpha=0.3)
        legend(axes)


def write(home: Path, page: Path) -> Path:
    """comparison.json in `home`; tables behind MARK in `page`, and figures/<page>.png beside it.

    Raises:
        ValueError: no run has ended, or runs can't be compared; `page` has no MARK.
    """
    found = results(home)
    text = page.read_text() if page.is_file() else MARK
    if MARK not in text:
        raise ValueError(f"{page} lacks the line behind which results go: {MARK.strip()}")
    figure = page.parent / "figures" / f"{page.stem}.png"
    figure.parent.mkdir(parents=True, exist_ok=True)
    (home / "comparison.json").write_text(json.dumps(found) + "\n")
    draw(found, figure)
    figure.with_suffix(".pdf").unlink()
    content = markdown(found, home, f"figures/{figure.name}")
    page.write_text(f"{text.partition(MARK)[0]}{MARK}\n{content}")
    return page


def main(arguments: Sequence[str]) -> int:
    """The command line; returns the exit code."""
    match list(arguments):
        case ["plan", *names]:
            print(*plan(names), sep="\n")
        case ["evaluate", home, *options]:
            evaluate_runs(Path(home), options)
        case ["write", home, page]:
            print(write(Path(home), Path(page)).read_text().partition(MARK)[2])
        case _:
            print(USAGE, file=sys.stderr)
            return 2
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except ValueError as error:
        sys.exit(f"error: {error}")
