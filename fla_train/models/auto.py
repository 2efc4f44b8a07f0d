"""Import this module to register the models of this package with transformers' Auto classes."""

import fla_train.models.auto_config  # noqa: F401  registers the configs
from fla_train.models import modeling
from fla_train.models.zoo import mamba

for _module in (modeling, mamba):
    for _auto_class, _model in _module.AUTO_CLASSES.items():
        _auto_class.register(_model.config_class, _model, exist_ok=True)
