"""Token mixers from [B, T, D] to [B, T, D]: the DeltaProduct recurrence and softmax attention."""

from fla_train.models.mixers.delta_product import DeltaProductMixer
from fla_train.models.mixers.interface import Mixer

__all__ = ["DeltaProductMixer", "Mixer"]
