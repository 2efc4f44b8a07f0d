"""`fla-bench decode --model`: time and memory of `model.generate` by context and batch, beside peers.

The time of a token is what `generate` takes for `tokens` more new ones. Every model reads the whole prompt by
its own `generate`. Where a batch of our prompts would be more than `LONGEST` tokens, one prompt is read and
its states serve all sequences; the states of a peer grow with the context, and it reads all or has no time.
"""

import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from transformers import DynamicCache, PreTrainedModel

from fla_train.bench.models import COMPILED, build
from fla_train.models import DeltaProductConfig
from fla_train.training.config import TrainConfig

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
    """A row for each model of `bench.models.NAMES`, batch and context.

    A compiled model runs by transformers' static cache and torch.compile of the step.
    """
    config.trainer.seq_len = max(contexts) + tokens + 1  # positions of a peer
    config.model = {**config.model, "vocab_size": config.model["vocab_size"] or DeltaProductConfig.vocab_size}
    for name in names:
        torch.manual_seed(0)
        with torch.device(device):
            model = build(name.removesuffix(COMPILED), config).to(dtype).eval()
        for batch in batches:
            for context in contexts:
                yield _row(name, model, batch, context, tokens)
        del model


def _row(name: str, model: PreTrainedModel, batch: int, context: int, tokens: int) -> Row:
    on_gpu = model.device.type == "cuda"
    if on_gpu:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    options: dict[str, Any] = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    if name.endswith(COMPILED):
        options["cache_implementation"] = "static"
    shared = name == "ours" and batch * context > LONGEST
    if batch * context > LONGEST and not shared:
        return Row(name, batch, context, None, None, None, "more than is read")
    prompts = torch.randint(
        1, model.config.vocab_size, (1 if shared else batch, context), device=model.device
    )

    def run(new_tokens: int) -> float:
        torch.cuda.synchronize() if on_gpu else None
        begin, ids, given = time.perf_counter(), prompts, {}
        if shared:
            cache = DynamicCache(config=model.config)
            model.generate(prompts[:, :-1], past_key_values=cache, max_new_tokens=1, **options)
            cache.reorder_cache(torch.zeros(batch, dtype=torch.long, device=model.device))
            ids, given = prompts.expand(batch, -1), {"past_key_values": cache}
        found = model.generate(ids, max_new_tokens=new_tokens, **given, **options)
        assert found.shape == (batch, context + new_tokens)
        torch.cuda.synchronize() if on_gpu else None
        return 1e3 * (time.perf_counter() - begin)

    try:
        run(tokens + 1)  # compiles and records
        few, many = (min(run(n) for _ in range(3)) for n in (1, tokens + 1))
    except torch.OutOfMemoryError:
        return Row(name, batch, context, None, None, None, "out of memory")
    gibibytes = torch.cuda.max_memory_allocated() / 2**30 if on_gpu else None
    return Row(name, batch, context, few, max(many - few, 1e-6) / tokens, gibibytes)
