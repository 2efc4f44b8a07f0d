"""Implementations of the operator to compare: this project's backends, and other installed packages.

An implementation takes the tensors of one `Problem` and returns o [B, T, H, V]. Peers get views of the same
tensors in their own layout, so no copy of ours counts as their time (but for beta, which is small).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from typing import Generic, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

from fla_train.bench.roofline import Shape
from fla_train.kernels.delta_product import delta_product
from fla_train.kernels.delta_product.recurrent import compute_dtype

Task = TypeVar("Task")  # what an implementation is run on: a Problem, or a case of a fused op


@dataclass(frozen=True)
class Problem:
    """One call of the operator: inputs as `delta_product` takes them, and the output's gradient."""

    shape: Shape
    q: Tensor  # [B, T, H / group, K]
    k: Tensor  # [B, T, N, H / group, K]
    v: Tensor  # [B, T, N, H, V]
    beta: Tensor  # [B, T, N, H]
    g: Tensor | None  # [B, T, H]
    do: Tensor  # [B, T, H, V]
    norm: (
        bool  # whether the implementation divides q and k by their norms; else they are unit vectors already
    )

    @property
    def leaves(self) -> dict[str, Tensor]:
        """The tensors that get a gradient."""
        named = {"q": self.q, "k": self.k, "v": self.v, "beta": self.beta, "g": self.g}
        return {name: x for name, x in named.items() if x is not None}

    @property
    def output_gradients(self) -> dict[str, Tensor]:
        """By output: o has one."""
        return {"o": self.do}


def make_problem(
    shape: Shape, dtype: torch.dtype, device: torch.device, *, norm: bool, seed: int = 0
) -> Problem:
    """Random inputs like those of a trained model: open gates, beta uniform in (0, 2).

    Beta has few enough digits for any dtype, so that a peer that wants it in the dtype of q loses nothing.
    """
    generator = torch.Generator(device).manual_seed(seed)
    rows = (shape.batch, shape.tokens)

    def normal(*sizes: int) -> Tensor:
        return torch.randn(*rows, *sizes, generator=generator, device=device)

    keys = shape.heads // shape.group, shape.key_dim
    q, k = normal(*keys), normal(shape.num_householder, *keys)
    if not norm:
        q, k = F.normalize(q, dim=-1), F.normalize(k, dim=-1)
    v, do = normal(shape.num_householder, shape.heads, shape.value_dim), normal(shape.heads, shape.value_dim)
    q, k, v, do = (x.to(dtype) for x in (q, k, v, do))
    wide = compute_dtype(q)
    beta = 2 * torch.rand(*rows, shape.num_householder, shape.heads, generator=generator, device=device)
    beta = beta.bfloat16().half().to(wide)
    g = (-0.1 * F.softplus(normal(shape.heads))).to(wide) if shape.gated else None
    problem = Problem(shape, q, k, v, beta, g, do, norm)
    for leaf in problem.leaves.values():
        leaf.requires_grad_()
    return problem


@dataclass(frozen=True)
class Implementation(Generic[Task]):
    """A kernel under its name. `limit` says why a problem is beyond it, None where it can be run."""

    name: str
    run: Callable[[Task], Tensor | tuple[Tensor, ...]]
    limit: Callable[[Task], str | None] = lambda problem: None
    overwrites: tuple[str, ...] = ()  # leaves that its backward pass turns into their gradients


def operator(problem: Problem, backend: str = "triton", recompute: bool = False) -> Tensor:
    """o [B, T, H, V] of `delta_product`."""
    p = problem
    options = {"qk_l2norm": p.norm, "backend": backend, "recompute": recompute}
    return delta_product(p.q, p.k, p.v, p.beta, p.g, **options)[0]


def ours(backends: Sequence[str], recompute: bool = False) -> list[Implementation]:
    """The project's backends; with `recompute` each also recomputed."""
    ways = {"": False, ", recomputed": True} if recompute else {"": False}
    return [
        Implementation(f"fla_train {backend}{way}", partial(operator, backend=backend, recompute=value))
        for backend in backends
        for way, value in ways.items()
    ]


def peers(device: torch.device) -> tuple[list[Implementation], list[str]]:
    """The peers that can run on `device`, and one line for each that cannot with the reason."""
    if device.type == "cpu":
        return [
            Implementation("transformers torch_chunk_gated_delta_rule", _transformers, _one_householder_step)
        ], []
    found, missing = [], []
    packages = {
        "fla": _fla_implementations,
        "flash_qla": _qla_implementations,
        "attn_gym": _attn_gym_implementations,
    }
    for package, implementations in packages.items():
        if find_spec(package) is None:
            missing.append(f"{package} is not installed")
        else:
            found += implementations()
    return found, missing


def _one_householder_step(problem: Problem) -> str | None:
    return None if problem.shape.num_householder == 1 else "knows one Householder step per token only"


def _flat(problem: Problem) -> tuple[Tensor, Tensor, Tensor]:
    """k, v [B, T N, H, .] and beta [B, T N, H]: the Householder steps as further positions of the sequence.

    Beta in the dtype of q, as the peers' own layers pass it.
    """
    beta = problem.beta.flatten(1, 2).to(problem.q.dtype)
    return problem.k.flatten(1, 2), problem.v.flatten(1, 2), beta


def _transformers(problem: Problem) -> Tensor:
    """The PyTorch path that transformers' Qwen3-Next takes without a GPU."""
    module = import_module("transformers.models.qwen3_next.modeling_qwen3_next")
    k, v, beta = _flat(problem)
    g = torch.zeros_like(beta) if problem.g is None else problem.g
    o, _ = module.torch_chunk_gated_delta_rule(
        problem.q, k, v, g=g, beta=beta, use_qk_l2norm_in_kernel=problem.norm
    )
    return o


def _fla_implementations() -> list[Implementation]:
    """flash-linear-attention. With FlashQLA installed its gated delta rule hands over to that package."""

    def delta_rule(p: Problem) -> Tensor:
        kernel = import_module("fla.ops.delta_rule").chunk_delta_rule
        k, v, beta = _flat(p)
        return kernel(p.q, k, v, beta, use_qk_l2norm_in_kernel=p.norm)[0]

    def gated_delta_rule(p: Problem) -> Tensor:
        kernel = import_module("fla.ops.gated_delta_rule").chunk_gated_delta_rule
        k, v, beta = _flat(p)
        return kernel(p.q, k, v, p.g, beta, use_qk_l2norm_in_kernel=p.norm)[0]

    def product(p: Problem) -> Tensor:
        kernel = import_module("fla.ops.gated_delta_product").chunk_gated_delta_product
        k, v, beta = _flat(p)
        return kernel(p.q, k, v, p.g, beta, p.shape.num_householder, use_qk_l2norm_in_kernel=p.norm)[0]

    def gate(wanted: bool) -> Callable[[Problem], str | None]:
        def limit(p: Problem) -> str | None:
            return _one_householder_step(p) or (
                None if p.shape.gated == wanted else "is for the other kind of gate"
            )

        return limit

    def several(p: Problem) -> str | None:
        return "is for two Householder steps or more" if p.shape.num_householder == 1 else None

    by = " (may run FlashQLA)" if find_spec("flash_qla") else ""
    return [
        Implementation("fla chunk_delta_rule", delta_rule, gate(False)),
        Implementation(f"fla chunk_gated_delta_rule{by}", gated_delta_rule, gate(True)),
        Implementation("fla chunk_gated_delta_product", product, several),
    ]


def _qla_implementations() -> list[Implementation]:
    """FlashQLA, with beta in the dtype of q. It computes the norm by a kernel before the others."""

    def rule(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, *, norm: bool) -> Tensor:
        kernel = import_module("flash_qla").chunk_gated_delta_rule
        return kernel(q=q, k=k, v=v, g=g, beta=beta.to(q.dtype), use_qk_l2norm_in_kernel=norm)[0]

    return [_gated_delta_rule("FlashQLA chunk_gated_delta_rule", rule)]


def _attn_gym_implementations() -> list[Implementation]:
    """attn-gym, with its kernel for the norm. Its gated delta rule takes g and beta in fp32."""

    def rule(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, *, norm: bool) -> Tensor:
        linear = import_module("attn_gym.linear")
        q, k = (linear.l2norm(q), linear.l2norm(k)) if norm else (q, k)
        return linear.chunk_gdn(q, k, v, g, beta)[0]

    return [_gated_delta_rule("attn-gym chunk_gdn", rule)]


def _gated_delta_rule(name: str, rule: Callable[..., Tensor]) -> Implementation:
    """A peer that has a gate always, and one Householder step.

    More steps are a longer sequence whose queries are zero but for the last of each token.

    Args:
        rule: of q, k [B, T, H, K], v [B, T, H, V], g and beta [B, T, H] in fp32, and whether q and k are
            normalised; returns o [B, T, H, V].
    """

    def run(p: Problem) -> Tensor:
        q, k, v, beta = p.q, p.k.flatten(1, 2), p.v.flatten(1, 2), p.beta.flatten(1, 2)
        if p.shape.num_householder == 1:
            return rule(q, k, v, p.g, beta, norm=p.norm)
        queries, g = torch.zeros_like(p.k), p.g.new_zeros(p.beta.shape)
        queries[:, :, -1], g[:, :, 0] = q, p.g
        o = rule(queries.flatten(1, 2), k, v, g.flatten(1, 2), beta, norm=p.norm)
        return o.unflatten(1, p.k.shape[1:3])[:, :, -1].contiguous()

    def limit(p: Problem) -> str | None:
        return None if p.shape.gated else "needs a gate"

    return Implementation(name, run, limit)
