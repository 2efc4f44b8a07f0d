"""Build a baseline, another architecture by name, at the sizes of a `model` node."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # models take seconds to import: each function imports its own
    from transformers import PreTrainedModel

FLA = "flash-linear-attention"
MODEL_KEYS = ("vocab_size", "hidden_size", "num_hidden_layers")  # what a baseline takes over from `model`


@dataclass
class BaselineConfig:
    """The architecture that replaces `model` at its sizes. Hydra's schema of the group `baseline`."""

    kind: str
    num_heads: int
    allow_neg_eigval: bool = False


Build = Callable[[dict[str, Any], BaselineConfig], "PreTrainedModel"]  # of the sizes as a config takes them


def _llama(sizes: dict[str, Any], config: BaselineConfig) -> "PreTrainedModel":
    from transformers import LlamaConfig, LlamaForCausalLM

    settings = LlamaConfig(
        **sizes,
        num_attention_heads=config.num_heads,
        num_key_value_heads=config.num_heads,
        intermediate_size=4 * sizes["hidden_size"],
        max_position_embeddings=2048,
    )
    return LlamaForCausalLM(settings)


def _mamba(sizes: dict[str, Any], config: BaselineConfig) -> "PreTrainedModel":
    from fla_train.models.zoo.mamba import SignedMambaConfig, SignedMambaForCausalLM

    del sizes["use_cache"]
    return SignedMambaForCausalLM(SignedMambaConfig(**sizes, allow_neg_eigval=config.allow_neg_eigval))


def _mamba2(sizes: dict[str, Any], config: BaselineConfig) -> "PreTrainedModel":
    from transformers import Mamba2Config, Mamba2ForCausalLM

    heads = {"num_heads": config.num_heads, "head_dim": 2 * sizes["hidden_size"] // config.num_heads}
    settings = Mamba2Config(**sizes, **heads, expand=2, n_groups=1, state_size=64, chunk_size=64)
    return Mamba2ForCausalLM(settings)


def _mlstm(sizes: dict[str, Any], config: BaselineConfig) -> "PreTrainedModel":
    """xLSTM with matrix memories only.

    Of transformers' modes only "inference" takes sequences of any length; it has gradients, too.
    """
    from transformers import xLSTMConfig, xLSTMForCausalLM

    options = {"mode": "inference", "autocast_kernel_dtype": "float32"}
    return xLSTMForCausalLM(xLSTMConfig(**sizes, num_heads=config.num_heads, **options))


def _from_fla(name: str) -> Build:
    """A model of the optional package flash-linear-attention, whose kernels need a GPU."""

    def build(sizes: dict[str, Any], config: BaselineConfig) -> "PreTrainedModel":
        try:
            models = import_module("fla.models")
        except Exception as failure:  # anything, with a torch or triton that it was not made for
            if isinstance(failure, ModuleNotFoundError) and failure.name == "fla":
                raise ValueError(f"baseline {name} needs the package {FLA}: pip install {FLA}") from None
            cause = f"{type(failure).__name__}: {failure}"
            raise ValueError(
                f"baseline {name}: {FLA} is installed and can't be imported ({cause})"
            ) from failure
        heads = {"num_heads": config.num_heads}
        if name == "RWKV7":
            heads["head_dim"] = sizes["hidden_size"] // config.num_heads
        settings = getattr(models, f"{name}Config")(**sizes, **heads)
        return getattr(models, f"{name}ForCausalLM")(settings)

    return build


KINDS: dict[str, Build] = {
    "llama": _llama,
    "mamba": _mamba,
    "mamba2": _mamba2,
    "mlstm": _mlstm,
    "gla": _from_fla("GLA"),
    "retnet": _from_fla("RetNet"),
    "rwkv7": _from_fla("RWKV7"),
}


def baseline_errors(config: BaselineConfig, model: Mapping[str, Any]) -> list[str]:
    """One line for each setting that cannot work."""
    if config.kind not in KINDS:
        return [f"baseline.kind={config.kind} is none of {', '.join(KINDS)}"]
    errors = []
    if config.allow_neg_eigval and config.kind != "mamba":
        errors.append(f"baseline.allow_neg_eigval has no effect on {config.kind}: only on mamba")
    heads = config.num_heads
    if heads < 1 or model["hidden_size"] % (2 * heads):
        errors.append(
            f"baseline.num_heads={heads} must give an even model.hidden_size / num_heads "
            f"({model['hidden_size']})"
        )
    return errors


def ignored_overrides(overrides: Sequence[str]) -> list[str]:
    """The keys of `model` among Hydra's `overrides` that no baseline reads.

    Only the user's overrides count: experiments set all keys, for our models. `model.head_dim` is allowed,
    because tables set it along with `model.hidden_size` for all their rows.
    """
    keys = [text.split("=", 1)[0].lstrip("+~") for text in overrides]
    read = [f"model.{name}" for name in (*MODEL_KEYS, "head_dim")]
    return [key for key in keys if key.startswith("model.") and key not in read]


def build_baseline(config: BaselineConfig, model: Mapping[str, Any]) -> "PreTrainedModel":
    """The baseline at the sizes of the `model` node, with fresh weights.

    Raises:
        ValueError: its package is not installed, or does not work here.
    """
    sizes = {key: model[key] for key in MODEL_KEYS}
    sizes |= {"use_cache": False, "bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
    return KINDS[config.kind](sizes, config)
