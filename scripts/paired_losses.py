#!/usr/bin/env python
"""python scripts/paired_losses.py REFERENCE OTHER... --of 0:2048 0:32768 0:2048,16384:32768

Losses of evaluations less those of REFERENCE (nats per token; negative is better), with the standard error
over documents in parentheses (a document left out at a time). All are folders that fla-eval wrote, with the
same sets.

  A:B      loss per token of tokens A to B
  A:B,C:D  what tokens C to D cost more than tokens A to B: what a model loses with the length

The bounds are 0 or lengths of the evaluation (`suite.perplexity.lengths`) that all of its documents reach.
Prints a Markdown table with a column per set, and one for all documents of all sets.
"""

import argparse
import sys

import numpy as np

from fla_train.eval.compare import load_record, loss_targets
from fla_train.eval.intervals import jackknife_error, leave_one_out

Span = tuple[int, int]


def spans(text: str) -> list[Span]:
    """`A:B`, or two of them with a comma between."""
    found = [tuple(map(int, part.split(":"))) for part in text.split(",")]
    if len(found) > 2 or not all(len(span) == 2 and 0 <= span[0] < span[1] for span in found):
        raise ValueError(text)
    return found


def span_sums(result: dict, span: Span) -> np.ndarray:
    """Summed losses and targets of the span, of each document [2, D].

    Raises:
        ValueError: a bound is no length of the evaluation, or not all documents reach it.
    """
    # A row of sequences of its own does not begin with the tokens of a shorter one.
    rows = {row["length"]: row for row in result["lengths"] if "own_sequences" not in row}
    documents = len(rows[min(rows)]["losses"])
    sums = {0: np.zeros((2, documents))}
    for n, row in rows.items():
        if len(row["losses"]) == documents:
            targets = np.array(loss_targets(row), float)
            sums[n] = np.array([row["losses"] * targets, targets])
    if lacking := [n for n in span if n not in sums]:
        raise ValueError(
            f"{lacking[0]} is no length that was measured and that all {documents} documents reach"
        )
    start, end = span
    return sums[end] - sums[start]


def differences(record: dict, reference: dict, wanted: list[Span]) -> dict[str, np.ndarray]:
    """By set and span the summed losses in `record` less those in `reference`, and the targets: [S, 2, D].

    Raises:
        ValueError: other sets or other tokens.
    """
    found = {}
    for name, result in reference["perplexity"].items():
        if "error" in result:
            continue
        mine = record["perplexity"].get(name, {})
        if mine.get("data", {}).get("fingerprint") != result["data"]["fingerprint"]:
            raise ValueError(
                f"{record['name']} and {reference['name']} did not read the same tokens of {name}"
            )
        try:
            pairs = [(span_sums(mine, span), span_sums(result, span)) for span in wanted]
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from error
        if any(a.shape != b.shape or (a[1] != b[1]).any() for a, b in pairs):
            raise ValueError(
                f"{name}: one evaluation counts by sequence, the other by document: run it again"
            )
        found[name] = np.array([(a[0] - b[0], b[1]) for a, b in pairs])
    return found


def cell(sums: np.ndarray) -> str:
    """The difference per target of the last span, less that of the first if there are two, of sums [S, 2, D].

    And its standard error, unless there is but one document.
    """
    sums = sums[:, :, sums[:, 1].any(axis=0)]  # documents that lie in no span tell nothing
    sign = [1.0] if len(sums) == 1 else [-1.0, 1.0]
    value = float(np.dot(sign, [losses.sum() / targets.sum() for losses, targets in sums]))
    if sums.shape[2] < 2:
        return f"{value:+.3f}"
    left = np.dot(sign, [leave_one_out(losses, targets) for losses, targets in sums])
    return f"{value:+.3f} ({jackknife_error(left, value):.3f})"


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("reference")
    parser.add_argument("other", nargs="+")
    parser.add_argument("--of", nargs="+", type=spans, required=True, metavar="A:B[,C:D]")
    options = parser.parse_args(arguments)
    try:
        reference, *others = (load_record(place) for place in (options.reference, *options.other))
        rows = []
        for record in others:
            for wanted in options.of:
                found = differences(record, reference, wanted)
                columns = [*found.values(), np.concatenate(list(found.values()), axis=2)]
                label = " less ".join(f"{start:,} to {end:,}" for start, end in reversed(wanted))
                rows.append([record["name"], label, *map(cell, columns)])
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    heads = [f"{name} ({sums.shape[2]})" for name, sums in (*found.items(), ("all", columns[-1]))]
    for row in (["", "tokens", *heads], ["---"] * (len(heads) + 2), *rows):
        print(f"| {' | '.join(row)} |")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
