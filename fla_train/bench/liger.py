"""Liger-Kernel's versions of the fused ops, called as in its own layers.

It has no causal convolution, no RMSNorm with a gate and no gates of a recurrence. Its norms have one dtype
for input and output, so they do not support an fp32 residual stream.
"""

from importlib import import_module

import torch
from torch import Tensor

from fla_train.bench.compare import Implementation
from fla_train.bench.fused_op_cases import EPS, Case
from fla_train.kernels.fused_ops import IGNORE

NORM = (EPS, 0.0, "llama", False)  # eps, offset of the weight, casting mode, overwrite dy


def _norm(case: Case) -> Tensor:
    function = import_module("liger_kernel.ops.rms_norm").LigerRMSNormFunction
    return function.apply(case.leaves["x"], case.leaves["weight"], *NORM)


def _residual_norm(case: Case) -> tuple[Tensor, Tensor]:
    function = import_module("liger_kernel.ops.fused_add_rms_norm").LigerFusedAddRMSNormFunction
    return function.apply(case.leaves["x"], case.leaves["residual"], case.leaves["weight"], *NORM)


def _one_dtype(case: Case) -> str | None:
    dtypes = {case.leaves.get("residual", case.leaves["x"]).dtype, case.output_gradients["y"].dtype}
    return None if len(dtypes) == 1 else "needs one dtype for the stream and the norm"


def _cross_entropy(case: Case) -> Tensor:
    """Return the sum over rows. The gradient of the weight accumulates in fp32, as in our kernel."""
    module = import_module("liger_kernel.ops.fused_linear_cross_entropy")
    hidden = case.leaves["hidden"]
    weight = case.leaves["weight"].to(hidden.dtype)
    bias, class_weight, lse_square_scale, label_smoothing, softcap = None, None, 0.0, 0.0, None
    options = (bias, class_weight, IGNORE, lse_square_scale, label_smoothing, "sum", softcap)
    function = module.LigerFusedLinearCrossEntropyFunction
    return function.apply(hidden, weight, case.fixed["targets"], *options, False, torch.float32)[0]


IMPLEMENTATIONS: dict[str, list[Implementation]] = {
    "norm": [Implementation("Liger RMSNorm", _norm, _one_dtype)],
    "residual-norm": [Implementation("Liger fused add + RMSNorm", _residual_norm, _one_dtype)],
    "cross-entropy": [Implementation("Liger fused linear cross-entropy", _cross_entropy)],
}
