"""Load a checkpoint by its class, or one of another library's format as a DeltaProduct model."""

from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from huggingface_hub import load_state_dict_from_file, snapshot_download
from torch import Tensor
from transformers import AutoModelForCausalLM, GenerationConfig, PreTrainedConfig, PreTrainedModel
from transformers.utils import logging

import fla_train.models.auto  # noqa: F401  registers the models
from fla_train.hub.card import PREFIX
from fla_train.models.modeling import DeltaProductForCausalLM
from fla_train.utils.safe_files import read_json

WEIGHT_FILES = ("model.safetensors", "pytorch_model.bin")  # in order of preference; both may be sharded


def load_reported(
    source: Path | str,
    translation: ModuleType | None,
    dtype: torch.dtype | None = None,
    *,
    mixer: str | None = None,
    trust_remote_code: bool = False,
) -> tuple[PreTrainedModel, dict[str, Any]]:
    """Return the model of the checkpoint `source`, and transformers' report of missing weights.

    Args:
        source: a folder or a Hub name.
        translation: the module of `FORMATS` that reads it; None: its class does.
        dtype: of the weights; None: the stored one.
        mixer, trust_remote_code: as for `load_model`.

    Raises:
        ValueError, OSError, RuntimeError: config or weights can't be read, or do not match, or one of them
            has no counterpart.
    """
    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        if translation is not None:
            return _load_translated(source, translation, dtype)
        return AutoModelForCausalLM.from_pretrained(
            source,
            dtype=dtype or "auto",
            output_loading_info=True,
            trust_remote_code=trust_remote_code,
            **({} if mixer is None else {"mixer": mixer}),
        )
    finally:
        if shown:
            logging.enable_progress_bar()


def _load_translated(
    source: Path | str, translation: ModuleType, dtype: torch.dtype | None
) -> tuple[DeltaProductForCausalLM, dict[str, Any]]:
    content, _ = PreTrainedConfig.get_config_dict(source)
    folder, weights = _read_weights(source)
    prefix = content.pop(PREFIX, None)
    config, state = translation.to_ours(content, weights)
    if prefix is not None:
        setattr(config, PREFIX, prefix)
    model, report = DeltaProductForCausalLM.from_pretrained(
        None,
        config=config,
        state_dict=state,
        dtype=dtype or config.dtype or "auto",
        output_loading_info=True,
        ignore_mismatched_sizes=True,  # reported below
    )
    if wrong := sorted({*report["unexpected_keys"], *(key for key, *_ in report["mismatched_keys"])}):
        raise ValueError(f"its weights {', '.join(wrong[:3])} do not fit {type(model).__name__}")
    model.config.name_or_path, model.config._commit_hash = str(source), content.get("_commit_hash")
    if (folder / "generation_config.json").is_file():
        model.generation_config = GenerationConfig.from_pretrained(folder)
    return model, report


def _read_weights(source: Path | str) -> tuple[Path, dict[str, Tensor]]:
    """Return the folder of the weights, downloaded for a Hub name, and all tensors."""
    for name in WEIGHT_FILES:
        patterns = [f"{Path(name).stem}*", "generation_config.json"]
        folder = Path(source if Path(source).is_dir() else snapshot_download(source, allow_patterns=patterns))
        index = folder / f"{name}.index.json"
        files = sorted({*read_json(index)["weight_map"].values()}) if index.is_file() else [name]
        if (folder / files[0]).is_file():
            # `safe=False` permits pickles; with `weights_only` they run no code.
            options = {"map_location": "cpu", "weights_only": True, "safe": False}
            parts = [load_state_dict_from_file(folder / file, **options) for file in files]
            return folder, {key: tensor for part in parts for key, tensor in part.items()}
    raise OSError(f"no weights: neither {' nor '.join(WEIGHT_FILES)} exists")
