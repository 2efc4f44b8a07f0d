"""The alias `baseline=`: names of other architectures at the width and depth of our family's `model` node.

Runs of earlier versions, and commands like theirs, have a section `baseline` beside `model`.
`without_baseline` turns the two into the `model` node that builds the same model (`fla_train.models.build`).
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

SIZES = ("hidden_size", "num_hidden_layers")  # what a baseline takes over from `model`, with its vocabulary


@dataclass
class BaselineConfig:
    """Hydra's schema of the group `baseline`."""

    kind: str
    num_heads: int
    allow_neg_eigval: bool = False


def _llama(width: int, heads: int) -> dict[str, Any]:
    attention = {"num_attention_heads": heads, "num_key_value_heads": heads}
    return {**attention, "intermediate_size": 4 * width, "max_position_embeddings": 2048}


def _mamba2(width: int, heads: int) -> dict[str, Any]:
    sizes = {"num_heads": heads, "head_dim": 2 * width // heads, "expand": 2}
    return {**sizes, "n_groups": 1, "state_size": 64, "chunk_size": 64}


def _xlstm(width: int, heads: int) -> dict[str, Any]:
    return {"num_heads": heads, "mode": "inference", "autocast_kernel_dtype": "float32"}


# Source, model type, and the fields that follow from width and heads
KINDS: dict[str, tuple[str, str, Callable[[int, int], dict[str, Any]]]] = {
    "llama": ("hf", "llama", _llama),
    "mamba": ("fla_train", "signed_mamba", lambda width, heads: {}),
    "mamba2": ("hf", "mamba2", _mamba2),
    "mlstm": ("hf", "xlstm", _xlstm),
    "gla": ("fla", "gla", lambda width, heads: {"num_heads": heads}),
    "retnet": ("fla", "retnet", lambda width, heads: {"num_heads": heads}),
    "rwkv7": ("fla", "rwkv7", lambda width, heads: {"num_heads": heads, "head_dim": width // heads}),
}


def without_baseline(config: Mapping[str, Any]) -> dict[str, Any]:
    """The content of a config.yaml, or a composed config, with its baseline as its model.

    Raises:
        ValueError: a setting of the baseline cannot work.
    """
    config = dict(config)
    if (given := config.pop("baseline", None)) is None:
        return config
    baseline, model = BaselineConfig(**given), config["model"]
    kind, heads, width = baseline.kind, baseline.num_heads, model.get("hidden_size")
    if "source" in model:
        raise ValueError(f"baseline={kind} and model={model['model_type']} are two models: give one")
    if kind not in KINDS:
        raise ValueError(f"baseline.kind={kind} is none of {', '.join(KINDS)}")
    if baseline.allow_neg_eigval and kind != "mamba":
        raise ValueError(f"baseline.allow_neg_eigval has no effect on {kind}: only on mamba")
    if heads < 1 or width % (2 * heads):
        raise ValueError(
            f"baseline.num_heads={heads} must give an even model.hidden_size / num_heads ({width})"
        )
    source, model_type, fields = KINDS[kind]
    settings = {key: model[key] for key in SIZES} | fields(width, heads)
    if kind == "mamba":
        settings["allow_neg_eigval"] = baseline.allow_neg_eigval
    node = {"source": source, "model_type": model_type, "config": settings}
    return config | {"model": node | {"vocab_size": model["vocab_size"]}}


def new_name(baseline: Mapping[str, Any]) -> str:
    """What to write in place of a baseline, but for its sizes."""
    source, model_type, _ = KINDS[baseline["kind"]]
    if source != "fla_train":
        return f"model={source}/{model_type}/tiny"
    eigenvalues = "" if baseline["allow_neg_eigval"] else " model.config.allow_neg_eigval=false"
    return f"model=mamba_signed/tiny{eigenvalues}"


def ignored_overrides(overrides: Sequence[str]) -> list[str]:
    """The keys of our family among Hydra's `overrides` that no other model reads.

    Only the user's overrides count: recipes set all keys, for our family. `model.head_dim` is allowed,
    because tables set it along with `model.hidden_size` for all their rows.
    """
    keys = [text.split("=", 1)[0].lstrip("+~") for text in overrides]
    read = [f"model.{name}" for name in (*SIZES, "vocab_size", "head_dim", "source", "model_type", "config")]
    return [k for k in keys if k.startswith("model.") and k not in read and not k.startswith("model.config.")]
