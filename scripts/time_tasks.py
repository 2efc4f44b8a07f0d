"""How many tokens per second do the generators of group words make, on one core and on all?

python scripts/time_tasks.py --groups S3 S5 Z60 --length 128
"""

import argparse
import os
import time
from concurrent.futures import ProcessPoolExecutor

import numpy as np

from fla_train.tasks import GroupWords

BATCH = 2048  # sequences


def tokens_per_second(group: str, length: int, seconds: float) -> float:
    """Of one process; every batch is another."""
    task = GroupWords(group, length)
    task.batch(np.arange(BATCH))
    began, count = time.perf_counter(), 0
    while time.perf_counter() - began < seconds:
        task.batch(np.arange(count * BATCH, (count + 1) * BATCH))
        count += 1
    return count * BATCH * length / (time.perf_counter() - began)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--groups", nargs="+", default=["S3", "S4", "A5", "S5", "Z60"])
    parser.add_argument("--length", type=int, default=128, help="tokens")
    parser.add_argument("--seconds", type=float, default=3.0)
    options = parser.parse_args()
    cores = len(os.sched_getaffinity(0))
    for group in options.groups:
        work = (group, options.length, options.seconds)
        alone = tokens_per_second(*work)
        with ProcessPoolExecutor(cores) as pool:
            together = sum(pool.map(tokens_per_second, *zip(*[work] * cores, strict=True)))
        print(f"{group}: {alone / 1e6:.0f} M tokens/s on one core, {together / 1e6:.0f} M on {cores}")


if __name__ == "__main__":
    main()
