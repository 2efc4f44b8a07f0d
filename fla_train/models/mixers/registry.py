"""Build the mixer of each layer, and import a custom mixer class if that is permitted."""

import inspect

import torch
from torch import nn

from fla_train.models.configuration import DeltaProductConfig
from fla_train.models.mixers.attention import Attention
from fla_train.models.mixers.delta_product import DeltaProductMixer
from fla_train.models.mixers.interface import Mixer
from fla_train.utils.errors import MixerError, described
from fla_train.utils.import_class import import_class


def build_mixer(config: DeltaProductConfig, layer: int) -> Mixer:
    """Build the mixer of layer `layer` according to `config.layer_types`.

    Raises:
        MixerError: as `linear_mixer`, or its constructor failed.
    """
    if config.layer_types[layer] != "linear_attention":
        return Attention(config, layer)
    mixer = linear_mixer(config)
    if config.mixer is None:
        return mixer(config, layer)
    options = config.mixer_options or {}
    try:
        return mixer(config, layer, **options)
    except Exception as error:
        arguments = "".join(f", {key}={value!r}" for key, value in options.items())
        raise MixerError(
            f"mixer {config.mixer}: {mixer.__name__}(config, {layer}{arguments}) raised {described(error)}"
        ) from error


def linear_mixer(config: DeltaProductConfig) -> type[Mixer]:
    """Return the class of the linear layers, `DeltaProductMixer` or the custom class `config.mixer`.

    Raises:
        MixerError: only a file names it, it can't be imported, or it does not have the interface.
    """
    if config.mixer is None:
        return DeltaProductMixer
    if not config.mixer_permitted:
        raise MixerError(f"mixer={config.mixer} is code: name it yourself, or set trust_remote_code=true")
    path = config.mixer
    try:
        cls = import_class(path, nn.Module, "torch.nn.Module")
    except ValueError as error:
        raise MixerError(f"mixer {error}") from error
    if "context" not in inspect.signature(cls.forward).parameters:
        raise MixerError(f"mixer {path}: its method must be forward(self, x, context=None, cache=None)")
    return cls


def runs_operator(config: DeltaProductConfig) -> bool:
    """Return whether the linear layers run this package's operator: `DeltaProductMixer`, or a subclass."""
    return "linear_attention" in config.layer_types and issubclass(linear_mixer(config), DeltaProductMixer)


def takes_cache(mixer: type[Mixer]) -> bool:
    """Return whether the mixer can continue from states of earlier tokens."""
    return "cache" in inspect.signature(mixer.forward).parameters


def check_output(mixer: str, output: object, shape: torch.Size) -> None:
    """Raise `MixerError` unless the output of custom class `mixer` has the shape [B, T, D] of its input."""
    actual = tuple(output.shape) if isinstance(output, torch.Tensor) else f"a {type(output).__name__}"
    if actual != tuple(shape):
        raise MixerError(f"mixer {mixer}: forward must return a tensor {tuple(shape)}, not {actual}")
