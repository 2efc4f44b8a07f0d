"""Alias of `fla_train.models`: model cards of earlier exports import it to register the models."""

import fla_train.models  # noqa: F401
from fla_train.utils.aliases import current_name

current_name("import", __name__)
