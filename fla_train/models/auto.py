"""Import this module to register the models of this package with transformers' Auto classes."""

from transformers import AutoConfig

from fla_train.models import modeling
from fla_train.models.zoo import mamba

for _module in (modeling, mamba):
    for _auto_class, _model in _module.AUTO_CLASSES.items():
        AutoConfig.register(_model.config_class.model_type, _model.config_class, exist_ok=True)
        _auto_class.register(_model.config_class, _model, exist_ok=True)
