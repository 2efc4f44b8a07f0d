"""How many tokens per second does one process read from prepared data in the page cache?

    python scripts/time_loader.py PREPARED_FOLDER --seq-len 2048 --micro-batch 8

Through `PrefetchLoader`, as training does it, in shuffled order: plain sequences, and packed with the bounds
of their documents. Tokens per CPU second tell what it takes where the machine is not free. The first
sequences, each of which compares a new block with its checksum, are timed apart.
"""

import argparse
import time

import numpy as np

from fla_train.data.open_dataset import open_train
from fla_train.data.sampler import BatchSampler, PackedDataset, PrefetchLoader

FIRST = 400  # sequences


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", help="what fla-prepare printed: `data: ready in FOLDER`")
    parser.add_argument("--seq-len", type=int, default=2048)
    parser.add_argument("--micro-batch", type=int, default=8)
    parser.add_argument("--seconds", type=float, default=5.0)
    options = parser.parse_args()
    dataset = open_train(options.folder, options.seq_len, seed=0)
    for name in ("first read, blocks compared", "read again"):
        used = time.process_time()
        for index in range(FIRST):
            dataset.sequences(np.array([index]))
        print(f"{name}: {1e6 * (time.process_time() - used) / FIRST:.1f} CPU us a sequence")
    plan = BatchSampler(options.micro_batch, options.micro_batch)
    for name, sequences in (("plain", dataset), ("documents", PackedDataset(dataset))):
        with PrefetchLoader(sequences, plan) as batches:
            for _ in range(len(dataset) // options.micro_batch):  # an epoch brings all into the page cache
                next(batches)
            began, used, count = time.perf_counter(), time.process_time(), 0
            while time.perf_counter() - began < options.seconds:
                next(batches)
                count += 1
            tokens = count * options.micro_batch * options.seq_len / 1e6
            wall, cpu = time.perf_counter() - began, time.process_time() - used
        print(f"{name}: {tokens / wall:.1f}M tokens/s, {tokens / cpu:.1f}M tokens per CPU second")


if __name__ == "__main__":
    main()
