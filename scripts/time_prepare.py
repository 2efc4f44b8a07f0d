"""How close does `fla-prepare` come to the raw speed of `tokenizers` on all cores of this machine?

    python scripts/time_prepare.py corpus/ tokenizer/ --documents 6000 --rounds 3

Raw: `encode_batch_fast` with its own threads on texts already in memory, ids left where they are. Prepared:
reading the files, splitting, tokenizing, writing and checksumming the shards, processes started and ended.
The two take turns, so that other work on the machine disturbs both; the ratio is that of the medians. Tokens
per CPU second, of all processes together, tell what is lost where the machine is not free.
"""

import argparse
import resource
import statistics
import tempfile
import time
from itertools import islice

from fla_train.data.config import DataConfig, TokenizerConfig
from fla_train.data.prepare import prepare
from fla_train.data.sources import open_source
from fla_train.data.tokenizers import load_tokenizer
from fla_train.utils.processes import available_cores

RAW_BATCH = 512  # documents


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


def raw_rates(tokenizer_name: str, texts: list[str]) -> tuple[float, float]:
    """Tokens per second of the tokenizer alone: wall, CPU."""
    backend = load_tokenizer(TokenizerConfig(name=tokenizer_name)).backend_tokenizer
    backend.encode_special_tokens = True
    clock, tokens = Clock(), 0
    for start in range(0, len(texts), RAW_BATCH):
        encoded = backend.encode_batch_fast(texts[start : start + RAW_BATCH], add_special_tokens=False)
        tokens += sum(map(len, encoded))
    return clock.rates(tokens)


def prepared_rates(config: DataConfig) -> tuple[float, float]:
    """The same of a whole preparation into an empty cache."""
    with tempfile.TemporaryDirectory() as cache:
        config.cache_dir = cache
        clock = Clock()
        prepared = prepare(config, log=lambda line: None, progress=False)
        return clock.rates(sum(split["tokens"] for split in prepared.manifest["splits"].values()))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("corpus", help="parquet or jsonl: file, folder or glob")
    parser.add_argument("tokenizer", help="folder or Hub name")
    parser.add_argument("--documents", type=int, default=6000, help="how many to tokenize")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--workers", type=int, help="processes; default: as fla-prepare chooses")
    options = parser.parse_args()
    config = DataConfig(
        source="local",
        path=options.corpus,
        max_documents=options.documents,
        num_workers=options.workers,
        tokenizer=TokenizerConfig(name=options.tokenizer),
    )
    texts = [document["text"] for document in islice(open_source(config).documents(), options.documents)]
    size = sum(len(text.encode()) for text in texts)
    print(f"{len(texts):,} documents, {size / 1e6:.0f} MB, {available_cores()} cores")
    raw, prepared = [], []
    for number in range(options.rounds):
        raw.append(raw_rates(options.tokenizer, texts))
        prepared.append(prepared_rates(config))
        both = f"raw {raw[-1][0]:,.0f}, prepared {prepared[-1][0]:,.0f} tokens/s"
        print(f"round {number + 1}: {both}", flush=True)
    for clock, name in enumerate(("second", "CPU second")):
        ratio = statistics.median(r[clock] for r in prepared) / statistics.median(r[clock] for r in raw)
        print(f"tokens per {name}: prepared at {100 * ratio:.1f}% of raw")


if __name__ == "__main__":
    main()
