"""Export a model to a folder in the Hugging Face format, atomically, and check that it loads back."""

import copy
import json
import shutil
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from types import ModuleType

import torch
from huggingface_hub import save_torch_state_dict
from safetensors import SafetensorError
from torch import Tensor
from transformers import GenerationConfig, PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from fla_train.hub.card import PREFIX, TRAINING_FILE, CardInfo, render_card, trained_prefix
from fla_train.hub.checksums import (
    CARD,
    CHECKSUMS,
    REMEDY,
    exported_files,
    find_export_damage,
    visible_files,
    write_checksums,
)
from fla_train.hub.formats import FORMATS, OURS
from fla_train.hub.formats.read import load_reported
from fla_train.hub.remote_code import write_remote_code
from fla_train.models.build import TOKEN_IDS
from fla_train.models.configuration import DeltaProductConfig
from fla_train.utils.filesystem import replaced_folder, save_tokenizer


def export_model(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase | None,
    folder: str | Path,
    card: CardInfo | None = None,
    *,
    dtype: torch.dtype = torch.float32,
    format: str = OURS,
    plots: Iterable[Path] = (),
) -> Path:
    """Write weights, config, tokenizer, generation config, model card and checksums to `folder`.

    Everything is written to a hidden folder, loaded back, compared and then renamed, so `folder` is either
    complete or absent. The model, its mode and the random state do not change.

    Args:
        model: the module without the wrappers of accelerate or DeepSpeed.
        tokenizer: also sets special tokens that the model does not name; None writes no tokenizer and no
            generation config.
        folder: destination; an earlier export there is replaced.
        card: training facts for the model card.
        dtype: of the stored floating-point weights.
        format: `hf` for the class of `model`, or a name of `FORMATS` for a DeltaProduct model.
        plots: image files to copy and show in the card.

    Returns:
        `folder` as a path.

    Raises:
        ValueError: `folder` contains something else than an export, a setting has no counterpart in the
            format, or the loaded model differs from the written one.
        OSError: the disk is full, or the folder can't be written.
    """
    folder = Path(folder)
    _require_replaceable(folder)
    card = card or CardInfo()
    weights = _weights(model, dtype)
    translation = FORMATS.get(format)
    with replaced_folder(folder) as aside:
        config = _export_config(model, tokenizer, card, dtype)
        if tokenizer is not None:
            save_tokenizer(tokenizer, aside)
            # `save_pretrained` rejects combinations of settings that published models have.
            _generation_config(model, config).to_json_file(aside / "generation_config.json")
        stored, library = weights, None
        try:
            if translation is None:
                write_remote_code(config, aside)
                config.save_pretrained(aside)
            else:
                content, stored = translation.from_ours(config, weights)
                if (prefix := getattr(config, PREFIX, None)) is not None:
                    content[PREFIX] = prefix
                (aside / "config.json").write_text(json.dumps(content, indent=2) + "\n")
                library = (translation.PACKAGE, content["model_type"])
            save_torch_state_dict(stored, aside, metadata={"format": "pt"})
        except (SafetensorError, OSError) as error:  # a full disk, for example
            raise OSError(f"{folder} could not be written: {error}") from error
        (aside / TRAINING_FILE).write_text(json.dumps(asdict(card), indent=2) + "\n")
        images = [shutil.copyfile(plot, aside / plot.name).name for plot in plots]
        (aside / CARD).write_text(render_card(model, card, tokenizer is not None, library, images))
        # safetensors writes files that only their owner can read. Give them the mode of the other files.
        mode = (aside / TRAINING_FILE).stat().st_mode
        for file in aside.glob("*.safetensors"):
            file.chmod(mode)
        with ThreadPoolExecutor(1) as thread:
            hashing = thread.submit(write_checksums, aside)
            _load_back(model, weights, aside, dtype, translation)
            hashing.result()
    return folder


def _export_config(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None, card: CardInfo, dtype: torch.dtype
) -> PreTrainedConfig:
    """Return a copy of the model's config with class, dtype, context length and special tokens."""
    config = copy.deepcopy(model.config)
    config.architectures, config.dtype = [type(model).__name__], dtype
    # Other programs read this as the context. The model itself has no limit.
    if card.seq_len and isinstance(config, DeltaProductConfig):
        config.max_position_embeddings = card.seq_len
    if tokenizer is None:
        return config
    if (prefix := trained_prefix(vars(card), tokenizer)) is not None:
        setattr(config, PREFIX, prefix)
    eos, pad = tokenizer.eos_token_id, tokenizer.pad_token_id
    tokens = (tokenizer.bos_token_id, eos, eos if pad is None else pad)
    for name, token in zip(TOKEN_IDS, tokens, strict=True):
        if getattr(config, name, None) is None:
            setattr(config, name, token)
    return config


def _generation_config(model: PreTrainedModel, config: PreTrainedConfig) -> GenerationConfig:
    """Return a copy of the model's generation config; where it has no special tokens, those of `config`."""
    generation = copy.deepcopy(getattr(model, "generation_config", None)) or GenerationConfig()
    generation._from_model_config = False  # otherwise `generate` derives it again
    for name in TOKEN_IDS:
        if getattr(generation, name, None) is None:
            setattr(generation, name, getattr(config, name))
    return generation


def copy_export(source: Path, folder: str | Path) -> Path:
    """Copy an exported model to `folder`, complete or absent; an earlier export there is replaced.

    Hidden files are not copied. The copy gets checksums of all its files except the card, so that another
    export can replace it. File modes follow the umask, not the originals.

    Raises:
        ValueError: `folder` contains something else than an export, one folder contains the other, or
            `source` is damaged or contains a link that leaves it.
    """
    folder = Path(folder).expanduser()
    require_apart(source, folder)
    _require_replaceable(folder)
    with replaced_folder(folder) as aside:
        for name in visible_files(source):
            (aside / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(source / name, aside / name)
        if damage := find_export_damage(aside):  # damage of the source shows in its copy
            raise ValueError(f"{source}/{damage}: {REMEDY}")
        write_checksums(aside)
    return folder


def require_apart(source: Path, folder: Path) -> None:
    """Raise `ValueError` if one folder contains the other, because writing would overwrite the source."""
    new, old = folder.resolve(), source.resolve()
    if new.is_relative_to(old) or old.is_relative_to(new):
        raise ValueError(f"{folder} overlaps with the exported model {source}: give another output")


def _require_replaceable(folder: Path) -> None:
    """Raise `ValueError` if `folder` contains anything but an export of this package, which would be lost."""
    empty = not folder.exists() or (folder.is_dir() and not any(folder.iterdir()))
    files = exported_files(folder)
    if not (empty or "config.json" in files):
        raise ValueError(f"{folder} exists and is not an exported model: give another folder")
    paths = [path for path in folder.rglob("*") if path.is_symlink() or not path.is_dir()]
    if unknown := {path.relative_to(folder).as_posix() for path in paths} - {*files, CHECKSUMS, CARD}:
        names = ", ".join(sorted(unknown)[:5])
        raise ValueError(f"{folder} contains {names} next to an exported model: move it away")


def _weights(model: PreTrainedModel, dtype: torch.dtype) -> dict[str, Tensor]:
    """Copy the weights to host memory, without the tied ones.

    Tensors that are views of one buffer, such as ZeRO's, would be saved as shared weights without the copy.
    """
    in_fp32 = tuple(model._keep_in_fp32_modules_strict or ())  # decay parameters: bf16 would change the model

    def copied(name: str, tensor: Tensor) -> Tensor:
        if not tensor.is_floating_point():
            stored = tensor.dtype
        else:
            stored = torch.float32 if dtype.itemsize < 4 and name.endswith(in_fp32) else dtype
        return tensor.detach().to("cpu", stored, copy=True)

    tied = model.all_tied_weights_keys
    return {name: copied(name, t) for name, t in model.state_dict().items() if name not in tied}


@torch.no_grad()
def _load_back(
    model: PreTrainedModel,
    weights: dict[str, Tensor],
    folder: Path,
    dtype: torch.dtype,
    translation: ModuleType | None,
) -> None:
    """Check that `folder` loads with exactly these weights and computes the logits of `model`.

    Other libraries' formats are read by our translation, so that the library need not be installed. The
    device of `model` needs memory for the loaded copy and a forward pass of a few tokens.

    Raises:
        ValueError: with the names of the keys, or the difference of the logits.
    """
    device = model.get_input_embeddings().weight.device
    cuda = [device] if device.type == "cuda" else []
    mixer = getattr(model.config, "mixer", None)  # already imported for `model`
    with torch.random.fork_rng(devices=cuda):
        loaded, report = load_reported(folder, translation, dtype, mixer=mixer)
    state = loaded.state_dict()
    errors = {key: report[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys")}
    if not any(errors.values()):
        unequal = (n for n, t in weights.items() if t.dtype != state[n].dtype or not t.equal(state[n]))
        errors["different_keys"] = list(unequal)
    for error, keys in errors.items():
        if keys:
            raise ValueError(f"the export does not load back: {error} {sorted(map(str, keys))[:5]}")
    loaded = loaded.to(device).eval()
    ids = torch.arange(16, device=device).reshape(2, 8) * 7919 % model.config.vocab_size  # [B, T], scattered
    arguments = {"input_ids": ids, "use_cache": False}
    ours = isinstance(model.config, DeltaProductConfig)
    was_training, backend = model.training, model.config.backend if ours else None
    model.eval()
    try:
        if ours:  # the PyTorch operator takes head sizes and dtypes that Triton's rejects
            model.config.backend = loaded.config.backend = "chunk"
        actual = loaded(**arguments).logits.float()
        parameters = dict(loaded.named_parameters())
        expected = torch.func.functional_call(model, parameters, (), arguments).logits.float()
    finally:
        model.train(was_training)
        if ours:
            model.config.backend = backend
    # The weights are equal, so only the config can differ, or the order of a kernel's sums.
    difference = (actual - expected).abs().max().item()
    if not difference <= 1e-2 * expected.abs().max().item():
        raise ValueError(f"the export loads back but its logits differ by {difference:.3g}")
