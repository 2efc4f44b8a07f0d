"""Typed settings of `fla-eval`. The YAML files configs/eval.yaml and configs/suite/ explain every key."""

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from omegaconf import MISSING

LAYOUTS = ("documents", "packed")
NEEDLE_TASKS = ("niah_single_1", "niah_single_2", "niah_single_3")
NEEDLE_PROMPTS = ("ruler", "question", "continuation")
ENDINGS = (".gz", ".parquet", ".jsonl")  # of files of documents, the last one first


@dataclass
class PerplexityConfig:
    """Loss against context length and position, see `fla_train.eval.perplexity`."""

    sets: list[str] = field(default_factory=list)
    layout: str = "documents"
    lengths: list[int] = field(default_factory=lambda: [512, 1024, 2048, 4096])
    training_length: bool = False
    panels: list[int] = field(default_factory=list)
    bucket: int | None = None
    per_octave: int | None = None
    documents: int | None = 64
    scan: int | None = 20_000
    text_column: str = "text"
    chunk: int = 1024
    batch_size: int = 4
    state_documents: int = 0
    remembrance_documents: int = 0


@dataclass
class NeedleConfig:
    """Retrieval of one value from a long text, see `fla_train.eval.needle`."""

    tasks: list[str] = field(default_factory=lambda: list(NEEDLE_TASKS))
    prompts: list[str] = field(default_factory=lambda: ["ruler", "continuation"])
    lengths: list[int] = field(default_factory=lambda: [1024, 2048, 4096])
    samples: int = 100
    depths: list[float] = field(default_factory=lambda: [0.0, 25.0, 50.0, 75.0, 100.0])
    answer_tokens: int = 128
    essays: str | None = None
    text_column: str = "text"
    seed: int = 0
    batch_size: int = 25


@dataclass
class ExpressivityConfig:
    """Accuracy on the task a model was trained on, and its transitions; see `fla_train.eval.expressivity`."""

    lengths: list[int] = field(default_factory=list)
    sequences: int = 2048
    batch_size: int = 128
    contexts: int = 64
    task: str | None = None


@dataclass
class SuiteConfig:
    """What to run: a perplexity sweep, needles, lm-eval tasks, or several; or a synthetic task's test."""

    name: str = MISSING
    perplexity: PerplexityConfig | None = None
    needle: NeedleConfig | None = None
    expressivity: ExpressivityConfig | None = None
    tasks: list[str] = field(default_factory=list)
    include_path: str | None = None
    num_fewshot: int | None = None
    limit: int | float | None = None
    batch_size: str = "8"  # a number, or auto
    max_length: int | None = None
    save_samples: bool = False
    gen_kwargs: Any = None  # a mapping; Hydra would take no new keys into one that is typed so
    apply_chat_template: bool | str = False
    system_instruction: str | None = None
    seed: int | None = None


@dataclass
class EvalConfig:
    """What `fla-eval` takes."""

    checkpoint: str | None = None
    output: str | None = None
    mirror: str | None = None
    device: str = "auto"
    dtype: str = "auto"
    mixer: str | None = None
    trust_remote_code: bool = False
    suite: SuiteConfig = field(default_factory=SuiteConfig)


def set_name(path: str) -> str:
    """What a set of documents is called: its folder, its file without endings, or the folder of a glob."""
    place = Path(os.path.abspath(path))  # the name of `.` is that of the folder
    name = (place.parent if "*" in place.name else place).name
    for ending in ENDINGS:
        name = name.removesuffix(ending)
    return name


def validation_errors(suite: SuiteConfig) -> list[str]:
    """Every setting that cannot work, one line each; empty when all is well."""
    errors = []
    if suite.expressivity is not None:
        return _expressivity_errors(suite)
    if suite.perplexity is None and suite.needle is None and not suite.tasks:
        errors.append("the suite is empty: give suite.tasks=[...] or choose suite=perplexity")
    if suite.batch_size != "auto" and not (suite.batch_size.isdigit() and int(suite.batch_size) > 0):
        errors.append(f"suite.batch_size={suite.batch_size} must be an integer of at least 1, or auto")
    for key, least in (("num_fewshot", 0), ("max_length", 1)):
        value = getattr(suite, key)
        if value is not None and value < least:
            errors.append(f"suite.{key}={value} must be at least {least}")
    if not isinstance(suite.gen_kwargs, dict | None):
        errors.append(
            f"suite.gen_kwargs={suite.gen_kwargs} must be a mapping: {{max_gen_toks:64,do_sample:true}}"
        )
    if suite.limit is not None and (suite.limit <= 0 or (suite.limit > 1 and suite.limit % 1)):
        errors.append(
            f"suite.limit={suite.limit} must be a number of examples, or a fraction below 1 of them"
        )
    if suite.perplexity is not None:
        errors += _perplexity_errors(suite.perplexity)
    return errors + (_needle_errors(suite.needle) if suite.needle is not None else [])


def _expressivity_errors(suite: SuiteConfig) -> list[str]:
    config = suite.expressivity
    errors = [
        f"suite.expressivity.{key}={value} must be at least 1"
        for key in ("sequences", "batch_size", "contexts")
        if (value := getattr(config, key)) < 1
    ]
    if any(length < 1 for length in config.lengths):
        errors.append("suite.expressivity.lengths must hold integers of at least 1")
    if suite.perplexity is not None or suite.needle is not None or suite.tasks:
        errors.append("suite.expressivity runs alone: leave the other parts of the suite empty")
    return errors


def _perplexity_errors(config: PerplexityConfig) -> list[str]:
    errors = []
    for key in ("bucket", "per_octave", "documents", "scan", "chunk", "batch_size"):
        value = getattr(config, key)
        if value is not None and value < 1:
            errors.append(f"suite.perplexity.{key}={value} must be at least 1")
    for key in ("state_documents", "remembrance_documents"):
        if (value := getattr(config, key)) < 0:
            errors.append(f"suite.perplexity.{key}={value} must be at least 0")
    if config.layout not in LAYOUTS:
        errors.append(f"suite.perplexity.layout={config.layout} is none of {', '.join(LAYOUTS)}")
    names = [set_name(path) for path in config.sets]
    if repeated := sorted({name for name in names if names.count(name) > 1}):
        errors.append(f"suite.perplexity.sets has several sets named {', '.join(repeated)}: rename a file")
    if not config.lengths or min(config.lengths) < 1:
        errors.append("suite.perplexity.lengths must hold integers of at least 1")
    if min(config.panels, default=1) < 1:
        errors.append("suite.perplexity.panels must hold integers of at least 1")
    return errors


def _needle_errors(config: NeedleConfig) -> list[str]:
    errors = [
        f"suite.needle.{key}={value} must be at least 1"
        for key in ("samples", "answer_tokens", "batch_size")
        if (value := getattr(config, key)) < 1
    ]
    for key, known in (("tasks", NEEDLE_TASKS), ("prompts", NEEDLE_PROMPTS)):
        if not (given := getattr(config, key)) or not set(given) <= set(known):
            errors.append(f"suite.needle.{key} must name some of {', '.join(known)}")
    if not config.lengths or min(config.lengths) < 1:
        errors.append("suite.needle.lengths must hold integers of at least 1")
    if not config.depths or not all(0 <= depth <= 100 for depth in config.depths):
        errors.append("suite.needle.depths must hold percentages from 0 to 100")
    return errors
