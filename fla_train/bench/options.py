"""The subcommands of `fla-bench` and their options.

Each dataclass is a subcommand: its docstring is the help, its fields are the options. `OVERRIDES` are
overrides of configs/train.yaml.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

Numbers = tuple[int, ...]
Names = tuple[str, ...]
Peer = Literal["transformer", "llama", "fla", "transformer-compiled", "llama-compiled"]
Norm = Literal["norm", "residual-norm", "gated-norm"]
Function = Literal["convolution", Norm, "rotary", "selective-scan", "swiglu", "gates", "cross-entropy"]
Dtype = Annotated[Literal["bf16", "fp16", "fp32"] | None, "dtype (default: bf16 on a GPU, fp32 on a CPU)"]
Json = Annotated[Path | None, "also write the results to this file, and the tables to FILE.md"]
Overrides = Annotated[Names, "overrides of configs/train.yaml, such as model=gated_delta_product/340m"]
Batch = Annotated[int, "sequences (B); 1 is enough on a CPU"]
Tokens = Annotated[int, "tokens of a sequence (T)"]
ValueDim = Annotated[int | None, "V (default: K)"]


@dataclass
class Kernels:
    """Time the operator's backends, and peers that are installed."""

    batch: Batch = 32
    tokens: Tokens = 2048
    heads: Annotated[int, "heads of v (H)"] = 8
    group: Annotated[int, "heads of v that share a head of q and k"] = 1
    head_dim: Annotated[int, "K"] = 128
    value_dim: ValueDim = None
    num_householder: Annotated[Numbers, "n_h"] = (1, 2, 3)
    gate: Annotated[bool | None, "forget gate (default: both with and without)"] = None
    norm: Annotated[bool, "L2 norm of q and k inside the kernel"] = True
    backends: Annotated[Names, "our backends"] = ("auto",)
    graphs: Annotated[bool, "time CUDA graphs, without the host's launches"] = False
    peers: Annotated[bool, "also time the peers that are installed"] = False
    dtype: Dtype = None
    json: Json = None


@dataclass
class FusedOps:
    """Time convolution, norms, rotary, SwiGLU, gates, selective scan and cross-entropy."""

    batch: Batch = 8
    tokens: Tokens = 2048
    hidden: Annotated[int, "channels"] = 1024
    head_dim: Annotated[int | None, "head dim (default: 128, at most --hidden)"] = None
    intermediate: Annotated[int | None, "channels of SwiGLU (default: 2.75 x --hidden)"] = None
    vocabulary: Annotated[int, "vocabulary size of the loss"] = 32000
    num_householder: Annotated[int, "n_h of the gates"] = 1
    functions: Annotated[tuple[Function, ...], "some of the functions (default: all)"] = ()
    peers: Annotated[bool, "also time Liger-Kernel, on a GPU"] = False
    dtype: Dtype = None
    json: Json = None


@dataclass
class Generate:
    """Time generation by a whole model by batch and context, compared with peers."""

    batch: Annotated[Numbers, "sequences"] = (1, 64)
    contexts: Annotated[Numbers, "tokens of the prompts"] = (2048, 8192, 32768, 131072)
    new_tokens: Annotated[int, "tokens that are timed after the first"] = 64
    peers: Annotated[tuple[Peer, ...], "models to compare with, -compiled by torch.compile"] = ()
    overrides: Overrides = ()
    dtype: Dtype = None
    json: Json = None


@dataclass
class Train:
    """Time optimizer steps on random tokens, by kind of work."""

    steps: Annotated[int, "timed steps, after those that warm up"] = 10
    peers: Annotated[tuple[Literal[Peer, "ours-compiled", "fla-compiled"], ...], "as for generate"] = ()
    overrides: Overrides = ()
    json: Json = None


@dataclass
class Tune:
    """Find the fastest launch options of the Triton kernels for this GPU."""

    batch: Batch = 32
    tokens: Tokens = 2048
    heads: Annotated[int, "heads (H)"] = 8
    head_dim: Annotated[Numbers, "K"] = (128,)
    value_dim: ValueDim = None
    num_householder: Annotated[Numbers, "n_h"] = (1, 2, 3)
    dtype: Annotated[Literal["bf16", "fp16"], "dtype of q, k and v"] = "bf16"
    file: Annotated[Path | None, "file of the table (default: the one that training reads)"] = None


@dataclass
class Precompile:
    """Compile the kernels of a training run into a folder, for containers."""

    folder: Annotated[Path, "Triton's cache; containers need it at this path"]
    overrides: Overrides = ()


COMMANDS = {
    "kernels": Kernels,
    "fused_ops": FusedOps,
    "generate": Generate,
    "train": Train,
    "tune": Tune,
    "precompile": Precompile,
}
