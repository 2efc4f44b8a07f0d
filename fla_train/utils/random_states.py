"""Save and restore random states of this process: Python, numpy, torch and the GPU."""

import random

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only


def random_states() -> dict:
    """Return the random states of Python, numpy, torch and this rank's GPU, as tensors and plain values."""
    kind, keys, *rest = np.random.get_state()
    numpy_state = (kind, torch.from_numpy(keys), *rest)
    states = {"python": random.getstate(), "numpy": numpy_state, "torch": torch.get_rng_state()}
    if torch.cuda.is_available():
        states["cuda"] = torch.cuda.get_rng_state()
    return states


def set_random_states(states: dict) -> None:
    """Restore the result of `random_states`."""
    random.setstate(states["python"])
    kind, keys, *rest = states["numpy"]
    np.random.set_state((kind, keys.numpy(), *rest))
    torch.set_rng_state(states["torch"])
    if "cuda" in states and torch.cuda.is_available():
        torch.cuda.set_rng_state(states["cuda"])


def differing(before: dict, after: dict) -> set[str]:
    """Return the names of the generators in `random_states` whose states differ."""
    before, after = (tree_map_only(Tensor, Tensor.tolist, states) for states in (before, after))
    return {name for name, state in before.items() if state != after[name]}
