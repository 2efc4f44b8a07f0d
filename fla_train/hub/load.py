"""Find a checkpoint by run folder, export folder or Hub name, and load it."""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any, get_type_hints

import torch
from huggingface_hub import hf_hub_download
from huggingface_hub.errors import HfHubHTTPError, HFValidationError
from transformers import (
    CONFIG_MAPPING,
    AutoConfig,
    AutoTokenizer,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES
from transformers.utils import cached_file

from fla_train.hub.card import PREFIX, TRAINING_FILE, CardInfo, recorded_config
from fla_train.hub.checksums import REMEDY as EXPORT_AGAIN
from fla_train.hub.checksums import find_export_damage
from fla_train.hub.formats import FORMATS, format_name
from fla_train.hub.formats.read import load_reported
from fla_train.hub.paths import STEP
from fla_train.models.mixers.registry import MixerError
from fla_train.models.zoo.fla import import_models
from fla_train.utils.hub_names import is_hub_name
from fla_train.utils.safe_files import check_fields, read_json

FALLBACK_LENGTH = 2048
HASHED_BYTES = 1 << 24  # hashing all weights takes longer than loading them
REMEDY = "give a run folder with an export in hf/, an exported folder, or a Hub name such as user/model"


def resolve_checkpoint(checkpoint: str | Path) -> Path | str:
    """Return the folder or Hub name that `from_pretrained` loads.

    Args:
        checkpoint: a run folder (its newest `hf/step-*` is used), an exported folder, or a Hub name.

    Raises:
        ValueError: it contains no model.
    """
    path, name = Path(checkpoint).expanduser(), str(checkpoint)
    if (path / "config.json").is_file():
        return path
    if path.is_dir():
        configs = [*path.glob("hf/step-*/config.json"), *path.glob("step-*/config.json")]
        exports = {int(m[1]): x.parent for x in configs if (m := STEP.fullmatch(x.parent.name))}
        if not exports:
            raise ValueError(f"no exported model in {path}: {REMEDY}")
        return exports[max(exports)]
    if "/" in name and is_hub_name(name) and not path.parent.is_dir():
        return name
    raise ValueError(f"{name} does not exist: {REMEDY}")


def training_record(model: PreTrainedModel) -> dict:
    """Return training.json of the loaded export (fields of `CardInfo`); empty for any other model.

    Raises:
        ValueError: the file is damaged.
    """
    source = model.config.name_or_path
    return read_training_record(source, getattr(model.config, "_commit_hash", None)) if source else {}


def read_training_record(source: Path | str, commit: str | None = None) -> dict:
    """Return `training_record` of an export folder, or of a Hub name at `commit`, without unknown fields.

    A file of the same name by another program, with other fields, counts as absent.
    """
    record = Path(source) / TRAINING_FILE
    if not Path(source).is_dir():
        try:
            record = Path(hf_hub_download(source, TRAINING_FILE, revision=commit))
        except (HfHubHTTPError, HFValidationError, OSError):  # no such file, or no network
            return {}
    elif not record.is_file():
        return {}
    types = get_type_hints(CardInfo)
    content = {key: value for key, value in read_json(record).items() if key in types}
    try:
        check_fields(content, types, record)
        recorded_config(content)
    except ValueError:
        return {}
    return content if "config" in content else {}


def recorded_length(model: PreTrainedModel) -> int | None:
    """Return the tokens per training sequence from the export's record; None without a record."""
    return training_record(model).get("seq_len") or None


def trained_length(model: PreTrainedModel) -> int:
    """Return how many tokens an evaluation should read at once.

    This is `recorded_length`, else `max_position_embeddings`, else 2048. The latter two are not training
    lengths, so reports must not show them as such.
    """
    positions = getattr(model.config, "max_position_embeddings", None)
    return recorded_length(model) or positions or FALLBACK_LENGTH


def document_prefix(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Return the tokens before each document.

    These are those of training, if fla_train exported the model, else BOS, else EOS, else none.
    """
    trained = getattr(model.config, PREFIX, None)
    if trained is not None:
        return trained
    ids = [tokenizer.bos_token_id, tokenizer.eos_token_id]
    return [token for token in ids if token is not None][:1]


def load_model(
    checkpoint: str | Path,
    device: str | torch.device = "cpu",
    dtype: torch.dtype | None = None,
    *,
    mixer: str | None = None,
    trust_remote_code: bool = False,
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Load a causal language model in eval mode, and its tokenizer.

    Args:
        checkpoint: as for `resolve_checkpoint`.
        device: of the model.
        dtype: of the weights; None: the stored one.
        mixer: import path of a custom mixer, `package.module:Class`. A class that only the checkpoint names
            is imported with `trust_remote_code` alone.
        trust_remote_code: run the Python files of a model, and import the mixer that it names.

    Raises:
        ValueError: no such checkpoint, its files are missing or damaged, or it needs its own code.
    """
    source = resolve_checkpoint(checkpoint)
    model = load_weights(source, device, dtype, mixer=mixer, trust_remote_code=trust_remote_code)
    if format_name(model.config.model_type) in FORMATS and not _was_chosen(source):
        name = type(model).__name__
        line = f"{source} runs as its library's {name}; `fla-export format=hf` converts it to ours"
        warnings.warn_explicit(line, UserWarning, "fla_train", 1)
    return model, load_tokenizer(source, model.config, trust_remote_code=trust_remote_code)


def load_tokenizer(
    source: Path | str, config: PreTrainedConfig, *, trust_remote_code: bool = False
) -> PreTrainedTokenizerBase:
    """Load the tokenizer of a resolved checkpoint whose model has `config`.

    Raises:
        ValueError: it has none, or it can't be read.
    """
    try:
        with _one_line(source):
            return AutoTokenizer.from_pretrained(source, config=config, trust_remote_code=trust_remote_code)
    except ValueError as failure:
        if isinstance(source, Path) and not any(source.glob("tokenizer*")):
            raise ValueError(f"{source} has no tokenizer, which only suite=expressivity permits") from failure
        raise


def load_weights(
    checkpoint: str | Path,
    device: str | torch.device = "cpu",
    dtype: torch.dtype | None = None,
    *,
    mixer: str | None = None,
    trust_remote_code: bool = False,
    translate: bool | None = None,
) -> PreTrainedModel:
    """Load the model as `load_model` does, without a tokenizer. `translate` is for `find_translation`."""
    source = resolve_checkpoint(checkpoint)
    if isinstance(source, Path) and (damage := find_export_damage(source, hashed_bytes=HASHED_BYTES)):
        raise ValueError(f"{source}/{damage}: {EXPORT_AGAIN}")
    with _one_line(source):
        if mixer is not None and config_content(source).get("mixer") is None:
            raise MixerError(f"it has no custom mixer: leave out mixer={mixer}")
        translation = find_translation(source, translate)
        options = {"mixer": mixer, "trust_remote_code": trust_remote_code}
        model, report = load_reported(source, translation, dtype, **options)
    if report["missing_keys"]:
        raise ValueError(f"{source} lacks weights: {', '.join(sorted(report['missing_keys'])[:3])}")
    return model.to(device).eval()


def read_config(source: Path | str, *, translate: bool | None = None) -> PreTrainedConfig:
    """Return the config of the model that `load_weights` makes of a resolved checkpoint.

    Raises:
        ValueError: it can't be read.
    """
    with _one_line(source):
        if translation := find_translation(source, translate):
            config, _ = translation.to_ours(config_content(source), {})
            return config
        return AutoConfig.from_pretrained(source, trust_remote_code=False)


def config_content(source: Path | str) -> dict[str, Any]:
    """Return config.json of a resolved checkpoint.

    Raises:
        ValueError: it contains no JSON object.
        OSError: it can't be read.
    """
    return read_json(Path(cached_file(source, "config.json")))


def find_translation(source: Path | str, translate: bool | None = None) -> ModuleType | None:
    """Return the module of `FORMATS` that reads a checkpoint as a DeltaProduct model; None: its class does.

    Imports flash-linear-attention if the class belongs to it.

    Args:
        source: a resolved checkpoint.
        translate: whether to translate if possible. None: translate only model types that transformers does
            not have, unless the record says that the class was chosen for training (`model=fla/...`).

    Raises:
        ValueError: the package of the class is not installed or can't be imported.
        OSError: the config can't be read.
    """
    content = config_content(source)
    model_type = content.get("model_type")
    translation = FORMATS.get(format_name(model_type))
    if translation is not None and translate is None:
        translate = model_type not in CONFIG_MAPPING_NAMES and not _was_chosen(source)
    if translation is not None and translate:
        return translation
    if content.get("architectures") and model_type not in CONFIG_MAPPING and "auto_map" not in content:
        import_models()
    return None


def _was_chosen(source: Path | str) -> bool:
    """Return whether the training config chose the class in config.json over a DeltaProduct model."""
    return "source" in (recorded_config(read_training_record(source)).get("model") or {})


@contextmanager
def _one_line(source: Path | str) -> Iterator[None]:
    """Turn any error of a library about a checkpoint's files into a `ValueError` of one line."""
    try:
        yield
    except Exception as failure:
        raise ValueError(_explain(source, failure)) from failure


def _explain(source: Path | str, failure: Exception) -> str:
    line = next((line.strip() for line in str(failure).splitlines() if line.strip()), "")
    if not (line and isinstance(failure, OSError | ValueError | RuntimeError)):
        line = f"{type(failure).__name__}: {line}"
    if "trust_remote_code" in str(failure) and not isinstance(failure, MixerError):
        return f"{source} needs its own Python code: give trust_remote_code=true if you trust it"
    if isinstance(source, str) and isinstance(failure, OSError):
        return f"cannot load {source}: no such folder, and the Hub did not deliver it ({line})"
    if "weights_only" in str(failure):  # torch would advise to run the code
        return f"cannot load {source}: its weights are a pickle that calls code; get them as safetensors"
    return f"cannot load {source}: {line}"
