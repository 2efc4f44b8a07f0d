"""What a run on a mixture logs."""

import json
import math
import random
from collections.abc import Callable
from pathlib import Path

import pytest
from warm_ranks import WarmRanks

from fla_train.data.config import PartConfig
from fla_train.training.config import TrainConfig
from fla_train.utils.records import read_metrics
from tests.training.conftest import WORDS

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
def test_a_mixture_logs_each_of_its_parts(
    make_config: Make, warm_ranks: WarmRanks, corpus: Path, tmp_path: Path
):
    more = ["data.document_boundaries=true", "trainer.max_steps=2", f"run.dir={tmp_path / 'run'}"]
    warm_ranks.launch(two_parts(make_config(*more), corpus, tmp_path))
    last = [r for r in read_metrics(tmp_path / "run" / "metrics.jsonl") if "validation_loss" in r][-1]
    assert len({key for key in last if key.startswith("validation_loss_at/")}) == 8
    losses, bits, perplexities = (
        [last[f"validation_{name}/{part}"] for part in ("long", "short")]
        for name in ("loss", "bits_per_byte", "perplexity")
    )
    assert last["validation_loss"] == pytest.approx(0.75 * losses[0] + 0.25 * losses[1])
    assert last["validation_bits_per_byte"] == pytest.approx(0.75 * bits[0] + 0.25 * bits[1])
    assert perplexities == pytest.approx([math.exp(loss) for loss in losses])
    line = f"(long {perplexities[0]:.2f}, short {perplexities[1]:.2f})"
    assert line in (tmp_path / "run" / "train.log").read_text()
