#!/usr/bin/env python
"""python scripts/paired_losses.py REFERENCE OTHER... --of 0:2048 0:32768 0:2048,16384:32768

Losses of evaluations less those of REFERENCE (nats per token; negative is better), document by document,
with the standard error of the mean in parentheses. All are folders that fla-eval wrote, with the same sets.

  A:B      loss per token of tokens A to B
  A:B,C:D  what tokens C to D cost more than tokens A to B: what a model loses with the length

The bounds are 0 or lengths of the evaluation (`suite.perplexity.lengths`) that all of its documents reach.
Prints a Markdown table with a column per set, and one for all documents of all sets.
"""

import argparse
import math
import sys

import numpy as np

from fla_train.eval.compare import load_record

Span = tuple[int, int]


def spans(text: str) -> list[Span]:
    """`A:B`, or two of them with a comma between."""
    found = [tuple(map(int, part.split(":"))) for part in text.split(",")]
    if len(found) > 2 or not all(len(span) == 2 and 0 <= span[0] < span[1] for span in found):
        raise ValueError(text)
    return found


def span_losses(result: dict, span: Span) -> np.ndarray:
    """Loss per token of the span, of each document [D].

    Raises:
        ValueError: a bound is no length of the evaluation, or not all documents reach it.
    """
    rows = {row["length"]: np.array(row["losses"]) for row in result["lengths"]}
    documents = len(rows[min(rows)])
    sums = {0: np.zeros(documents)} | {n: n * row for n, row in rows.items() if len(row) == documents}
    if lacking := [n for n in span if n not in sums]:
        raise ValueError(
            f"{lacking[0]} is no length that was measured and that all {documents} documents reach"
        )
    start, end = span
    return (sums[end] - sums[start]) / (end - start)


def quantity(result: dict, wanted: list[Span]) -> np.ndarray:
    """The loss of the last span, less that of the first if there are two; of each document [D]."""
    first, *rest = (span_losses(result, span) for span in wanted)
    return rest[0] - first if rest else first


def differences(record: dict, reference: dict, wanted: list[Span]) -> dict[str, np.ndarray]:
    """By set the quantity in `record` less that in `reference`, of each document [D].

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
            found[name] = quantity(mine, wanted) - quantity(result, wanted)
        except ValueError as fault:
            raise ValueError(f"{name}: {fault}") from fault
    return found


def cell(values: np.ndarray) -> str:
    """Mean and standard error; the former alone for one document."""
    error = f" ({values.std(ddof=1) / math.sqrt(len(values)):.3f})" if len(values) > 1 else ""
    return f"{values.mean():+.3f}{error}"


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
                columns = [*found.values(), np.concatenate(list(found.values()))]
                label = " less ".join(f"{start:,} to {end:,}" for start, end in reversed(wanted))
                rows.append([record["name"], label, *map(cell, columns)])
    except ValueError as fault:
        print(f"error: {fault}", file=sys.stderr)
        return 2
    heads = [f"{name} ({len(values)})" for name, values in found.items()] + [f"all ({len(columns[-1])})"]
    for row in (["", "tokens", *heads], ["---"] * (len(heads) + 2), *rows):
        print(f"| {' | '.join(row)} |")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
