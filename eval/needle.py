"""Retrieval over length: generate the answers of needle-in-a-haystack prompts and count the right ones.

A task's accuracy at a length is the share of answers that contain the value, upper and lower case alike:
RULER's `string_match_all` for one value.
"""

import hashlib
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict

import numpy as np
from tqdm import tqdm
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from fla_train.data.files import describe_files, find_files
from fla_train.eval.config import NeedleConfig
from fla_train.eval.halves import in_halves
from fla_train.eval.haystack import TASKS, Haystack, Sample, load_haystack, make_samples
from fla_train.eval.intervals import Mean, proportion_interval
from fla_train.eval.likelihood import position_limit
from fla_train.eval.parallel import Ranks
from fla_train.eval.result_cache import ResultCache
from fla_train.hub.generate import continue_tokens
from fla_train.hub.load import document_prefix

EXAMPLE = 160  # characters at the end of a prompt that results.json shows


def run_needle(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    config: NeedleConfig,
    *,
    cache: ResultCache,
    progress: bool,
) -> dict[str, dict]:
    """Accuracy of each of `config.tasks` with each prompt at each length.

    Args:
        model: in eval mode.
        tokenizer: of the model.
        config: what to ask, and how.
        cache: keeps what has finished, each length on its own; its ranks share the samples.
        progress: show progress bars.

    Returns:
        By task, by prompt a row for each length: `length`, `accuracy`, `stderr`, `low`, `high` (Wilson's
        95% interval), `samples`, `depths` (the accuracy by percent), `prompt_tokens` (their mean), `correct`
        (1 or 0 of each sample), `fingerprint` of the prompts and `example` (the first sample's answer); or
        `{"error": line}` for a task that cannot be asked; the others go on. Lengths beyond a model's table of
        positions are left out.

    Raises:
        ValueError: all lengths are beyond that table.
    """
    limit = position_limit(model)
    if limit is not None and min(config.lengths) > limit:
        raise ValueError(f"the model has positions for {limit:,} tokens only: lower suite.needle.lengths")
    found = {}
    for name in config.tasks:
        try:
            with cache.ranks.together():
                found[name] = _run_task(model, tokenizer, config, name, limit, cache, progress)
        except ValueError as failure:
            found[name] = {"error": str(failure)}
    return found


def _run_task(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    config: NeedleConfig,
    name: str,
    limit: int | None,
    cache: ResultCache,
    progress: bool,
) -> dict[str, list[dict]]:
    noise = TASKS[name].noise
    settings = asdict(config)
    for key in ("tasks", "prompts", "lengths", "batch_size", *(("essays", "text_column") if noise else ())):
        del settings[key]
    if config.essays and not noise:
        with suppress(ValueError, OSError):  # whoever reads them says what is wrong
            settings["files"] = describe_files(find_files(config.essays))
    haystack: Haystack | None = None  # made once, and only if something is asked

    def ask(prompt: str, length: int) -> dict:
        nonlocal haystack
        if haystack is None:
            haystack = load_haystack(TASKS[name], config.essays, config.text_column, tokenizer)
        ranks = cache.ranks
        samples = make_samples(
            *(name, haystack, tokenizer),
            prompt=prompt,
            length=length,
            answer_tokens=config.answer_tokens,
            numbers=range(ranks.rank, config.samples, ranks.world),
            depths=config.depths,
            seed=config.seed,
            prefix=document_prefix(model, tokenizer),
        )
        label = f"{name}, {prompt}, {length:,} tokens"
        answers = _answers(model, tokenizer, samples, config, tqdm(desc=label, disable=not progress))
        return _row(length, samples, answers, ranks)

    return {
        prompt: [
            cache(f"needle-{name}-{prompt}-{n}", settings, lambda prompt=prompt, n=n: ask(prompt, n))
            for n in sorted(config.lengths)
            if limit is None or n <= limit
        ]
        for prompt in config.prompts
    }


def _answers(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    samples: Sequence[Sample],
    config: NeedleConfig,
    bar: tqdm,
) -> list[str]:
    """What the model generates after each prompt."""
    remedy = "the GPU's memory is too small for a prompt: lower suite.needle.lengths"

    def generate(batch: Sequence[Sample]) -> list[list[int]]:
        rows = [sample.tokens for sample in batch]
        return continue_tokens(model, tokenizer, rows, max_new_tokens=config.answer_tokens)

    found: list[str] = []
    with bar:
        bar.total = len(samples)
        for start in range(0, len(samples), config.batch_size):
            batch = samples[start : start + config.batch_size]
            answers = in_halves(generate, batch, remedy)
            found += [tokenizer.decode(tokens, skip_special_tokens=True) for tokens in answers]
            bar.update(len(batch))
    return found


def is_right(answer: str, value: str) -> bool:
    """Whether the answer contains the value."""
    return value.lower() in answer.lower()


def _row(length: int, samples: Sequence[Sample], answers: Sequence[str], ranks: Ranks) -> dict:
    """Numbers of a length over the samples of all ranks, of which each has every so many-th."""
    mine = [
        (
            is_right(answer, sample.value),
            sample.depth,
            len(sample.tokens),
            hashlib.sha256(f"{sample.prompt}\0{sample.value}".encode()).hexdigest(),
            {"asked": sample.prompt[-EXAMPLE:], "value": sample.value, "answer": answer},
        )
        for sample, answer in zip(samples, answers, strict=True)
    ]
    parts = ranks.gather(mine)
    outcomes = [part[i] for i in range(len(parts[0])) for part in parts if i < len(part)]
    *numbers, digests, examples = zip(*outcomes, strict=True)
    right, depths, tokens = (np.array(values, float) for values in numbers)
    mean = Mean.of(right, np.ones_like(right))
    low, high = proportion_interval(int(right.sum()), len(right))
    return {
        "length": length,
        "accuracy": mean.value,
        "stderr": mean.stderr,
        "low": low,
        "high": high,
        "samples": len(right),
        "depths": {f"{depth:g}": float(right[depths == depth].mean()) for depth in np.unique(depths)},
        "prompt_tokens": round(float(tokens.mean()), 1),
        "correct": right.astype(int).tolist(),
        "fingerprint": hashlib.sha256("".join(digests).encode()).hexdigest(),
        "example": examples[0],
    }
