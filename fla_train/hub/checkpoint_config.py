"""Find a checkpoint by run folder, export folder or Hub name, and read its config and training record.

This imports no models, because the launcher of a run reads the config of `init_from`. It imports transformers
only for checkpoints of other libraries or on the Hub.
"""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, get_type_hints

from fla_train.hub.card import TRAINING_FILE, CardInfo, recorded_config
from fla_train.hub.paths import STEP
from fla_train.models.settings import FIELDS, DeltaProductSettings
from fla_train.utils.errors import MixerError
from fla_train.utils.hub_names import hub_or_cache, is_hub_name, read_error
from fla_train.utils.safe_files import check_fields, read_json

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

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


def read_training_record(source: Path | str, commit: str | None = None) -> dict:
    """Return `training_record` of an export folder, or of a Hub name at `commit`, without unknown fields.

    A file of the same name by another program, with other fields, counts as absent.
    """
    try:
        record = _file(source, TRAINING_FILE, commit)
    except OSError:  # no such file, or no network
        return {}
    types = get_type_hints(CardInfo)
    content = {key: value for key, value in read_json(record).items() if key in types}
    try:
        check_fields(content, types, record)
        recorded_config(content)
    except ValueError:
        return {}
    return content if "config" in content else {}


def read_config(
    source: Path | str, *, translate: bool | None = None
) -> "DeltaProductSettings | PreTrainedConfig":
    """Return the settings of the model that `load_causal_lm` makes of a resolved checkpoint.

    Raises:
        ValueError: it can't be read.
    """
    with one_line_errors(source):
        content = config_content(source)
        if content.get("model_type") == DeltaProductSettings.model_type:
            return DeltaProductSettings(**{name: content[name] for name in FIELDS if name in content})
        if translation := find_translation(source, translate):
            config, _ = translation.to_ours(content, {})
            return config
        from transformers import AutoConfig

        import fla_train.models.auto_config  # noqa: F401  registers the configs

        return AutoConfig.from_pretrained(source, trust_remote_code=False)


def config_content(source: Path | str) -> dict[str, Any]:
    """Return config.json of a resolved checkpoint.

    Raises:
        ValueError: it contains no JSON object.
        OSError: it can't be read.
    """
    return read_json(_file(source, "config.json"))


def _file(source: Path | str, name: str, commit: str | None = None) -> Path:
    """Return the path of a checkpoint's file. Raises `OSError` without the file or the network."""
    if Path(source).is_dir():  # a config may name a folder as a string
        if not Path(source, name).is_file():
            raise FileNotFoundError(f"{source} has no {name}")
        return Path(source, name)
    from transformers.utils import cached_file

    with hub_or_cache():
        return Path(cached_file(source, name, revision=commit))


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
    from transformers import CONFIG_MAPPING
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

    from fla_train.hub.formats import FORMATS, format_name
    from fla_train.models.zoo.fla import import_models

    content = config_content(source)
    model_type = content.get("model_type")
    translation = FORMATS.get(format_name(model_type))
    if translation is not None and translate is None:
        translate = model_type not in CONFIG_MAPPING_NAMES and not class_was_chosen(source)
    if translation is not None and translate:
        return translation
    if content.get("architectures") and model_type not in CONFIG_MAPPING and "auto_map" not in content:
        import_models()
    return None


def class_was_chosen(source: Path | str) -> bool:
    """Return whether the training config chose the class in config.json over a DeltaProduct model."""
    return "source" in (recorded_config(read_training_record(source)).get("model") or {})


@contextmanager
def one_line_errors(source: Path | str) -> Iterator[None]:
    """Turn any error of a library about a checkpoint's files into a `ValueError` of one line.

    Raises:
        Interrupted: the Hub can't be reached.
    """
    try:
        with nullcontext() if isinstance(source, Path) else hub_or_cache():
            yield
    except Exception as failure:
        raise read_error(failure, _explain(source, failure)) from failure


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
