"""Liger-Kernel's versions of the operator's neighbours, as its own layers call them.

It has no causal convolution, no RMSNorm with a gate and nothing for the recurrence's gates. Its norms write
in the dtype of their input, so the fp32 stream of our models is beyond them.
"""

from importlib import import_module
from importlib.util import find_spec

import torch
import torch.nn.functional as F
from torch import Tensor

from fla_train.bench.case import Case
from fla_train.bench.contenders import Contender
from fla_train.bench.neighbour_cases import EPS
from fla_train.kernels.fused_ops import IGNORE

NORM = (EPS, 0.0, "llama", False)  # eps, offset of the weight, where it casts, whether dy is overwritten


def liger(device: torch.device) -> tuple[dict[str, list[Contender[Case]]], list[str]]:
    """Its kernels by the function of the case, and one line with the reason if there are none."""
    if find_spec("liger_kernel") is None:
        return {}, ["liger_kernel is not installed"]
    if device.type == "cpu":
        return {}, ["liger_kernel needs a GPU"]
    return CONTENDERS, []


def _norm(case: Case) -> Tensor:
    function = import_module("liger_kernel.ops.rms_norm").LigerRMSNormFunction
    return function.apply(case.leaves["x"], case.leaves["weight"], *NORM)


def _residual_norm(case: Case) -> tuple[Tensor, Tensor]:
    function = import_module("liger_kernel.ops.fused_add_rms_norm").LigerFusedAddRMSNormFunction
    return function.apply(case.leaves["x"], case.leaves["residual"], case.leaves["weight"], *NORM)


def _one_dtype(case: Case) -> str | None:
    dtypes = {case.leaves.get("residual", case.leaves["x"]).dtype, case.output_gradients["y"].dtype}
    return None if len(dtypes) == 1 else "has one dtype for the stream and the norm"


def _swiglu(case: Case) -> Tensor:
    function = import_module("liger_kernel.ops.swiglu").LigerSiLUMulFunction
    gate = case.leaves["gate"]
    return F.linear(function.apply(gate, case.leaves["up"]), case.leaves["weight"].to(gate.dtype))


def _cross_entropy(case: Case) -> Tensor:
    """The sum over the rows; its weight's gradient is summed in fp32, as ours is."""
    function = import_module(
        "liger_kernel.ops.fused_linear_cross_entropy"
    ).LigerFusedLinearCrossEntropyFunction
    hidden = case.leaves["hidden"]
    weight = case.leaves["weight"].to(hidden.dtype)
    no_bias, no_class_weight, no_softcap = None, None, None
    smoothing = (0.0, 0.0)  # of the squared log-sum-exp, and of labels
    options = (no_bias, no_class_weight, IGNORE, *smoothing, "sum", no_softcap, False, torch.float32)
    return function.apply(hidden, weight, case.fixed["targets"], *options)[0]


CONTENDERS: dict[str, list[Contender[Case]]] = {
    "norm": [Contender("Liger RMSNorm", _norm, _one_dtype)],
    "residual-norm": [Contender("Liger fused add + RMSNorm", _residual_norm, _one_dtype)],
    "swiglu": [Contender("Liger SiLUMul, then the product", _swiglu, overwrites=("gate", "up"))],
    "cross-entropy": [Contender("Liger fused linear cross-entropy", _cross_entropy)],
}
