"""`init_from`: continued pretraining and fine-tuning from the weights of a run, an export or the Hub."""

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import yaml

from fla_train.hub.convert import convert_export
from fla_train.hub.load import load_model
from fla_train.run.init_from import architecture, check_initial_weights
from fla_train.training.config import TrainConfig
from fla_train.training.model import build_model
from fla_train.utils.records import read_metrics

Make = Callable[..., TrainConfig]


def losses(run: Path) -> list[float]:
    return [record["loss"] for record in read_metrics(run / "metrics.jsonl") if "loss" in record]


def test_pretraining_continues_on_the_weights_of_a_run(make_config, warm_ranks, whole, tmp_path):
    """Weights of two ranks, on one; the first loss is that of the model, on the new run's first batch."""
    run = tmp_path / "run"
    more = ["trainer.precision=fp32", "launch.device=cpu", "seed=5", "trainer.max_steps=2"]
    warm_ranks.launch(make_config(f"run.dir={run}", f"init_from={whole}", *more))
    fresh = tmp_path / "fresh"
    warm_ranks.launch(make_config(f"run.dir={fresh}", *more))
    assert losses(run)[0] < losses(fresh)[0] - 1
    assert losses(run)[0] == pytest.approx(losses(whole)[-1], abs=0.3)
    assert yaml.safe_load((run / "config.yaml").read_text())["init_from"] == str(whole)
    (card,) = run.glob("hf/*/README.md")
    assert f"| initial weights | {whole.name} |" in card.read_text()


def test_a_checkpoint_of_flash_linear_attention(make_config: Make, whole: Path, tmp_path: Path):
    """The run has a model of our family, of the same architecture and weights."""
    export, theirs = next(whole.glob("hf/step-*")), str(tmp_path / "theirs")
    convert_export(export, theirs, "fla")
    assert architecture(theirs) == architecture(str(export))
    config = make_config(f"init_from={theirs}", f"data.tokenizer.name={theirs}")
    check_initial_weights(config)
    ids = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"), 1)
    model = build_model(config, SimpleNamespace(manifest={"tokenizer": ids}))
    for name, tensor in load_model(export)[0].state_dict().items():
        assert torch.equal(model.state_dict()[name], tensor), name
    with pytest.raises(ValueError, match="num_householder"):
        check_initial_weights(make_config(f"init_from={theirs}", "model.num_householder=3"))


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("model.hidden_size=64", r"model.hidden_size=64 \(init_from has 32\)"),
        ("model.num_householder=3", r"model.num_householder=3 \(init_from has 2\)"),
        ("model.vocab_size=384", r"model.vocab_size=384 \(init_from has 320\)"),
        (
            "data.tokenizer.name=bpe",
            r"another tokenizer: set data.tokenizer.name=",
        ),
    ],
)
def test_what_does_not_fit_is_one_line(make_config: Make, whole: Path, override: str, message: str):
    with pytest.raises(ValueError, match=message) as caught:
        check_initial_weights(make_config(f"init_from={whole}", override))
    assert "\n" not in str(caught.value)
