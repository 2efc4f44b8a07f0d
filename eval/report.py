"""The report of an evaluation, or of several side by side: one folder with everything."""

import fcntl
import json
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from fla_train.eval.compare import load_record
from fla_train.eval.figures import draw_figures
from fla_train.eval.page import page
from fla_train.eval.tables import latex, markdown


def check_output(folder: Path) -> None:
    """Look before the work whose results `folder` is to hold; nothing is made.

    Raises:
        ValueError: it cannot be written to, or not be made where it should lie.
    """
    place = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    if not place.is_dir():
        raise ValueError(f"{place} is no folder: give another output")
    if not os.access(place, os.W_OK):
        raise ValueError(f"{place} can't be written to: give another output")


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
