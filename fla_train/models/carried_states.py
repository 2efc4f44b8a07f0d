"""States that a training pass starts from and leaves behind: its layers find them in place of a cache.

A generation cache is updated in place: a layer that runs again for activation checkpointing would update it
twice. These have two sides. A pass reads one and writes the other, without gradients. So a layer may run any
number of times, and a CUDA graph may replay it on tensors that stay.
"""

from collections.abc import Mapping
from typing import NamedTuple

from torch import Tensor

RECURRENT, CONV = "recurrent", "conv"
STATES_PER_LAYER = 3  # of each kind, as a cache has


class StateKey(NamedTuple):
    """Which state of which layer."""

    kind: str  # RECURRENT, or CONV: the last inputs of a short convolution
    layer: int
    index: int


class LayerStates:
    """What a layer reads: a state [R, ...] for each of R rows, or None where it starts from zeros."""

    def __init__(self, start: Mapping[StateKey, Tensor], layer: int) -> None:
        self.recurrent_states, self.conv_states = (
            [start.get(StateKey(kind, layer, index)) for index in range(STATES_PER_LAYER)]
            for kind in (RECURRENT, CONV)
        )


class CarriedStates:
    """The states of R rows in all linear layers. Softmax attention carries nothing.

    Args:
        start: states [R, ...] of the rows' beginnings; what is absent starts from zeros. They require no
            gradient, and none is computed.
        end: tensors of the same shapes, which the pass fills with the states after each row's last token;
            what is absent is dropped.
    """

    def __init__(self, start: Mapping[StateKey, Tensor], end: Mapping[StateKey, Tensor], layers: int) -> None:
        self.layers = [LayerStates(start, layer) for layer in range(layers)]
        self.rows = len(next(iter(end.values())))
        self._end = end

    def update_recurrent_state(self, state: Tensor, layer_index: int, state_idx: int = 0) -> None:
        self._write(StateKey(RECURRENT, layer_index, state_idx), state)

    def update_conv_state(self, state: Tensor, layer_index: int, state_idx: int = 0) -> None:
        self._write(StateKey(CONV, layer_index, state_idx), state)

    def _write(self, key: StateKey, state: Tensor) -> None:
        if key in self._end:
            self._end[key].copy_(state.detach())
