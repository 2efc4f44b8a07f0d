import shutil
from pathlib import Path

import pytest
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel, PreTrainedTokenizerBase

from fla_train.data.config import TokenizerConfig
from fla_train.data.tokenizers import load_tokenizer
from fla_train.hub.card import CardInfo
from fla_train.hub.export import export_model
from fla_train.models.configuration import DeltaProductConfig
from fla_train.models.modeling import DeltaProductForCausalLM

SIZE = {"vocab_size": 320, "hidden_size": 32, "num_hidden_layers": 2, "intermediate_size": 64}


@pytest.fixture(autouse=True)
def own_caches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Files of the Hub and the code of models are cached in the test's folder."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))
    for module in ("dynamic_module_utils", "utils.hub"):
        monkeypatch.setattr(f"transformers.{module}.HF_MODULES_CACHE", str(tmp_path / "code"))


@pytest.fixture
def tokenizer() -> PreTrainedTokenizerBase:
    return load_tokenizer(TokenizerConfig(name="bytes"))


@pytest.fixture(params=["untied", "tied", "llama"])
def model(request: pytest.FixtureRequest) -> PreTrainedModel:
    """Random weights; transformers' Llama represents models of other families."""
    if request.param == "llama":
        return LlamaForCausalLM(LlamaConfig(num_attention_heads=2, **SIZE))
    return delta_product(tie_word_embeddings=request.param == "tied")


def delta_product(**settings: object) -> DeltaProductForCausalLM:
    shape = {"num_heads": 2, "head_dim": 16, "num_householder": 2, "use_forget_gate": True}
    return DeltaProductForCausalLM(DeltaProductConfig(**SIZE, **shape, **settings))


@pytest.fixture
def small_model() -> DeltaProductForCausalLM:
    return delta_product()


@pytest.fixture(scope="session")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One export of a trained model, which tests copy."""
    folder = tmp_path_factory.mktemp("hub") / "export"
    tokenizer = load_tokenizer(TokenizerConfig(name="bytes"))
    card = CardInfo(seq_len=77, config="data: {}\n")
    return export_model(delta_product(), tokenizer, folder, card)


@pytest.fixture
def export(written: Path, tmp_path: Path) -> Path:
    return shutil.copytree(written, tmp_path / "export")


def contents(folder: Path) -> dict[str, bytes]:
    files = (file for file in folder.rglob("*") if file.is_file())
    return {file.relative_to(folder).as_posix(): file.read_bytes() for file in files}
