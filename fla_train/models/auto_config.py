"""Import this module to register the configs of this package with AutoConfig. It imports no models."""

from transformers import AutoConfig

from fla_train.models.configuration import DeltaProductConfig
from fla_train.models.zoo.mamba_configuration import SignedMambaConfig

for _config in (DeltaProductConfig, SignedMambaConfig):
    AutoConfig.register(_config.model_type, _config, exist_ok=True)
