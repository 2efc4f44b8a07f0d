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
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

import fla_train.models  # noqa: F401  registers the model with the Auto classes
from fla_train.hub.card import CardInfo
from fla_train.hub.checksums import CHECKSUMS, find_export_damage
from fla_train.hub.checksums import REMEDY as EXPORT_AGAIN
from fla_train.hub.export import no_progress_bars
from fla_train.hub.formats import FORMATS, format_name
from fla_train.hub.formats.errors import FormatError
from fla_train.hub.formats.read import load_translated
from fla_train.hub.paths import STEP
from fla_train.hub.prefix import PREFIX, recorded_config, trained_prefix
from fla_train.hub.published_card import TRAINING_FILE
from fla_train.models.mixers.registry import MixerError
from fla_train.models.zoo.fla import import_models
from fla_train.utils.hub_names import is_hub_name
from fla_train.utils.safe_files import check_fields, read_json

FALLBACK_LENGTH = 2048
HASHED_BYTES = 1 << 24  # hashing all weights takes longer than loading them
REMEDY = "give a run folder with an export in hf/, an exported folder, or a Hub name such as user/model"


def resolve_checkpoint(checkpoint: str | Path) -> Path | str:
    """The folder (or Hub name) that `from_pretrained` should load.

    Args:
        checkpoint: a run folder (its newest `hf/step-*` is taken), an exported folder, or a Hub name.

    Raises:
        ValueError: nothing loadable is there; says what to give instead.
    """
    path, name = Path(checkpoint).expanduser(), str(checkpoint)
    if (path / "config.json").is_file():
        return path
    if path.is_dir():
        exports = {int(m[1]): p for p in _exports(path) if (m := STEP.fullmatch(p.name))}
        if not exports:
            raise ValueError(f"no exported model in {path}: {REMEDY}")
        return exports[max(exports)]
    if "/" in name and is_hub_name(name) and not path.parent.is_dir():
        return name
    raise ValueError(f"{name} does not exist: {REMEDY}")


def _exports(folder: Path) -> list[Path]:
    return [
        p
        for pattern in ("hf/step-*", "step-*")
        for p in folder.glob(pattern)
        if (p / "config.json").is_file()
    ]


def training_record(model: PreTrainedModel) -> dict:
    """The content of training.json of the loaded export (fields of `CardInfo`); empty for any other model.

    Raises:
        ValueError: the file is damaged.
    """
    source = model.config.name_or_path
    return read_training_record(source, getattr(model.config, "_commit_hash", None)) if source else {}


def read_training_record(source: Path | str, commit: str | None = None) -> dict:
    """`training_record` of an export folder or a Hub name, at `commit` if given.

    A file of the same name that another program wrote, in another form, is no record.
    """
    record = Path(source) / TRAINING_FILE
    if not Path(source).is_dir():
        try:
            record = Path(hf_hub_download(source, TRAINING_FILE, revision=commit))
        except (HfHubHTTPError, HFValidationError, OSError):  # no such file, or the Hub can't be reached
            return {}
    elif not record.is_file():
        return {}
    content, types = read_json(record), get_type_hints(CardInfo)
    try:
        check_fields({key: content[key] for key in content.keys() & types.keys()}, types, record)
        recorded_config(content)
    except ValueError:
        return {}
    return content if "config" in content else {}


def recorded_length(model: PreTrainedModel) -> int | None:
    """Tokens per training sequence according to the export's record; None without a record."""
    return training_record(model).get("seq_len") or None


def trained_length(model: PreTrainedModel) -> int:
    """Tokens to read at once of a task: `recorded_length`, else `max_position_embeddings`, else 2048.

    The latter two are no training lengths; reports do not call them so.
    """
    positions = getattr(model.config, "max_position_embeddings", None)
    return recorded_length(model) or positions or FALLBACK_LENGTH


def document_prefix(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """The token that stands before a document: at most one.

    That of models trained here is in their config, which others' ways of saving keep, or follows from their
    record (`trained_prefix`). Others get BOS, else EOS.
    """
    found = trained_prefix_of(model, tokenizer)
    if found is not None:
        return found
    ids = [tokenizer.bos_token_id, tokenizer.eos_token_id]
    return [token for token in ids if token is not None][:1]


def trained_prefix_of(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> list[int] | None:
    """The tokens that stood before documents when the model was trained here; None: it was not."""
    kept = getattr(model.config, PREFIX, None)
    return trained_prefix(training_record(model), tokenizer) if kept is None else kept


def load_model(
    checkpoint: str | Path,
    device: str | torch.device = "cpu",
    dtype: torch.dtype | None = None,
    *,
    mixer: str | None = None,
    trust_remote_code: bool = False,
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Load a causal language model, in eval mode, and its tokenizer.

    Args:
        checkpoint: what `resolve_checkpoint` takes.
        device: where to put the model.
        dtype: of the weights; None keeps the stored one.
        mixer: import path of the model's mixer, `package.module:Class`; without it, or `trust_remote_code`,
            a class that only the checkpoint names is not imported.
        trust_remote_code: run the Python files that come with a model, import the mixer that it names.

    Raises:
        ValueError: no such checkpoint, its files are missing or damaged, or it needs code that comes with it.
    """
    source = resolve_checkpoint(checkpoint)
    model = load_weights(source, device, dtype, mixer=mixer, trust_remote_code=trust_remote_code)
    if format_name(model.config.model_type) in FORMATS and not _was_chosen(source):
        name = type(model).__name__
        line = f"{source} runs by its own library's {name}; fla-export format=hf makes a model of ours of it"
        warnings.warn_explicit(line, UserWarning, "fla_train", 1)
    return model, load_tokenizer(source, model.config, trust_remote_code=trust_remote_code)


def load_tokenizer(
    source: Path | str, config: PreTrainedConfig, *, trust_remote_code: bool = False
) -> PreTrainedTokenizerBase:
    """The tokenizer of a resolved checkpoint whose model has `config`.

    Raises:
        ValueError: there is none, or it can't be read.
    """
    try:
        with _one_line(source):
            return AutoTokenizer.from_pretrained(source, config=config, trust_remote_code=trust_remote_code)
    except ValueError as failure:
        if isinstance(source, Path) and not any(source.glob("tokenizer*")):
            raise ValueError(
                f"{source} has no tokenizer: a model of a synthetic task takes suite=expressivity, any other "
                "needs its tokenizer saved there"
            ) from failure
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
    """`load_model` without the tokenizer, which models of synthetic tasks do not have.

    `translate` is that of `find_translation`.
    """
    source = resolve_checkpoint(checkpoint)
    if isinstance(source, Path) and (source / CHECKSUMS).is_file():
        if damage := find_export_damage(source, hashed_bytes=HASHED_BYTES):
            raise ValueError(f"{source}/{damage}: {EXPORT_AGAIN}")
    with _one_line(source):
        if mixer is not None and config_content(source).get("mixer") is None:
            raise MixerError(f"it has no mixer of its own: leave out mixer={mixer}")
        translation = find_translation(source, translate)
        with no_progress_bars():
            if translation is not None:
                model, report = load_translated(source, translation, dtype)
            else:
                model, report = AutoModelForCausalLM.from_pretrained(
                    source,
                    dtype=dtype or "auto",
                    output_loading_info=True,
                    trust_remote_code=trust_remote_code,
                    **({} if mixer is None else {"mixer": mixer}),
                )
    if report["missing_keys"]:
        raise ValueError(
            f"{source} lacks weights: {', '.join(sorted(report['missing_keys'])[:3])}: export it again"
        )
    return model.to(device).eval()


def read_config(source: Path | str, *, translate: bool | None = None) -> PreTrainedConfig:
    """The config of the model that `load_weights` makes of a resolved checkpoint.

    Raises:
        ValueError: it can't be read.
    """
    with _one_line(source):
        if translation := find_translation(source, translate):
            config, _ = translation.to_ours(config_content(source), {})
            return config
        return AutoConfig.from_pretrained(source, trust_remote_code=False)


def config_content(source: Path | str) -> dict[str, Any]:
    """config.json of a resolved checkpoint.

    Raises:
        ValueError: it holds no JSON object.
        OSError: it can't be read.
    """
    try:
        content, _ = PreTrainedConfig.get_config_dict(source)
    except TypeError:  # a number, say
        content = None
    if not isinstance(content, dict):
        raise ValueError(f"{source}/config.json is damaged (no JSON object): export or download it again")
    return content


def find_translation(source: Path | str, translate: bool | None = None) -> ModuleType | None:
    """The module of `FORMATS` that reads a checkpoint as a model of our family; None: its own class does.

    Imports flash-linear-attention if that is the class's package.

    Args:
        source: a resolved checkpoint.
        translate: whether to translate what can be translated. None: only a model type that is not one of
            transformers, unless its record says that the class was chosen for training (`model=fla/...`).

    Raises:
        ValueError: the class's package is not installed, or does not work here.
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
    """Whether a run here trained the class that config.json names, instead of a model of our family."""
    return "source" in (recorded_config(read_training_record(source)).get("model") or {})


@contextmanager
def _one_line(source: Path | str) -> Iterator[None]:
    """Turn whatever a library raises for a checkpoint's files into one line.

    Raises:
        ValueError: with the checkpoint and the library's first line.
    """
    try:
        yield
    except (KeyboardInterrupt, SystemExit):
        raise
    except (MixerError, FormatError) as failure:
        raise ValueError(f"{source}: {failure}") from failure
    except BaseException as failure:  # a panic of a library in Rust is no Exception
        raise ValueError(_explain(source, failure)) from failure


def _explain(source: Path | str, failure: BaseException) -> str:
    """One line for a checkpoint that does not load; names the weights file that is cut short, if one is."""
    if "trust_remote_code" in str(failure):
        return f"{source} needs Python code that it brings along: give trust_remote_code=true if you trust it"
    if isinstance(source, str) and isinstance(failure, OSError):
        return (
            f"cannot load {source}: no such folder here, and the Hub did not give it ({_first_line(failure)})"
        )
    if isinstance(source, Path) and (damage := find_export_damage(source)):
        return f"{source}/{damage}: {EXPORT_AGAIN}"
    if "weights_only" in str(failure):  # torch advises to run the code
        return f"cannot load {source}: its weights are a pickle that calls code; get them as safetensors"
    return f"cannot load {source}: {_first_line(failure)}"


def _first_line(failure: BaseException) -> str:
    line = next((line.strip() for line in str(failure).splitlines() if line.strip()), "")
    known = isinstance(failure, OSError | ValueError | RuntimeError) and line
    return line if known else f"{type(failure).__name__}: {line}"
