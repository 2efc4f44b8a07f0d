"""Export a model to a folder in the Hugging Face format, atomically, and check that it loads back."""

import copy
import json
import shutil
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from types import ModuleType

import torch
from huggingface_hub import save_torch_state_dict
from safetensors import SafetensorError
from torch import Tensor
from transformers import AutoModelForCausalLM, GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import logging as transformers_logging

from fla_train.hub.card import CardInfo, render_card
from fla_train.hub.checksums import (
    CHECKSUMS,
    REMEDY,
    exported_files,
    find_export_damage,
    visible_files,
    write_checksums,
)
from fla_train.hub.formats import FORMATS, OURS
from fla_train.hub.formats.read import load_translated
from fla_train.hub.prefix import PREFIX, trained_prefix
from fla_train.hub.published_card import CARD, TRAINING_FILE
from fla_train.hub.remote_code import write_remote_code
from fla_train.utils.filesystem import replaced_folder, save_tokenizer

# Files of exports, for those without checksums.json, which docs/reliability.md has one delete.
WRITTEN = (
    *("*.safetensors", "*.json", "*.py", "*.png", "*.jinja", "*.model", "merges.txt", "vocab.txt"),
    "additional_chat_templates/*.jinja",
)


def export_model(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase | None,
    folder: str | Path,
    card: CardInfo | None = None,
    *,
    state_dict: Mapping[str, Tensor] | None = None,
    dtype: torch.dtype = torch.float32,
    format: str = OURS,
    plots: Iterable[Path] = (),
    validate: bool = True,
) -> Path:
    """Write weights, config, tokenizer, generation config, model card and checksums to `folder`.

    Everything is written to a hidden folder beside it, loaded back, compared and then renamed, so `folder` is
    either complete or absent. The model, its mode and the random state do not change.

    Args:
        model: the module itself, without the wrappers of accelerate or DeepSpeed.
        tokenizer: saved along, with its special tokens where the model names none; None writes no tokenizer
            and no generation config.
        folder: destination; an earlier export there is replaced.
        card: what the model card says about training.
        state_dict: weights to write instead of the model's own (fp32 masters, say).
        dtype: floating-point weights are stored in it.
        format: transformers' for the class of `model`, or a name of `FORMATS` for a model of our family.
        plots: image files to copy there, which the card shows.
        validate: load the folder back and compare logits with the model's before the rename.

    Returns:
        `folder` as a path.

    Raises:
        ValueError: `folder` holds something that is not an export, a setting has no counterpart in the
            format, or what loads back is not what was written.
        OSError: the disk is full, or the folder can't be written.
    """
    folder = Path(folder)
    _require_replaceable(folder)
    card = card or CardInfo()
    weights = _weights(model, model.state_dict() if state_dict is None else state_dict, dtype)
    translation = FORMATS.get(format)
    with replaced_folder(folder) as aside:
        config = copy.deepcopy(model.config)
        config.architectures, config.dtype = [type(model).__name__], dtype
        if tokenizer is not None:
            save_tokenizer(tokenizer, aside)
            if (prefix := trained_prefix(vars(card), tokenizer)) is not None:
                setattr(config, PREFIX, prefix)
            generation = copy.deepcopy(getattr(model, "generation_config", None)) or GenerationConfig()
            generation._from_model_config = False  # else `generate` derives it again
            for name, token in _special_tokens(tokenizer).items():
                if getattr(config, name, None) is None:
                    setattr(config, name, token)
                if getattr(generation, name, None) is None:
                    setattr(generation, name, getattr(config, name))
            # `save_pretrained` refuses combinations of settings with which models have been published.
            generation.to_json_file(aside / "generation_config.json")
        stored, library = weights, None
        if translation is None:
            write_remote_code(config, aside)
            config.save_pretrained(aside)
        else:
            content, stored = translation.from_ours(config, weights)
            if (prefix := getattr(config, PREFIX, None)) is not None:
                content[PREFIX] = prefix
            (aside / "config.json").write_text(json.dumps(content, indent=2) + "\n")
            library = (translation.PACKAGE, content["model_type"])
        try:
            save_torch_state_dict(stored, aside, metadata={"format": "pt"})
        except SafetensorError as error:  # a full disk, say
            raise OSError(f"{folder} could not be written: {error}") from error
        (aside / TRAINING_FILE).write_text(json.dumps(asdict(card), indent=2) + "\n")
        images = [shutil.copyfile(plot, aside / plot.name).name for plot in plots]
        (aside / CARD).write_text(render_card(model, card, tokenizer is not None, library, images))
        # safetensors writes files that only their owner can read; give them the mode of the others.
        mode = (aside / TRAINING_FILE).stat().st_mode
        for file in aside.glob("*.safetensors"):
            file.chmod(mode)
        with ThreadPoolExecutor(1) as thread:
            hashing = thread.submit(write_checksums, aside)
            if validate:
                _load_back(model, weights, aside, dtype, translation)
            hashing.result()
    return folder


def copy_export(source: Path, folder: str | Path) -> Path:
    """Copy an exported model to `folder`, complete or absent; an earlier export there is replaced.

    Hidden files are left out. Checksums of the copy list all that it holds but the card, so that another
    export can replace it. The umask decides who may read the copies, whatever the originals allow.

    Raises:
        ValueError: `folder` holds something that is not an export, one of the two lies in the other, or
            `source` is damaged or holds a link that leaves it.
    """
    folder = Path(folder).expanduser()
    require_apart(source, folder)
    _require_replaceable(folder)
    with replaced_folder(folder) as aside:
        for name in visible_files(source):
            try:
                (aside / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(source / name, aside / name)
            except OSError as failure:
                raise OSError(f"{aside / name} could not be written: {failure}") from failure
        if damage := find_export_damage(aside):  # damage of the source shows in its copy
            raise ValueError(f"{source}/{damage}: {REMEDY}")
        write_checksums(aside)
    return folder


def require_apart(source: Path, folder: Path) -> None:
    """Refuse to write over the export that is read.

    Raises:
        ValueError: one of the two lies in the other.
    """
    new, old = folder.resolve(), source.resolve()
    if new.is_relative_to(old) or old.is_relative_to(new):
        raise ValueError(f"{folder} is, holds or lies in the exported model {source}: give another output")


def _require_replaceable(folder: Path) -> None:
    """Refuse a place that holds anything but an export of this package, which would be lost."""
    empty = not folder.exists() or (folder.is_dir() and not any(folder.iterdir()))
    files = exported_files(folder)
    if not (empty or "config.json" in files or (folder / TRAINING_FILE).is_file()):
        raise ValueError(f"{folder} exists and is not an exported model: give another folder")
    listed = {folder / name for name in files}
    listed = listed or {path for pattern in WRITTEN for path in folder.glob(pattern)}
    replaceable = listed | {folder / CHECKSUMS, folder / CARD}
    replaceable |= {parent for path in replaceable for parent in path.parents}
    unknown = set(folder.rglob("*")) - replaceable
    beside = (path.relative_to(folder) for path in unknown if path.parent in replaceable)
    if others := sorted(path.as_posix() for path in beside):
        raise ValueError(
            f"{folder} holds {', '.join(others)} beside an exported model: move it, or give another folder"
        )


def _weights(model: PreTrainedModel, state: Mapping[str, Tensor], dtype: torch.dtype) -> dict[str, Tensor]:
    """Copies of the weights in host memory, without the tied ones (gathered masters share no storage).

    Copies, because tensors that are views of one buffer, as ZeRO's are, would be taken for shared weights.
    """
    in_fp32 = tuple(model._keep_in_fp32_modules_strict or ())  # decay parameters: bf16 would change the model

    def copied(name: str, tensor: Tensor) -> Tensor:
        if not tensor.is_floating_point():
            kind = tensor.dtype
        else:
            kind = torch.float32 if dtype.itemsize < 4 and name.endswith(in_fp32) else dtype
        return tensor.detach().to("cpu", kind, copy=True)

    return {name: copied(name, t) for name, t in state.items() if name not in model.all_tied_weights_keys}


def _special_tokens(tokenizer: PreTrainedTokenizerBase) -> dict[str, int | None]:
    eos = tokenizer.eos_token_id
    pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else eos
    return {"bos_token_id": tokenizer.bos_token_id, "eos_token_id": eos, "pad_token_id": pad}


@contextmanager
def no_progress_bars() -> Iterator[None]:
    """Hide transformers' progress bar for loading weights."""
    shown = transformers_logging.is_progress_bar_enabled()
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            transformers_logging.enable_progress_bar()


@torch.no_grad()
def _load_back(
    model: PreTrainedModel,
    weights: dict[str, Tensor],
    folder: Path,
    dtype: torch.dtype,
    translation: ModuleType | None,
) -> None:
    """Check that `folder` loads with exactly these weights and gives the logits of `model`.

    A folder of another library's format is read by our translation, so that it needs no such library.

    The device of `model` needs room for the loaded copy and a forward of a few tokens.

    Raises:
        ValueError: with the names of the keys, or the difference of the logits.
    """
    device = model.get_input_embeddings().weight.device
    cuda = [device] if device.type == "cuda" else []
    own = getattr(model.config, "mixer", None)  # the class is that of `model`, and so may be imported
    with torch.random.fork_rng(devices=cuda), no_progress_bars():
        if translation is not None:
            loaded, report = load_translated(folder, translation, dtype)
        else:
            loaded, report = AutoModelForCausalLM.from_pretrained(
                folder,
                dtype=dtype,
                output_loading_info=True,
                trust_remote_code=False,
                **({} if own is None else {"mixer": own}),
            )
    state = loaded.state_dict()
    errors = {kind: report[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys")}
    errors["different_keys"] = [] if any(errors.values()) else _unequal(weights, state)
    for kind, keys in errors.items():
        if keys:
            raise ValueError(f"the export does not load back: {kind} {sorted(map(str, keys))[:5]}")
    loaded = loaded.to(device).eval()
    ids = torch.arange(16, device=device).reshape(2, 8) * 7919 % model.config.vocab_size  # [B, T], scattered
    arguments = {"input_ids": ids, "use_cache": False}
    found = loaded(**arguments).logits.float()
    was_training = model.training
    model.eval()
    try:
        parameters = dict(loaded.named_parameters())
        expected = torch.func.functional_call(model, parameters, (), arguments).logits.float()
    finally:
        model.train(was_training)
    # The weights are equal: only the config can differ, or the order of a kernel's sums (so a tolerance).
    difference = (found - expected).abs().max().item()
    if not difference <= 1e-2 * expected.abs().max().item():
        raise ValueError(
            f"the export loads back but its logits differ by {difference:.3g}; nothing was written"
        )


def _unequal(weights: Mapping[str, Tensor], state: Mapping[str, Tensor]) -> list[str]:
    """Names whose tensors differ in dtype or in any value."""
    return [n for n, t in weights.items() if t.dtype != state[n].dtype or not t.equal(state[n])]
