"""Runs on a mixture with document boundaries and on a stream: what they log, and exact resume."""

import json
import math
import random
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from warm_ranks import WarmRanks

from fla_train.data.config import PartConfig
from fla_train.training.config import TrainConfig
from fla_train.utils.records import read_metrics
from tests.training.conftest import WORDS
from tests.training.test_resume import losses

Make = Callable[..., TrainConfig]


def two_parts(config: TrainConfig, corpus: Path, folder: Path) -> TrainConfig:
    """The config on a mixture: the corpus, and documents of other lengths, 3 to 1."""
    draw = random.Random(1)
    (folder / "short").mkdir(exist_ok=True)
    with (folder / "short" / "a.jsonl").open("w") as file:
        for _ in range(200):
            file.write(json.dumps({"text": " ".join(draw.choices(WORDS, k=draw.randint(1, 8)))}) + "\n")
    config.data.source, config.data.path = "mixture", None
    config.data.mixture = {
        "long": PartConfig(weight=0.75, path=str(corpus)),
        "short": PartConfig(weight=0.25, path=str(folder / "short")),
    }
    return config


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["mixture", "stream"])
def test_resumed_runs_equal_whole_ones(
    make_config: Make, warm_ranks: WarmRanks, corpus: Path, tmp_path: Path, mode: str
):
    boundaries = "data.document_boundaries=true"
    options = [boundaries] if mode == "mixture" else ["data.stream=true", "data.stream_head_documents=100"]

    def config(name: str, steps: int, *more: str, text: Path = corpus) -> TrainConfig:
        made = make_config(*options, f"run.dir={tmp_path / name}", f"trainer.max_steps={steps}", *more)
        made.data.path = str(text)
        return two_parts(made, text, text.parent) if mode == "mixture" else made

    warm_ranks.launch(config("whole", 8, "schedule=constant"))
    warm_ranks.launch(config("resumed", 4, "schedule=constant"))
    # On another machine: other folders, nothing prepared.
    moved = shutil.copytree(corpus, tmp_path / "moved" / "corpus")
    elsewhere = ["trainer.micro_batch_size=4", f"data.cache_dir={tmp_path / 'other_cache'}"]
    warm_ranks.launch(config("resumed", 8, "schedule=constant", *elsewhere, text=moved))
    whole, resumed = losses(tmp_path / "whole"), losses(tmp_path / "resumed")
    pairs = [
        (a["loss"], b["loss"])
        for a, b in zip(*([r for r in run if "loss" in r] for run in (whole, resumed)), strict=True)
    ]
    assert len(pairs) == 8
    for a, b in pairs:
        assert a == pytest.approx(b, rel=1e-5)
    last = [r for r in read_metrics(tmp_path / "whole" / "metrics.jsonl") if "validation_loss" in r][-1]
    by_context = {key for key in last if key.startswith("validation_loss_at/")}
    assert len(by_context) == 8
    if mode == "mixture":
        parts = last["validation_loss/long"], last["validation_loss/short"]
        assert last["validation_loss"] == pytest.approx(0.75 * parts[0] + 0.25 * parts[1])
        each = [last[f"validation_perplexity/{name}"] for name in ("long", "short")]
        assert each == pytest.approx([math.exp(loss) for loss in parts])
        bits = [last[f"validation_bits_per_byte/{name}"] for name in ("long", "short")]
        assert last["validation_bits_per_byte"] == pytest.approx(0.75 * bits[0] + 0.25 * bits[1])
        said = f"perplexity {last['validation_perplexity']:.2f} (long {each[0]:.2f}, short {each[1]:.2f})"
        assert said in (tmp_path / "whole" / "train.log").read_text()
