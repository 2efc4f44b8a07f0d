#!/usr/bin/env python
"""python scripts/check_interval_coverage.py [EVALUATION...] [--draws 10000] [--seed 0]

How often the 95% intervals that `fla-eval` reports hold the true mean loss.

A population of documents is made up, or taken from finished evaluations: the documents behind the longest
length of each of their sets. n documents are drawn from it with replacement, their interval is computed by
the code of the report (`fla_train.eval.intervals`), and compared with the population's loss per token. Beside
it stands what the linearised error with a normal quantile, or with Student's t for n - 1, would have covered.
Ends with exit status 1 if intervals of 16 documents or more cover less than 93%.
"""

import argparse
import math
import sys
from collections.abc import Iterator

import numpy as np
from scipy.special import stdtrit

from fla_train.eval.compare import load_record, loss_targets
from fla_train.eval.intervals import Mean

SIZES = (2, 3, 5, 8, 16, 32, 64, 128, 512)  # documents of a draw
FROM, LEAST = 16, 0.93  # documents from which so much must be covered
POPULATION = 100_000  # documents of a made-up population


def made_up(draw: np.random.Generator, skewed: bool, equal: bool) -> tuple[np.ndarray, np.ndarray]:
    """Mean loss (nats per token) and tokens of each document."""
    size = np.full(POPULATION, 2048.0)
    if not equal:
        size = np.clip(np.exp(draw.normal(math.log(450), 1.1, POPULATION)), 16, 60_000).round()
    spread = (draw.gamma(4.0, 0.5, POPULATION) - 2.0) if skewed else draw.normal(size=POPULATION)
    loss = 3.0 + 0.45 * spread - 0.15 * (np.log(size) - math.log(450))
    return loss + 3.9 * draw.normal(size=POPULATION) / np.sqrt(size), size


def populations(places: list[str], draw: np.random.Generator) -> Iterator[tuple[str, np.ndarray, np.ndarray]]:
    """Name, mean loss and tokens of each document, of every population asked for."""
    law = (
        "document effect of standard deviation 0.45 nats ({}), -0.15 nats per e-fold of length, tokens of "
        "2.6 nats with 2.25 times the variance of independent ones"
    )
    lengths = "lognormal lengths (median 450 tokens, sigma 1.1, 16 to 60,000)"
    for place in places:
        for name, result in load_record(place)["perplexity"].items():
            if "error" not in result:
                row = result["lengths"][-1]
                targets = np.array(loss_targets(row), float)
                counted = targets > 0
                text = f"{place}, {name}: {counted.sum():,} documents of the first {row['length']:,} tokens"
                yield text, np.array(row["losses"])[counted], targets[counted]
    if not places:
        yield f"made up: {lengths}, {law.format('normal')}", *made_up(draw, False, False)
        yield f"made up: {lengths}, {law.format('gamma, skewness 1')}", *made_up(draw, True, False)
        yield f"made up: 2,048 tokens each, {law.format('gamma, skewness 1')}", *made_up(draw, True, True)


def covered(losses: np.ndarray, tokens: np.ndarray, truth: float) -> tuple[bool, bool, bool, float]:
    """Whether the reported interval holds the truth, whether two others would, and its width."""
    mean = Mean.of(losses * tokens, tokens)
    low, high = mean.interval
    count, residuals = len(tokens), (losses - mean.value) * tokens
    error = math.sqrt(count / (count - 1) * (residuals**2).sum()) / tokens.sum()
    off = abs(mean.value - truth)
    plain = off <= float(stdtrit(count - 1, 0.975)) * error
    return low <= truth <= high, plain, off <= 1.96 * error, high - low


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("evaluations", nargs="*", metavar="EVALUATION")
    parser.add_argument("--draws", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    draw = np.random.default_rng(options.seed)
    good = True
    for name, losses, tokens in populations(options.evaluations, draw):
        truth = float((losses * tokens).sum() / tokens.sum())
        print(f"Population: {name}; mean {truth:.4f} nats per token.")
        print(f"Resampling: n documents with replacement, {options.draws:,} times, seed {options.seed}.\n")
        print("| documents | reported interval | median width | t of n - 1, linearised | 1.96, linearised |")
        print("|---:|---:|---:|---:|---:|", flush=True)
        for count in SIZES:
            chosen = draw.integers(0, len(losses), (options.draws, count))
            found = [covered(losses[row], tokens[row], truth) for row in chosen]
            own, plain, normal = (np.mean([row[i] for row in found]) for i in range(3))
            width = np.median([row[3] for row in found])
            print(f"| {count} | {own:.1%} | {width:.3f} | {plain:.1%} | {normal:.1%} |", flush=True)
            good &= count < FROM or own >= LEAST
        print()
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
