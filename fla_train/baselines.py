"""Former home of `fla_train.models.zoo`: model cards of earlier exports import it to register the models."""

import fla_train.models  # noqa: F401
