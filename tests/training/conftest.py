"""A corpus, a model and run settings small enough that a run costs little more than its imports."""

import functools
import json
import random
from collections.abc import Callable, Iterator
from copy import deepcopy
from pathlib import Path

import pytest
import torch.distributed as dist
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import OverrideType
from warm_ranks import TWO_RANKS, WarmRanks

from fla_train.cli.app import compose
from fla_train.training.config import TrainConfig, register, to_config

WORDS = "the state of a linear recurrence forgets what its gate closes on and keeps what a key wrote".split()


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """300 documents of random words, as jsonl of FineWeb's shape."""
    folder = tmp_path_factory.mktemp("corpus")
    draw = random.Random(0)
    with (folder / "documents.jsonl").open("w") as file:
        for number in range(300):
            text = " ".join(draw.choices(WORDS, k=draw.randint(20, 60)))
            file.write(json.dumps({"id": f"doc-{number}", "text": text}) + "\n")
    return folder


@pytest.fixture(scope="session")
def overrides(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Hydra overrides of a run of 12 steps."""
    return [
        "data=local",
        f"data.path={corpus}",
        f"data.cache_dir={tmp_path_factory.mktemp('cache')}",
        "data.tokenizer.name=bytes",
        "data.validation_fraction=0.1",
        "model.vocab_size=320",
        "model.hidden_size=32",
        "model.num_hidden_layers=2",
        "model.num_heads=2",
        "model.head_dim=16",
        "trainer.max_steps=12",
        "trainer.seq_len=32",
        "trainer.global_batch_tokens=256",
        "trainer.micro_batch_size=2",
        "trainer.eval_every=4",
        "trainer.eval_tokens=256",
        "trainer.checkpoint_every=3",
        "trainer.check_backend=false",
        "optimizer.lr=1e-2",
        "logger=none",
    ]


@pytest.fixture(scope="session")
def make_config(overrides: list[str]) -> Callable[..., TrainConfig]:
    """`make_config("trainer.max_steps=3", ...)` composes the run's config as the command does.

    Composing needs a third of a second, so each choice of groups is composed once and keys are set in a copy.
    """
    register()
    composed = functools.cache(lambda *groups: compose("train", [*overrides, *groups]))

    def make(*more: str) -> TrainConfig:
        parsed = OverridesParser.create().parse_overrides(list(more))
        keys = [o for o in parsed if "." in o.key_or_group and o.type is OverrideType.CHANGE]
        node = deepcopy(composed(*(o.input_line for o in parsed if o not in keys)))
        ConfigLoaderImpl._apply_overrides_to_config(keys, node)
        return to_config(node)

    return make


@pytest.fixture
def alone(tmp_path: Path) -> Iterator[None]:
    """A process group of this process only."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture(scope="session")
def warm_ranks() -> Iterator[WarmRanks]:
    """Ranks whose imports are paid for: `warm_ranks.launch(config)` trains, without starting processes."""
    ranks = WarmRanks()
    yield ranks
    ranks.close()


@pytest.fixture(scope="session")
def whole(
    make_config: Callable[..., TrainConfig], warm_ranks: WarmRanks, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """A run with TWO_RANKS that nothing disturbed."""
    run = tmp_path_factory.mktemp("undisturbed") / "whole"
    warm_ranks.launch(make_config(*TWO_RANKS, f"run.dir={run}"))
    return run
