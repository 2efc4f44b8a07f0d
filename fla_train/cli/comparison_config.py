"""`fla-runs compare FILE.yaml`: train models of equal size, each at its best learning rate, and compare them.

    base: [experiment=compare_50m, data=fineweb]  # overrides of every run
    models:                                       # name: its overrides
      Transformer++: [model=transformer/340m]
      DeltaNet: [model=delta_net/340m]
    tokens: 30_000_000                            # training tokens of each run
    learning_rates: [7.5e-4, 1.5e-3, 3e-3]
    seeds: [0, 1, 2]

docs/compare.md describes every key. Call the command again to continue an interrupted comparison.
"""

import argparse
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from fla_train.cli.overrides import one_line
from fla_train.cli.train_list import add_options
from fla_train.hub.saved_config import read_saved
from fla_train.utils.keys import key, require_valid

# Keys that the comparison sets itself, in runs on text and in runs on a task.
RESERVED = ("run.dir", "seed", "optimizer.lr", "trainer.max_tokens", "trainer.max_steps", "trainer.epochs")
TASK_RESERVED = ("run.dir", "seed")
FIRST = "first"
MULTIPLE = 16  # the MLP's width (channels) is a multiple of it


@dataclass
class SizeConfig:
    """Integer key of a model that changes its number of parameters. None: the model stays as it is."""

    field: str | None = None
    multiple: int = key(1, at_least=1)


@dataclass
class ComparedTask:
    """Synthetic task that each model is also trained on, and the key of metrics.jsonl to compare."""

    overrides: list[str]
    metric: str


@dataclass
class ComparisonConfig:
    """Content of the YAML file; docs/compare.md describes the keys."""

    models: dict[str, list[str]] = key(nonempty=True)
    tokens: int = key(at_least=1)
    learning_rates: list[float] = key(above=0, nonempty=True)
    seeds: list[int] = key(factory=lambda: [0, 1, 2], at_least=0, nonempty=True)
    base: list[str] = field(default_factory=list)
    parameters: int | str | None = key(FIRST, at_least=1, word=FIRST)
    sizes: dict[str, SizeConfig] = field(default_factory=dict)
    tasks: dict[str, ComparedTask] = field(default_factory=dict)
    suites: dict[str, list[str]] = field(default_factory=dict)
    jobs: int = key(1, at_least=1)

    def check(self) -> Iterator[str]:
        for name in ("learning_rates", "seeds"):
            if len(set(getattr(self, name))) < len(getattr(self, name)):
                yield f"{name} has a value twice"
        if unknown := [name for name in self.sizes if name not in self.models]:
            yield f"sizes.{unknown[0]}: the models are {', '.join(self.models)}"
        lists = [("base", self.base, RESERVED)]
        lists += [(name, texts, RESERVED) for name, texts in self.models.items()]
        lists += [(name, task.overrides, TASK_RESERVED) for name, task in self.tasks.items()]
        for name, texts, reserved in lists:
            if not re.fullmatch(r"[^./][^/]*", name):
                yield f"{name} is the name of a folder: it can't have a slash or begin with a dot"
            if conflicting := [text for text in texts if text.lstrip("+").partition("=")[0] in reserved]:
                yield f"{name}: leave out {', '.join(conflicting)}, which the comparison sets"


def build_parser() -> argparse.ArgumentParser:
    """Return the command's options."""
    parser = argparse.ArgumentParser(
        prog="fla-runs compare",
        description="Train models of equal size, each at its best learning rate, and compare them over "
        "seeds. Call the command again to continue an interrupted comparison.",
    )
    parser.add_argument("file", type=Path, metavar="FILE.yaml", help="models, tokens, learning rates, seeds")
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="more overrides for the base")
    add_options(parser)
    return parser


def read_comparison(file: Path, overrides: Sequence[str] = ()) -> ComparisonConfig:
    """Read a comparison, and add overrides to its base.

    Raises:
        ValueError: names the keys of the file that do not fit.
    """
    try:
        node = OmegaConf.merge(OmegaConf.structured(ComparisonConfig), read_saved(file))
        config = OmegaConf.to_object(node)
    except OmegaConfBaseException as error:
        name = f"{error.full_key}: " if error.full_key else ""
        raise ValueError(f"{file}: {name}{one_line(error)} (docs/compare.md describes the keys)") from error
    config.base += overrides
    require_valid(config, f"{file}: ")
    return config
