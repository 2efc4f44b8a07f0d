"""Fused memory-bound ops: convolution, RMSNorm, SwiGLU, gates, rotary positions, loss, selective scan.

Each has a PyTorch definition and Triton kernels that read their inputs and write their outputs once, with the
same gradients; `backend="auto"` selects the kernels on CUDA. See docs/dev/fused_ops.md.
"""

from fla_train.kernels.fused_ops.backend import resolve_backend
from fla_train.kernels.fused_ops.cross_entropy import IGNORE, consume_logits
from fla_train.kernels.fused_ops.gates import recurrence_gates
from fla_train.kernels.fused_ops.rms_norm import add_rms_norm, rms_norm
from fla_train.kernels.fused_ops.rotary import rotary
from fla_train.kernels.fused_ops.selective_scan import selective_scan
from fla_train.kernels.fused_ops.short_conv import short_convolution
from fla_train.kernels.fused_ops.swiglu import swiglu_linear

__all__ = [
    "IGNORE",
    "add_rms_norm",
    "consume_logits",
    "recurrence_gates",
    "resolve_backend",
    "rms_norm",
    "rotary",
    "selective_scan",
    "short_convolution",
    "swiglu_linear",
]
