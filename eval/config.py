"""Typed settings of `fla-eval`. The YAML files configs/eval.yaml and configs/suite/ explain every key."""

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from omegaconf import MISSING

from fla_train.utils.keys import key

CHECKPOINT = "a run folder, an exported folder, or a Hub name"
DTYPES = ("auto", "float32", "bfloat16", "float64")
LAYOUTS = ("documents", "packed")
NEEDLE_TASKS = ("niah_single_1", "niah_single_2", "niah_single_3")
NEEDLE_PROMPTS = ("ruler", "continuation")
DEPTHS = (0.0, 25.0, 50.0, 75.0, 100.0)  # positions of a needle, in percent of the text


@dataclass
class PerplexityConfig:
    """Loss against context length and position, see `fla_train.eval.perplexity`."""

    sets: list[str] = field(default_factory=list)
    layout: str = key("documents", choices=LAYOUTS)
    lengths: list[int] = key(factory=lambda: [512, 1024, 2048, 4096], at_least=1, nonempty=True)
    training_length: bool = False
    panels: list[int] = key(factory=list, at_least=1)
    bucket: int | None = key(None, at_least=1)
    per_octave: int | None = key(None, at_least=1)
    documents: int | None = key(64, at_least=1)
    scan: int | None = key(20_000, at_least=1)
    text_column: str = "text"
    chunk: int = key(1024, at_least=1)
    batch_size: int = key(4, at_least=1)

    def check(self) -> Iterator[str]:
        names = [set_name(path) for path in self.sets]
        if repeated := sorted({name for name in names if names.count(name) > 1}):
            yield f"sets has several sets named {', '.join(repeated)}: rename a file"


@dataclass
class NeedleConfig:
    """Retrieval of one value from a long text, see `fla_train.eval.needle`."""

    tasks: list[str] = key(factory=lambda: [*NEEDLE_TASKS], choices=NEEDLE_TASKS, nonempty=True)
    prompts: list[str] = key(factory=lambda: [*NEEDLE_PROMPTS], choices=NEEDLE_PROMPTS, nonempty=True)
    lengths: list[int] = key(factory=lambda: [1024, 2048, 4096], at_least=1, nonempty=True)
    samples: int = key(100, at_least=1)
    depths: list[float] = key(factory=lambda: [*DEPTHS], at_least=0, at_most=100, nonempty=True)
    answer_tokens: int = key(128, at_least=1)
    essays: str | None = None
    text_column: str = "text"
    seed: int = 0
    batch_size: int = key(25, at_least=1)


@dataclass
class ExpressivityConfig:
    """Accuracy on the task that a model was trained on, see `fla_train.eval.expressivity`."""

    lengths: list[int] = key(factory=list, at_least=1)
    sequences: int = key(2048, at_least=1)
    batch_size: int = key(128, at_least=1)
    task: str | None = None


@dataclass
class SuiteConfig:
    """A suite: a perplexity sweep, needles, lm-eval tasks, or several of them; or a synthetic task's test."""

    name: str = MISSING
    perplexity: PerplexityConfig | None = None
    needle: NeedleConfig | None = None
    expressivity: ExpressivityConfig | None = None
    tasks: list[str] = field(default_factory=list)
    include_path: str | None = None
    num_fewshot: int | None = key(None, at_least=0)
    limit: int | float | None = key(None, above=0)
    batch_size: int | str = key(8, at_least=1)
    max_length: int | None = key(None, at_least=1)
    save_samples: bool = False
    gen_kwargs: Any = key(None, type=dict | None)
    apply_chat_template: bool | str = False
    system_instruction: str | None = None
    seed: int | None = None

    def check(self) -> Iterator[str]:
        scored = (self.perplexity, self.needle, *self.tasks)
        if self.expressivity is not None and any(scored):
            yield "expressivity runs alone: leave perplexity, needle and tasks empty"
        if self.expressivity is None and not any(scored):
            yield "tasks is empty: name tasks, or choose suite=perplexity"
        if self.limit is not None and self.limit > 1 and self.limit % 1:
            yield f"limit={self.limit} must be a number of examples, or a fraction of them below 1"


@dataclass
class EvalConfig:
    """Options of `fla-eval`."""

    checkpoint: str | None = key(None, required=CHECKPOINT)
    output: str | None = None
    mirror: str | None = None
    device: str = "auto"
    dtype: str = key("auto", choices=DTYPES)
    mixer: str | None = None
    trust_remote_code: bool = False
    suite: SuiteConfig = field(default_factory=SuiteConfig)


def set_name(path: str) -> str:
    """Return the name of a set of documents: folder, file without endings, or the folder of a glob."""
    place = Path(os.path.abspath(path))  # the name of `.` is that of the folder
    name = (place.parent if "*" in place.name else place).name
    return re.sub(r"(\.jsonl|\.parquet)?(\.gz)?$", "", name)
