"""Other libraries' models through the whole trainer: packed text, exports, `init_from`."""

from collections.abc import Callable
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM
from warm_ranks import TWO_RANKS

from fla_train.cli.app import compose
from fla_train.cli.base import with_base
from fla_train.hub.load import load_model
from fla_train.run.init_from import check_initial_weights
from fla_train.run.resolve import resolve
from fla_train.training.config import TrainConfig, load_config, to_config
from fla_train.utils.records import read_metrics

Make = Callable[..., TrainConfig]
SMALL = ["model.config.hidden_size=32", "trainer.max_steps=4", "trainer.checkpoint_every=2"]
NAMES = {
    "hf/llama/tiny": ["model.config.num_hidden_layers=2"],
    "hf/qwen3_next/tiny": ["model.config.num_hidden_layers=2", "+model.config.full_attention_interval=2"],
    "mamba_signed/tiny": ["model.config.num_hidden_layers=2"],
}


@pytest.fixture(scope="module")
def make(make_config: Make, overrides: list[str]) -> Make:
    """`make("model=hf/llama/tiny", ...)` composes a run without settings of our family."""
    general = [text for text in overrides if not text.startswith("model.")]
    return lambda *more: to_config(compose("train", [*general, "trainer.log_every=1", *more]))


def losses(run: Path) -> list[float]:
    return [record["loss"] for record in read_metrics(run / "metrics.jsonl") if "loss" in record]


@pytest.mark.parametrize("name", NAMES)
def test_a_run_is_exported_and_continued(make, warm_ranks, tmp_path, name):
    settings = [f"model={name}", *NAMES[name], *SMALL, "trainer.activation_checkpointing=true"]
    settings += ["schedule=constant", "schedule.min_ratio=1"]  # the same rate whatever the run's end
    whole = tmp_path / "whole"
    warm_ranks.launch(make(*settings, f"run.dir={whole}"))
    again = compose("train", with_base([f"run.dir={whole}", "trainer.max_steps=6"]))
    assert to_config(again).model == load_config(whole / "config.yaml").model
    AutoModelForCausalLM.from_pretrained(whole / "hf" / "step-0000004")

    with pytest.raises(ValueError, match="mixer=package:Class"):
        load_model(whole, mixer="package:Class")
    model, tokenizer = load_model(whole)
    ids = tokenizer("the state", return_tensors="pt")
    assert model.generate(**ids, max_new_tokens=3, do_sample=False).shape[1] == ids["input_ids"].shape[1] + 3
    card = (whole / "hf" / "step-0000004" / "README.md").read_text()
    assert ("trust_remote_code" in card.split("```python")[1].split("```")[0]) is (
        name == "mamba_signed/tiny"
    )

    check_initial_weights(make(f"init_from={whole}", *settings))
    with pytest.raises(ValueError, match=r"model\.config\.hidden_size=64"):
        check_initial_weights(make(f"init_from={whole}", *settings, "model.config.hidden_size=64"))


def test_documents_of_a_packed_row_are_kept_apart_or_refused(make, warm_ranks, tmp_path):
    packed = [*SMALL, "data.document_boundaries=true", "trainer.max_steps=1", *TWO_RANKS]
    warm_ranks.launch(make("model=hf/llama/tiny", *packed, f"run.dir={tmp_path / 'run'}"))
    assert losses(tmp_path / "run")
    with pytest.raises(ValueError, match="mamba2"):
        resolve(make("model=hf/mamba2/tiny", "data.document_boundaries=true"))
