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


@dataclass(frozen=True)
class Sizes:
    """Settings that all architectures share."""

    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    num_heads: int
    allow_neg_eigval: bool

    @property
    def common(self) -> dict[str, Any]:
        return {
            "vocab_size": self.vocab_size,
            "hidden_size": self.hidden_size,
            "num_hidden_layers": self.num_hidden_layers,
            "use_cache": False,
            **dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id")),
        }


def _llama(sizes: Sizes) -> "PreTrainedModel":
    from transformers import LlamaConfig, LlamaForCausalLM

    settings = LlamaConfig(
        **sizes.common,
        num_attention_heads=sizes.num_heads,
        num_key_value_heads=sizes.num_heads,
        intermediate_size=4 * sizes.hidden_size,
        max_position_embeddings=2048,
    )
    return LlamaForCausalLM(settings)


def _mamba(sizes: Sizes) -> "PreTrainedModel":
    from fla_train.models.zoo.mamba import SignedMambaConfig, SignedMambaForCausalLM

    common = {key: value for key, value in sizes.common.items() if key != "use_cache"}
    return SignedMambaForCausalLM(SignedMambaConfig(**common, allow_neg_eigval=sizes.allow_neg_eigval))


def _mamba2(sizes: Sizes) -> "PreTrainedModel":
    from transformers import Mamba2Config, Mamba2ForCausalLM

    inner = 2 * sizes.hidden_size
    settings = Mamba2Config(
        **sizes.common,
        expand=2,
        num_heads=sizes.num_heads,
        head_dim=inner // sizes.num_heads,
        n_groups=1,
        state_size=64,
        chunk_size=64,
    )
    return Mamba2ForCausalLM(settings)


def _mlstm(sizes: Sizes) -> "PreTrainedModel":
    """xLSTM with matrix memories only.

    Of transformers' modes only "inference" takes sequences of any length; it has gradients, too.
    """
    from transformers import xLSTMConfig, xLSTMForCausalLM

    settings = xLSTMConfig(
        **sizes.common, num_heads=sizes.num_heads, mode="inference", autocast_kernel_dtype="float32"
    )
    return xLSTMForCausalLM(settings)


def _from_fla(name: str) -> Callable[[Sizes], "PreTrainedModel"]:
    """A model of the optional package flash-linear-attention, whose kernels need a GPU."""

    def build(sizes: Sizes) -> "PreTrainedModel":
        try:
            models = import_module("fla.models")
        except Exception as failure:  # anything, with a torch or triton that it was not made for
            if isinstance(failure, ModuleNotFoundError) and failure.name == "fla":
                raise ValueError(f"baseline {name} needs the package {FLA}: pip install {FLA}") from None
            cause = f"{type(failure).__name__}: {failure}"
            raise ValueError(
                f"baseline {name}: {FLA} is installed and can't be imported ({cause})"
            ) from failure
        heads = {"num_heads": sizes.num_heads}
        if name == "RWKV7":
            heads = {"num_heads": sizes.num_heads, "head_dim": sizes.hidden_size // sizes.num_heads}
        config = getattr(models, f"{name}Config")(**sizes.common, **heads)
        return getattr(models, f"{name}ForCausalLM")(config)

    return build


KINDS: dict[str, Callable[[Sizes], "PreTrainedModel"]] = {
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
    return KINDS[config.kind](
        Sizes(**sizes, num_heads=config.num_heads, allow_neg_eigval=config.allow_neg_eigval)
    )
