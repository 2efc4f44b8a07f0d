"""Pretrain (Gated) DeltaNet and (Gated) DeltaProduct language models.

    config = fla_train.compose("debug=smoke", "trainer.max_steps=20")
    run = fla_train.train(config)

The Python API (`API`, docs/python.md) is imported on first use, because that takes seconds.

`kernels`, `eval` and `configs` are links to the folders with these names next to this package
(docs/architecture.md).
"""

from importlib import import_module

__version__ = "0.1.0"

API = {  # name: module
    **dict.fromkeys(("compose", "train", "build_data", "build_model"), "fla_train.api"),
    "Run": "fla_train.run.results",
    "TrainingFailed": "fla_train.training.failures",
    "Preempted": "fla_train.training.preemption",
}


def __getattr__(name: str) -> object:
    if name not in API:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(API[name]), name)


def __dir__() -> list[str]:
    return [*globals(), *API]
