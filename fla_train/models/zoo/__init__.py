"""Other architectures to train on the same tasks: rows of the papers' tables. See configs/baseline.

Importing this package registers the config of ours, Mamba with signed eigenvalues, with transformers' Auto
classes; its model follows as `fla_train.models` does.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from transformers import AutoConfig

from fla_train.baselines import configuration
from fla_train.baselines.build import (
    KINDS,
    MODEL_KEYS,
    baseline_faults,
    build_baseline,
    ignored_overrides,
)
from fla_train.baselines.configuration import BaselineConfig

if TYPE_CHECKING:
    from fla_train.baselines.mamba import SignedMambaConfig, SignedMambaForCausalLM, linear_scan

__all__ = [
    "KINDS",
    "MODEL_KEYS",
    "BaselineConfig",
    "SignedMambaConfig",
    "SignedMambaForCausalLM",
    "baseline_faults",
    "build_baseline",
    "ignored_overrides",
    "linear_scan",
]

AutoConfig.register(
    configuration.SignedMambaConfig.model_type, configuration.SignedMambaConfig, exist_ok=True
)


def __getattr__(name: str) -> Any:
    if name in ("SignedMambaConfig", "SignedMambaForCausalLM", "linear_scan"):
        return getattr(import_module(f"{__name__}.mamba"), name)
    raise AttributeError(f"module {__name__} has no attribute {name}")
