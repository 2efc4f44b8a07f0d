"""Write a checkpoint again with weights of another dtype, or in another format of `fla_train.hub.formats`."""

import re
from pathlib import Path

import torch

from fla_train.hub.card import CardInfo
from fla_train.hub.checkpoint_config import config_content, one_line_errors, read_training_record
from fla_train.hub.checksums import visible_files
from fla_train.hub.export import export_model, require_apart
from fla_train.hub.formats import FORMATS, OURS, format_name
from fla_train.hub.load import load_causal_lm, load_checkpoint_tokenizer
from fla_train.hub.paths import has_tokenizer, public_name
from fla_train.models.configuration import DeltaProductConfig


def stored_format(source: Path | str) -> str:
    """Return the format of a resolved checkpoint; `hf` for models that no module of `FORMATS` translates.

    Raises:
        ValueError: its config can't be read.
    """
    with one_line_errors(source):
        return format_name(config_content(source).get("model_type")) or OURS


def convert_export(
    source: Path | str,
    folder: str | Path,
    format: str | None = None,
    *,
    dtype: torch.dtype | None = None,
    mixer: str | None = None,
) -> Path:
    """Write the model of a resolved checkpoint to `folder`, with card, training record, tokenizer and plots.

    Args:
        source: a folder or a Hub name, in any format.
        folder: the destination; an earlier export there is replaced.
        format: name of the new format; None: the stored one.
        dtype: of the weights; None: the stored one.
        mixer: import path of a custom mixer.

    Raises:
        ValueError: the format is unknown, the model is not a DeltaProduct model, one folder contains the
            other, or what `load_causal_lm` and `export_model` raise.
    """
    folder, local = Path(folder).expanduser(), isinstance(source, Path)
    if local:
        require_apart(source, folder)
    stored = stored_format(source)
    format = format or stored
    if format not in (OURS, *FORMATS):
        raise ValueError(f"format={format} is unknown: use {', '.join((OURS, *FORMATS))}")
    model = load_causal_lm(source, mixer=mixer, translate=True)
    if format != stored and not isinstance(model.config, DeltaProductConfig):
        raise ValueError(f"{source} is a {model.config.model_type}: format= needs a DeltaProduct model")
    card = CardInfo(**{"name": public_name(str(source)), **read_training_record(source)})
    tokenizer = load_checkpoint_tokenizer(source, model.config) if has_tokenizer(source) else None
    plots = [source / n for n in visible_files(source) if re.fullmatch(r"[^/]*\.png", n)] if local else ()
    dtype = dtype or model.dtype
    return export_model(model, tokenizer, folder, card, dtype=dtype, format=format, plots=plots)
