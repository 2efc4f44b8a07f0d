"""Interface of token mixers, including custom ones."""

from typing import Any, Protocol

from torch import Tensor
from transformers.cache_utils import Cache

from fla_train.models.configuration import DeltaProductConfig
from fla_train.models.context import SequenceContext


class Mixer(Protocol):
    """A causal `nn.Module` from [B, T, D] to [B, T, D], D = config.hidden_size. docs/mixers.md has examples.

    Parameters with the attribute `_no_weight_decay = True`, and vectors, get no weight decay. The model draws
    every `nn.Linear` and `nn.Embedding` with standard deviation `config.initializer_range`. Other parameters
    keep the values from the constructor, unless the class has `init_weights`. A checkpoint restores only
    parameters and persistent buffers, and loading builds the module on the meta device.

    Optional methods:
        init_weights(std): draw the other parameters, only with functions of `torch.nn.init`, which skip
            tensors that a checkpoint has filled.
        flops_per_token(seq_len): FLOPs to train on one token, forward and backward, of everything in the
            module. Without it the weights of its linear layers are counted.
    """

    def __init__(self, config: DeltaProductConfig, layer_index: int, **options: Any) -> None:
        """Make layer `layer_index` of the model; `options` are `config.mixer_options`."""

    def __call__(
        self, x: Tensor, context: SequenceContext | None = None, cache: Cache | None = None
    ) -> Tensor:
        """Mix x [B, T, D], the new tokens; no output depends on a later token.

        Args:
            context: padding, bounds of packed documents and positions; None: neither padding nor documents.
                Padding must change no other token, and nothing crosses the bounds of documents.
            cache: of all layers, to continue from and to update; None: the tokens stand alone. This layer has
                three places for states of any shape [B, ...]: `cache.layers[layer_index].recurrent_states[i]`
                (None before the first token) and `cache.update_recurrent_state(state, layer_index, i)`; three
                more for the last inputs of convolutions. A class whose `forward` has no `cache` generates by
                whole passes.
        """
