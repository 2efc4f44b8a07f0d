"""Python files that a model or a tokenizer brings along run only if the user asks for it."""

import builtins
import json
import os
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from fla_train.data.config import TokenizerConfig
from fla_train.data.tokenizers import load_tokenizer
from fla_train.eval.config import EvalConfig, PerplexityConfig, SuiteConfig
from fla_train.eval.run import evaluate
from fla_train.hub.export import export_model
from fla_train.hub.load import load_model

CODE = """
import os
from transformers import LlamaConfig, LlamaForCausalLM
os.mkdir({marker!r})
class OwnConfig(LlamaConfig):
    model_type = "own"
class OwnModel(LlamaForCausalLM):
    config_class = OwnConfig
"""


@pytest.fixture
def marker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """What the code would make, though the user says yes to every question."""
    monkeypatch.setattr(builtins, "input", lambda *question: "y")
    return tmp_path / "marker"


@pytest.fixture
def foreign(tokenizer, marker: Path, tmp_path: Path) -> Path:
    """A model of another architecture, whose code lies beside its weights."""
    size = {"vocab_size": 320, "hidden_size": 32, "intermediate_size": 64}
    model = LlamaForCausalLM(LlamaConfig(num_hidden_layers=1, num_attention_heads=2, **size))
    folder = export_model(model, tokenizer, tmp_path / "foreign")
    config = json.loads((folder / "config.json").read_text())
    config |= {"model_type": "own", "architectures": ["OwnModel"]}
    config["auto_map"] = {"AutoConfig": "own.OwnConfig", "AutoModelForCausalLM": "own.OwnModel"}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "own.py").write_text(CODE.format(marker=str(marker)))
    (folder / "checksums.json").unlink()  # a folder made by others has none
    return folder


def test_a_models_code_does_not_run_unasked(foreign: Path, marker: Path) -> None:
    with pytest.raises(ValueError, match=r"foreign .*trust_remote_code=true"):
        load_model(foreign)
    assert not marker.exists()


def test_a_models_code_runs_if_asked_for(foreign: Path, marker: Path) -> None:
    model, _ = load_model(foreign, trust_remote_code=True)
    assert marker.exists() and type(model).__name__ == "OwnModel"


def test_an_evaluation_imports_no_mixer_of_a_foreign_config(foreign, marker, tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(foreign)
    config = json.loads((foreign / "config.json").read_text())
    del config["auto_map"]
    config |= {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "mixer": "own:OwnModel"}
    (foreign / "config.json").write_text(json.dumps(config))
    (tmp_path / "text.jsonl").write_text('{"text": "eight bytes and more"}\n')
    suite = PerplexityConfig(lengths=[8], sets=[str(tmp_path / "text.jsonl")], bucket=8)
    evaluate(EvalConfig(str(foreign), str(tmp_path / "out"), suite=SuiteConfig("perplexity", suite)))
    assert not marker.exists()


def test_a_tokenizers_code_never_runs(foreign: Path, marker: Path) -> None:
    for name in ("tokenizer.json", "config.json"):
        (foreign / name).unlink()
    settings = {"tokenizer_class": "Own", "auto_map": {"AutoTokenizer": ["own.Own", None]}}
    (foreign / "tokenizer_config.json").write_text(json.dumps(settings))
    with pytest.raises(ValueError, match=r"data\.tokenizer\.name="):
        load_tokenizer(TokenizerConfig(name=str(foreign)))
    assert not marker.exists()


def test_weights_in_a_pickle_run_nothing(marker: Path, tmp_path: Path) -> None:
    class Payload:
        def __reduce__(self) -> tuple:
            return os.mkdir, (str(marker),)

    model = tmp_path / "pickled"
    LlamaConfig(num_hidden_layers=1, hidden_size=32, num_attention_heads=2).save_pretrained(model)
    torch.save({"lm_head.weight": Payload()}, model / "pytorch_model.bin")
    with pytest.raises(ValueError, match="cannot load"):
        load_model(model)
    assert not marker.exists()
