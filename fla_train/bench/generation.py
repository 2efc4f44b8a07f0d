"""`fla-bench decode --model`: time and memory of `model.generate` by context and batch, beside peers.

The time of a token is what `generate` takes for `tokens` more new ones. A cache that has read the prompt is
copied for each call, so that reading it adds no noise. fla's own cache class is not copied: its model reads
the prompt in each call. Where a batch of our prompts would be more than `LONGEST` tokens, one prompt is read
and its states serve all sequences; the states of a peer grow with the context, and it reads all or has no
time.
"""

import copy
import time
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import Cache, DynamicCache, PreTrainedModel, StaticCache

from fla_train.bench.models import COMPILED, build
from fla_train.models import DeltaProductConfig
from fla_train.models.cache import CACHE_NAME
from fla_train.training.config import TrainConfig

GENERATING = ("ours", "transformer", "llama", "fla", f"transformer{COMPILED}", f"llama{COMPILED}")
LONGEST = 1 << 18  # tokens of all prompts that are read

HEADER = (
    "| model | batch | context | prompt ms | ms a token | tokens/s | GiB |",
    "|---|---|---|---|---|---|---|",
)


@dataclass(frozen=True)
class Row:
    """One model, batch and context; times are None where it cannot run."""

    model: str
    batch: int
    context: int
    prompt_milliseconds: float | None  # reading the prompt and choosing one token
    milliseconds: float | None  # of a further token of all sequences
    gibibytes: float | None  # peak of the device's memory
    error: str = ""

    def markdown(self) -> str:
        """The row of the table under `HEADER`."""
        if self.milliseconds is None:
            return f"| {self.model} | {self.batch} | {self.context} | {self.error} | | | |"
        memory = "" if self.gibibytes is None else f"{self.gibibytes:.1f}"
        return (
            f"| {self.model} | {self.batch} | {self.context} | {self.prompt_milliseconds:.0f} "
            f"| {self.milliseconds:.3f} | {1e3 * self.batch / self.milliseconds:,.0f} | {memory} |"
        )


def bench_generation(
    names: list[str],
    config: TrainConfig,
    batches: list[int],
    contexts: list[int],
    *,
    tokens: int,
    dtype: torch.dtype,
    device: torch.device,
) -> Iterator[Row]:
    """A row for each model of `GENERATING`, batch and context; one where a peer's package is absent.

    A compiled model steps by transformers' static cache and torch.compile, and reads prompts without.
    """
    config.trainer.seq_len = max(contexts) + tokens + 2  # positions of a peer
    config.model = {**config.model, "vocab_size": config.model["vocab_size"] or DeltaProductConfig.vocab_size}
    for name in names:
        torch.manual_seed(0)
        try:
            with torch.device(device):
                model = build(name.removesuffix(COMPILED), config).to(dtype).eval()
        except ImportError as absent:
            yield Row(name, batches[0], contexts[0], None, None, None, " ".join(str(absent).split()))
            continue
        for batch in batches:
            for context in contexts:
                yield _row(name, model, batch, context, tokens)
        del model


def _row(name: str, model: PreTrainedModel, batch: int, context: int, tokens: int) -> Row:
    on_gpu = model.device.type == "cuda"
    if on_gpu:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    shared = name == "ours" and batch * context > LONGEST
    if batch * context > LONGEST and not shared:
        return Row(name, batch, context, None, None, None, "more than is read")
    size = 1 if shared else batch, context + 1
    prompts = torch.randint(1, model.config.vocab_size, size, device=model.device)

    def run(ids: Tensor, new_tokens: int, cache: Cache | None) -> float:
        torch.cuda.synchronize() if on_gpu else None
        begin, given = time.perf_counter(), {} if cache is None else {CACHE_NAME: cache}
        options = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0}
        found = model.generate(ids, max_new_tokens=new_tokens, **given, **options)
        assert found.shape == (len(ids), ids.shape[1] + new_tokens)
        torch.cuda.synchronize() if on_gpu else None
        return 1e3 * (time.perf_counter() - begin)

    def read() -> tuple[float, Cache | None]:
        cache = None if name == "fla" else DynamicCache(config=model.config)
        return run(prompts[:, :-1], 1, cache), cache

    try:
        read()  # compiles
        before = torch.cuda.memory_allocated()
        prompt, cache = read()
        if shared:
            cache.reorder_cache(torch.zeros(batch, dtype=torch.long, device=model.device))
        if name.endswith(COMPILED):
            torch.compiler.reset()  # else dynamo stops compiling after some sizes
            cache = _static(cache, model, context + tokens + 2)
        peak, kept = torch.cuda.max_memory_allocated(), torch.cuda.memory_allocated() - before
        if on_gpu:
            torch.cuda.reset_peak_memory_stats()
        ids = prompts.expand(batch, -1)
        run(ids, tokens + 1, _rewound(cache, context))  # compiles and records
        few, many = (min(run(ids, n, _rewound(cache, context)) for _ in range(3)) for n in (1, tokens + 1))
    except torch.OutOfMemoryError:
        return Row(name, batch, context, None, None, None, "out of memory")
    kept = 0 if isinstance(cache, StaticCache) else kept  # the other caches ran as copies
    peak = max(peak, torch.cuda.max_memory_allocated() - kept)
    gibibytes = peak / 2**30 if on_gpu else None
    return Row(name, batch, context, prompt, max(many - few, 1e-6) / tokens, gibibytes)


def _static(cache: Cache, model: PreTrainedModel, places: int) -> StaticCache:
    """A static cache with the keys and values of another."""
    static = StaticCache(config=model.config, max_cache_len=places)
    for own, layer in zip(static.layers, cache.layers, strict=True):
        own.update(layer.keys, layer.values)
    return static


def _rewound(cache: Cache | None, context: int) -> Cache | None:
    """A cache after `context` tokens: a copy, or the same static one, whose addresses a graph has."""
    if not isinstance(cache, StaticCache):
        return copy.deepcopy(cache)
    for layer in cache.layers:
        layer.cumulative_length.fill_(context)
    return cache
