"""The operator's neighbours in a training step: what surrounds its matmuls and is bound by memory traffic.

Each is one function with a PyTorch definition and a Triton kernel that reads its inputs and writes its
outputs once; `backend="auto"` takes the kernel on CUDA.
"""

from fla_train.kernels.neighbours.backend import BACKENDS, resolve_backend
from fla_train.kernels.neighbours.convolution import short_convolution
from fla_train.kernels.neighbours.cross_entropy import IGNORE, consume_logits
from fla_train.kernels.neighbours.gates import recurrence_gates
from fla_train.kernels.neighbours.normalization import add_rms_norm, rms_norm
from fla_train.kernels.neighbours.swiglu import swiglu_linear

__all__ = [
    "BACKENDS",
    "IGNORE",
    "add_rms_norm",
    "consume_logits",
    "recurrence_gates",
    "resolve_backend",
    "rms_norm",
    "short_convolution",
    "swiglu_linear",
]
