"""Other architectures to train on the same tasks: rows of the papers' tables. See configs/baseline."""

from fla_train.baselines.build import KINDS, BaselineConfig, baseline_faults, build_baseline
from fla_train.baselines.mamba import SignedMambaConfig, SignedMambaForCausalLM, linear_scan

__all__ = [
    "KINDS",
    "BaselineConfig",
    "SignedMambaConfig",
    "SignedMambaForCausalLM",
    "baseline_faults",
    "build_baseline",
    "linear_scan",
]
