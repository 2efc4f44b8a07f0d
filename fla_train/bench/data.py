"""Time the data: reading prepared data, and preparing text beside raw `tokenizers`."""

import resource
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import islice

import numpy as np

from fla_train.data.config import DataConfig
from fla_train.data.open_dataset import open_train
from fla_train.data.prepare import prepare
from fla_train.data.sampler import BatchSampler, PackedDataset, PrefetchLoader
from fla_train.data.sources import open_source
from fla_train.data.tokenizers import load_tokenizer
from fla_train.utils.processes import available_cores

FIRST = 400  # sequences read to time the checks of block checksums
RAW_BATCH = 512  # documents that the raw tokenizer takes at once


class Clock:
    """Seconds since it was made: of the wall, and of all CPU time that this process and its children used."""

    def __init__(self) -> None:
        self._wall, self._cpu = time.perf_counter(), self._used()

    def rates(self, tokens: int) -> tuple[float, float]:
        """Tokens per second of the wall and of the CPU."""
        return tokens / (time.perf_counter() - self._wall), tokens / (self._used() - self._cpu)

    def _used(self) -> float:
        usages = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
        return sum(usage.ru_utime + usage.ru_stime for usage in usages)


def bench_loader(folder: str, seq_len: int, micro_batch: int, seconds: float) -> Iterator[str]:
    """Lines with the speed at which one process reads prepared data from the page cache, in shuffled order.

    Plain sequences, and with the bounds of their documents. The first reads, which compare each new block
    with its checksum, are timed apart.
    """
    dataset = open_train(folder, seq_len, seed=0)
    for name in ("first read, blocks compared", "read again"):
        used = time.process_time()
        for index in range(FIRST):
            dataset.sequences(np.array([index]))
        yield f"{name}: {1e6 * (time.process_time() - used) / FIRST:.1f} CPU us a sequence"
    plan = BatchSampler(micro_batch, micro_batch)
    for name, sequences in (("plain", dataset), ("documents", PackedDataset(dataset))):
        with PrefetchLoader(sequences, plan) as batches:
            for _ in range(len(dataset) // micro_batch):  # an epoch brings all into the page cache
                next(batches)
            clock, count, end = Clock(), 0, time.perf_counter() + seconds
            while time.perf_counter() < end:
                next(batches)
                count += 1
            wall, cpu = clock.rates(count * micro_batch * seq_len)
        yield f"{name}: {wall / 1e6:.1f}M tokens/s, {cpu / 1e6:.1f}M tokens per CPU second"


def bench_prepare(config: DataConfig, rounds: int) -> Iterator[str]:
    """Lines with the speed of `fla-prepare` beside that of `encode_batch_fast` on all cores of the machine.

    Raw: `encode_batch_fast` with its own threads on texts in memory, ids left where they are. Prepared:
    reading the files, splitting, tokenizing, writing and checksumming the shards, starting and ending
    processes. The two take turns, so that other work on the machine disturbs both; the ratio is that of the
    medians.
    """
    texts = [document["text"] for document in islice(open_source(config).documents(), config.max_documents)]
    size = sum(len(text.encode()) for text in texts)
    yield f"{len(texts):,} documents, {size / 1e6:.0f} MB, {available_cores()} cores"
    raw, prepared = [], []
    for number in range(rounds):
        raw.append(_raw_rates(config, texts))
        prepared.append(_prepared_rates(config))
        yield f"round {number + 1}: raw {raw[-1][0]:,.0f}, prepared {prepared[-1][0]:,.0f} tokens/s"
    for clock, name in enumerate(("second", "CPU second")):
        ratio = statistics.median(r[clock] for r in prepared) / statistics.median(r[clock] for r in raw)
        yield f"tokens per {name}: prepared at {100 * ratio:.1f}% of raw"


def _raw_rates(config: DataConfig, texts: Sequence[str]) -> tuple[float, float]:
    """Tokens per second of the tokenizer alone: wall, CPU."""
    backend = load_tokenizer(config.tokenizer).backend_tokenizer
    backend.encode_special_tokens = True
    clock, tokens = Clock(), 0
    for start in range(0, len(texts), RAW_BATCH):
        encoded = backend.encode_batch_fast(texts[start : start + RAW_BATCH], add_special_tokens=False)
        tokens += sum(map(len, encoded))
    return clock.rates(tokens)


def _prepared_rates(config: DataConfig) -> tuple[float, float]:
    """The same of a whole preparation into an empty cache."""
    with tempfile.TemporaryDirectory() as cache:
        clock = Clock()
        prepared = prepare(replace(config, cache_dir=cache), log=lambda line: None, progress=False)
        return clock.rates(sum(split["tokens"] for split in prepared.manifest["splits"].values()))
