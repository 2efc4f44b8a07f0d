"""Initial and final states of the linear layers in a training pass, with the interface of a cache.

A generation cache is updated in place, so a layer that is recomputed for activation checkpointing would
update it twice. Here a pass reads the initial states and writes to other tensors, without gradients. So a
layer may run any number of times, and a CUDA graph may replay it on the same tensors.
"""

from collections.abc import Mapping
from typing import NamedTuple

from torch import Tensor

RECURRENT, CONV = "recurrent", "conv"
STATES_PER_LAYER = 3  # number of states of each kind, as in a cache


class StateKey(NamedTuple):
    """Identify a state of a layer."""

    kind: str  # RECURRENT, or CONV for the last inputs of a short convolution
    layer: int
    index: int


class LayerStates:
    """Initial states [R, ...] of one layer for R rows; None: zeros."""

    def __init__(self, start: Mapping[StateKey, Tensor], layer: int) -> None:
        indices = range(STATES_PER_LAYER)
        self.recurrent_states = [start.get(StateKey(RECURRENT, layer, index)) for index in indices]
        self.conv_states = [start.get(StateKey(CONV, layer, index)) for index in indices]


class CarriedStates:
    """States of R rows in all linear layers. Softmax attention has none.

    Args:
        start: initial states [R, ...] without gradient; absent states are zeros.
        end: tensors of the same shapes for the states after each row's last token; absent states are dropped.
    """

    def __init__(self, start: Mapping[StateKey, Tensor], end: Mapping[StateKey, Tensor], layers: int) -> None:
        self.layers = [LayerStates(start, layer) for layer in range(layers)]
        self.rows = len(next(iter(end.values())))
        self.carries_inputs = any(key.kind == CONV for key in end)  # the inputs of convolutions
        self._end = end

    def update_recurrent_state(self, state: Tensor, layer_index: int, state_idx: int = 0) -> None:
        self._write(StateKey(RECURRENT, layer_index, state_idx), state)

    def update_conv_state(self, state: Tensor, layer_index: int, state_idx: int = 0) -> None:
        self._write(StateKey(CONV, layer_index, state_idx), state)

    def _write(self, key: StateKey, state: Tensor) -> None:
        if key in self._end:
            self._end[key].copy_(state.detach())
