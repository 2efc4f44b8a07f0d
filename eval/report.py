"""Reports: results.json, tables, figures and one HTML page, of an evaluation or of several side by side."""

import fcntl
import html
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np

from fla_train.eval.compare import load_record
from fla_train.eval.figures import draw_figures, set_title
from fla_train.eval.paper import paper_cells, published
from fla_train.eval.tables import COMPARED, comparison_table, data_notes, latex, markdown, notes, paper_heads
from fla_train.utils.safe_files import read_json

# Values of single documents, which the page leaves out.
OF_DOCUMENTS = ("losses", "targets", "by_document", "correct")


def check_output(folder: Path) -> None:
    """Check before the work that results can be written to `folder`; nothing is created.

    Raises:
        ValueError: it cannot be written to, not be made where it should lie, or it holds files of another
            kind: a run, a checkpoint, a model.
    """
    place = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    if not place.is_dir():
        raise ValueError(f"{place} is no folder: give another output")
    if not os.access(place, os.W_OK):
        raise ValueError(f"{place} can't be written to: give another output")
    if (folder / "config.yaml").is_file() and any((folder / part).is_dir() for part in ("checkpoints", "hf")):
        raise ValueError(f"{folder} is a run folder: give a folder in it, such as output={folder}/eval/mine")
    for name, what in (("config.json", "a model"), ("manifest.json", "a checkpoint or prepared data")):
        if (folder / name).is_file():
            raise ValueError(f"{folder} holds {what}: give another output")


def check_checkpoint(folder: Path, identity: Mapping[str, Any], run: Path | None) -> None:
    """Check that results in `folder` are not those of another model, which would be written over.

    Args:
        identity: as of `evaluate_model`.
        run: the run that the checkpoint belongs to, if any: earlier exports of it may be written over.

    Raises:
        ValueError: they are.
    """
    try:
        earlier = read_json(folder / "results.json")
        name, files = earlier["checkpoint"], earlier.get("files")
    except (OSError, ValueError, KeyError, TypeError):  # there are none, or they are cut short
        return
    same_run = run is not None and Path(name).resolve().is_relative_to(run.resolve())
    if not same_run and name != identity["checkpoint"] and files != identity["files"]:
        raise ValueError(
            f"{folder} holds results of {name}, not of {identity['checkpoint']}: give another output"
        )


@contextmanager
def output_lock(folder: Path) -> Iterator[None]:
    """A block in which no other evaluation writes to `folder`, which is made if need be.

    Raises:
        ValueError: another process is in such a block.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / ".lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as failure:
            raise ValueError(
                f"another evaluation writes {folder}: wait for it or give another output"
            ) from failure
        yield  # closing the file, or dying, releases the lock


def write_report(folder: Path, record: dict) -> None:
    """Write results.json, table.md, table.tex, index.html and the figures (png and pdf) to `folder`.

    Args:
        folder: made if it does not exist; files of an earlier report are replaced.
        record: what `fla_train.eval.run.evaluate_model` collects; plain JSON.
    """
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "results.json").write_text(json.dumps(record, indent=2) + "\n")
    _write_views(folder, [record])


def write_samples(folder: Path, samples: dict[str, list[dict]]) -> None:
    """A file per task, a line per example and filter, in the order of the data set."""
    from lm_eval.utils import handle_non_serializable  # lm-eval takes seconds to import

    folder.mkdir(parents=True, exist_ok=True)
    for task, rows in samples.items():
        with (folder / f"{task}.jsonl").open("w", encoding="utf-8") as file:
            for row in sorted(rows, key=lambda row: row["doc_id"]):
                line = json.dumps(row, default=handle_non_serializable, ensure_ascii=False)
                file.write(line + "\n")


def write_comparison(folder: Path, places: Sequence[str | Path]) -> list[dict]:
    """Put finished evaluations side by side: table.md, table.tex, index.html and the figures in `folder`.

    Args:
        folder: made if it does not exist.
        places: folders of evaluations, or run folders, whose newest evaluation counts; the first is the
            reference.

    Returns:
        The evaluations' records; equal names are told apart by their places.

    Raises:
        ValueError: fewer than two places, no evaluation in one, or a folder that cannot be written to.
    """
    if len(places) < 2:
        raise ValueError("give at least two evaluations to compare")
    check_output(folder)
    records = [load_record(place) for place in places]
    names = [record["name"] for record in records]
    for record, place in zip(records, places, strict=True):
        if names.count(record["name"]) > 1:
            record["name"] = f"{record['name']} ({place})"
    with output_lock(folder):
        _write_views(folder, records)
    return records


def _write_views(folder: Path, records: Sequence[dict]) -> None:
    (folder / "table.md").write_text(markdown(records), encoding="utf-8")
    (folder / "table.tex").write_text(latex(records), encoding="utf-8")
    (folder / "index.html").write_text(page(records), encoding="utf-8")
    draw_figures(folder, records)


def page(records: Sequence[dict]) -> str:
    """`page.html` with the evaluations' results in it; needs no network and no other file."""
    heads = paper_heads(records)
    data = {
        "records": [_lean(record) for record in records],
        "titles": {name: set_title(name, records) for record in records for name in record["perplexity"]},
        "notes": notes(records),
        "footnotes": data_notes(records),
        "heads": heads,
        "cells": {
            record["name"]: dict(zip(heads, paper_cells(record, heads), strict=True)) for record in records
        },
        "published": [
            {"source": group.source, "title": group.title, "rows": group.rows} for group in published()
        ],
        "comparison": dict(zip(("header", "rows"), comparison_table(records), strict=True)),
        "compared": COMPARED,
    }
    title = html.escape(", ".join(record["name"] for record in records))
    # Six digits are enough, and JavaScript's JSON has neither infinity nor NaN; no text may end the script.
    short = json.loads(
        json.dumps(data), parse_float=lambda text: float(f"{float(text):.6g}"), parse_constant=lambda _: None
    )
    text = json.dumps(short, allow_nan=False).replace("<", "\\u003c")
    template = (files("fla_train.eval") / "page.html").read_text(encoding="utf-8")
    return template.replace("__TITLE__", title).replace("__DATA__", text)


def _lean(record: dict) -> dict:
    """The record reduced to what the page shows.

    Left out are values of single documents and panels that repeat the start of the curve over all positions;
    histograms are averaged over layers.
    """
    record = json.loads(
        json.dumps(record), object_hook=lambda d: {key: d[key] for key in d if key not in OF_DOCUMENTS}
    )
    sets = {}
    for name, result in record["perplexity"].items():
        curve, panels = result.get("positions", []), result.get("panels", {})
        others = {n: points for n, points in panels.items() if points != curve[: len(points)]}
        states = result.get("states")
        if states:
            kept = ((key, states[key]) for key in ("beta", "decay") if states[key])
            states = states | {key: np.mean(shares, 1).tolist() for key, shares in kept}
        sets[name] = result | {"panels": others, "states": states}
    return record | {"perplexity": sets}
