"""`delta_product`: the (gated) delta-product recurrence over sequences, and its one-token step."""

from fla_train.kernels.delta_product.interface import delta_product, delta_product_step, resolve_backend
from fla_train.kernels.delta_product.selfcheck import CheckReport, check_backend

__all__ = ["CheckReport", "check_backend", "delta_product", "delta_product_step", "resolve_backend"]
