"""`fla-bench generate`: time and memory of `model.generate` by context and batch, compared with peers.

The time per token is that of `tokens` more new tokens. A cache that holds the prompt is copied for each call,
so reading the prompt adds no noise. fla's own cache class cannot be copied, so its model reads the prompt in
each call. If the prompts of a batch exceed `MAX_PROMPT_TOKENS` together, our model reads one prompt and its
states serve all sequences. The states of a peer grow with the context, so it is not timed there.
"""

import copy
import time
from argparse import Namespace
from collections.abc import Iterator
from itertools import product

import torch
from torch import Tensor
from transformers import Cache, DynamicCache, PreTrainedModel, StaticCache

from fla_train.bench.models import COMPILED, Compose, build
from fla_train.bench.report import Report, Row
from fla_train.models.cache import CACHE_NAME
from fla_train.models.configuration import DeltaProductConfig
from fla_train.training.config import TrainConfig
from fla_train.utils.errors import described

MAX_PROMPT_TOKENS = 1 << 18

COLUMNS = ("model", "batch", "context", "prompt_ms", "token_ms", "tokens_per_second", "memory_GiB", "note")


def run(options: Namespace, report: Report, compose: Compose) -> None:
    """Measure our model and the peers for each batch and context.

    A compiled model steps with transformers' static cache under torch.compile, and reads prompts without it.
    """
    config = compose(options.overrides)
    config.trainer.seq_len = max(options.contexts) + options.new_tokens + 2  # positions of a peer
    config.model = {**config.model, "vocab_size": config.model["vocab_size"] or DeltaProductConfig.vocab_size}
    report.table("rows", COLUMNS, _rows(options, report, config))


def _rows(options: Namespace, report: Report, config: TrainConfig) -> Iterator[Row]:
    for name in ("ours", *options.peers):
        torch.manual_seed(0)
        try:
            with torch.device(report.device):
                model = build(name.removesuffix(COMPILED), config).to(report.dtype).eval()
        except ImportError as missing:
            yield {"model": name, "note": str(missing)}
            continue
        for batch, context in product(options.batch, options.contexts):
            row = {"model": name, "batch": batch, "context": context}
            yield row | _time(name, model, batch, context, options.new_tokens)
        del model


def _time(name: str, model: PreTrainedModel, batch: int, context: int, tokens: int) -> Row:
    """Measure one batch and context, with `tokens` new tokens; the row has only a note if that fails."""
    on_gpu = model.device.type == "cuda"
    synchronize = torch.cuda.synchronize if on_gpu else lambda: None
    if on_gpu:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    one_prompt = batch * context > MAX_PROMPT_TOKENS
    if one_prompt and name != "ours":
        return {"note": f"more than {MAX_PROMPT_TOKENS} tokens of prompts"}
    rows = 1 if one_prompt else batch
    prompts = torch.randint(1, model.config.vocab_size, (rows, context + 1), device=model.device)

    def run(ids: Tensor, new_tokens: int, cache: Cache | None) -> float:
        options = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0}
        options |= {} if cache is None else {CACHE_NAME: cache}
        synchronize()
        start = time.perf_counter()
        output = model.generate(ids, max_new_tokens=new_tokens, **options)
        synchronize()
        assert output.shape == (len(ids), ids.shape[1] + new_tokens)
        return 1e3 * (time.perf_counter() - start)

    def read() -> tuple[float, Cache | None]:
        cache = None if name == "fla" else DynamicCache(config=model.config)
        return run(prompts[:, :-1], 1, cache), cache

    try:
        read()  # compiles
        before = torch.cuda.memory_allocated()
        prompt_ms, cache = read()
        if one_prompt:
            cache.reorder_cache(torch.zeros(batch, dtype=torch.long, device=model.device))
        if name.endswith(COMPILED):
            torch.compiler.reset()  # dynamo stops compiling after some sizes otherwise
            cache = _static(cache, model, context + tokens + 2)
        peak, kept = torch.cuda.max_memory_allocated(), torch.cuda.memory_allocated() - before
        if on_gpu:
            torch.cuda.reset_peak_memory_stats()
        ids = prompts.expand(batch, -1)
        run(ids, tokens + 1, _rewound(cache, context))  # compiles and records
        few, many = (min(run(ids, n, _rewound(cache, context)) for _ in range(3)) for n in (1, tokens + 1))
    except Exception as failure:  # out of memory, or a class that cannot generate with such a cache
        return {"note": described(failure)[:160]}
    kept = 0 if isinstance(cache, StaticCache) else kept  # the other caches ran as copies
    token_ms = max(many - few, 1e-6) / tokens
    row = {"prompt_ms": prompt_ms, "token_ms": token_ms, "tokens_per_second": 1e3 * batch / token_ms}
    if on_gpu:
        row["memory_GiB"] = max(peak, torch.cuda.max_memory_allocated() - kept) / 2**30
    return row


def _static(cache: Cache, model: PreTrainedModel, length: int) -> StaticCache:
    """Return a static cache with the keys and values of another cache."""
    static = StaticCache(config=model.config, max_cache_len=length)
    for target, source in zip(static.layers, cache.layers, strict=True):
        target.update(source.keys, source.values)
    return static


def _rewound(cache: Cache | None, context: int) -> Cache | None:
    """Return the cache after `context` tokens: a copy, or the same static one, which a graph reads."""
    if not isinstance(cache, StaticCache):
        return copy.deepcopy(cache)
    for layer in cache.layers:
        layer.cumulative_length.fill_(context)
    return cache
