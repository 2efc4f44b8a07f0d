"""The report as one HTML file that opens from disk: tables, and plots that answer the mouse."""

import html
import json
import math
from collections.abc import Sequence
from importlib.resources import files

import numpy as np

from fla_train.eval.compare import comparison
from fla_train.eval.paper import paper_cells, published
from fla_train.eval.plots import set_title
from fla_train.eval.tables import comparison_cells, data_notes, notes, paper_heads


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
        "comparison": [[row.group, row.label, *comparison_cells(row)] for row in comparison(records)],
    }
    title = html.escape(", ".join(record["name"] for record in records))
    text = json.dumps(_short(data), allow_nan=False).replace("<", "\\u003c")  # no text may end the script
    template = (files("fla_train.eval") / "page.html").read_text(encoding="utf-8")
    return template.replace("__TITLE__", title).replace("__DATA__", text)


def _lean(record: dict) -> dict:
    """What the page shows: no single documents, histograms over all layers, and no panel whose curve is the
    beginning of the one over all positions.
    """
    record = _without(record, ("losses", "targets", "by_document"))
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


def _without(value: object, keys: Sequence[str]) -> object:
    """What JSON holds, but for the values of `keys`, however deep."""
    if isinstance(value, dict):
        return {key: _without(item, keys) for key, item in value.items() if key not in keys}
    return [_without(item, keys) for item in value] if isinstance(value, list) else value


def _short(value: object) -> object:
    """Numbers to six digits, more than the page shows of any; those that JSON lacks become null."""
    if isinstance(value, float):
        return float(f"{value:.6g}") if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: _short(item) for key, item in value.items()}
    return [_short(item) for item in value] if isinstance(value, list | tuple) else value
