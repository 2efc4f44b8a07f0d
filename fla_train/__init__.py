"""fla_train: pretrain (Gated) DeltaNet and (Gated) DeltaProduct language models.

In a checkout the folders `kernels/`, `eval/` and `configs/` lie beside this package; the last lines make
them importable as `fla_train.kernels`, `fla_train.eval` and `fla_train.configs` without an installation. In
a wheel they are ordinary subpackages. They are never top-level names: see docs/architecture.md.
"""

from pathlib import Path

__version__ = "0.1.0"

_root = Path(__file__).resolve().parent.parent
if (_root / "pyproject.toml").is_file() and (_root / "kernels").is_dir():
    __path__.append(str(_root))
