"""fla_train: pretrain (Gated) DeltaNet and (Gated) DeltaProduct language models.

    config = fla_train.compose("debug=smoke", "trainer.max_steps=20")
    run = fla_train.train(config)

The Python API (`API`, docs/python.md) is imported when it is first used, since that takes seconds.

In a checkout the folders `kernels/`, `eval/` and `configs/` lie beside this package; the last lines make
them importable as `fla_train.kernels`, `fla_train.eval` and `fla_train.configs` without an installation. In
a wheel they are ordinary subpackages. They are never top-level names: see docs/architecture.md.
"""

from importlib import import_module
from pathlib import Path

__version__ = "0.1.0"

API = {  # name: module
    **dict.fromkeys(("compose", "train", "build_data", "build_model"), "fla_train.api"),
    "Run": "fla_train.run",
    "TrainingFailed": "fla_train.training.launch",
    "Preempted": "fla_train.training.preemption",
}


def __getattr__(name: str) -> object:
    if name not in API:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(API[name]), name)


def __dir__() -> list[str]:
    return [*globals(), *API]


_root = Path(__file__).resolve().parent.parent
if (_root / "pyproject.toml").is_file() and (_root / "kernels").is_dir():
    __path__.append(str(_root))
