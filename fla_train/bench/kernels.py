"""`fla-bench kernels`: time the operator's backends, and peers that are installed, on the same inputs.

An implementation maps the tensors of one `Problem` to o [B, T, H, V]. Peers get views of the same
tensors in their own layout, so their time includes no copies, except of beta, which is small.
"""

from argparse import Namespace
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from itertools import product

import torch
import torch.nn.functional as F
from torch import Tensor

from fla_train.bench.measure import COLUMNS, Implementation, compare, forward_backward
from fla_train.bench.report import Report
from fla_train.bench.roofline import Ceilings, Shape, bounds
from fla_train.kernels.delta_product import delta_product, resolve_backend
from fla_train.kernels.delta_product.recurrent import compute_dtype
from fla_train.kernels.delta_product.selfcheck import relative_rms

# Errors of gradients with an RMS below this fraction of the largest gradient's are relative to that fraction:
# some gradients are zero, or vanish compared with the terms that they sum. Others have 2e-2 and more.
MIN_GRADIENT = 1e-2


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
    norm: bool  # the implementation divides q and k by their norms; otherwise they are unit vectors

    @property
    def leaves(self) -> dict[str, Tensor]:
        """Return the tensors that get a gradient."""
        named = {"q": self.q, "k": self.k, "v": self.v, "beta": self.beta, "g": self.g}
        return {name: x for name, x in named.items() if x is not None}

    @property
    def output_gradients(self) -> dict[str, Tensor]:
        """Return the gradient of o by its name."""
        return {"o": self.do}

    def bounds(self, ceilings: Ceilings) -> tuple[float, float]:
        """Return the least seconds of a forward pass, and of forward and backward."""
        return bounds(self.shape, ceilings)

    def errors(self, run: Callable[["Problem"], Tensor]) -> dict[str, float]:
        """Return relative RMS errors |x - reference| / |reference| of o and each gradient of `run`.

        The reference is the `chunk` backend in fp64 on the CPU, which has no kernels. It computes the last
        head of q and k, with the heads of v that share it, of the last sequence.
        """
        results = forward_backward(run, self)

        def last(name: str, x: Tensor) -> Tensor:
            heads = 1 if name in ("q", "k") else self.shape.group
            head_axis = 3 if name in ("k", "v", "beta") else 2
            start = x.shape[head_axis] - heads
            return x.detach()[-1:].narrow(head_axis, start, heads).cpu().double()

        leaves = {name: last(name, x).requires_grad_() for name, x in self.leaves.items()}
        exact = replace(self, **leaves, do=last("o", self.do))
        expected = forward_backward(partial(operator, backend="chunk"), exact)
        largest = max(x.square().mean().sqrt().item() for name, x in expected.items() if name != "o")
        errors = {}
        for name, x in expected.items():
            least = 1e-30 if name == "o" else MIN_GRADIENT * largest * x.numel() ** 0.5
            errors[name] = relative_rms(last(name.removeprefix("d"), results[name]), x, least)
        return errors


def make_problem(
    shape: Shape, dtype: torch.dtype, device: torch.device, *, norm: bool, seed: int = 0
) -> Problem:
    """Draw inputs like those of a trained model: open gates, beta uniform in (0, 2).

    Beta is rounded to the digits that bf16 and fp16 share, so a peer that takes it in the dtype of q loses
    nothing.
    """
    generator = torch.Generator(device).manual_seed(seed)
    rows, steps = (shape.batch, shape.tokens), shape.num_householder

    def normal(*sizes: int) -> Tensor:
        return torch.randn(*rows, *sizes, generator=generator, device=device)

    keys = shape.heads // shape.group, shape.key_dim
    q, k = normal(*keys), normal(steps, *keys)
    if not norm:
        q, k = F.normalize(q, dim=-1), F.normalize(k, dim=-1)
    v, do = normal(steps, shape.heads, shape.value_dim), normal(shape.heads, shape.value_dim)
    q, k, v, do = (x.to(dtype) for x in (q, k, v, do))
    wide = compute_dtype(q)
    beta = 2 * torch.rand(*rows, steps, shape.heads, generator=generator, device=device)
    beta = beta.bfloat16().half().to(wide)
    g = (-0.1 * F.softplus(normal(shape.heads))).to(wide) if shape.gated else None
    problem = Problem(shape, q, k, v, beta, g, do, norm)
    for leaf in problem.leaves.values():
        leaf.requires_grad_()
    return problem


def operator(problem: Problem, backend: str = "triton") -> Tensor:
    """Return o [B, T, H, V] of `delta_product`."""
    p = problem
    return delta_product(p.q, p.k, p.v, p.beta, p.g, qk_l2norm=p.norm, backend=backend)[0]


def ours(backends: Iterable[str]) -> list[Implementation]:
    """Return this project's backends."""
    return [Implementation(f"fla_train {name}", partial(operator, backend=name)) for name in backends]


def peers(device: torch.device) -> tuple[list[Implementation], list[str]]:
    """Return the peers that run on `device`, and the names of packages that are not installed."""
    if device.type == "cpu":
        return [Implementation("transformers torch_chunk_gated_delta_rule", _transformers, _one_step)], []
    missing = [package for package in PEERS if find_spec(package) is None]
    return [x for package, entries in PEERS.items() if package not in missing for x in entries], missing


def _one_step(p: Problem) -> str | None:
    return None if p.shape.num_householder == 1 else "supports one Householder step per token"


def _one_gated_step(p: Problem) -> str | None:
    return _one_step(p) or (None if p.shape.gated else "needs a gate")


def _one_ungated_step(p: Problem) -> str | None:
    return _one_step(p) or ("has no gate" if p.shape.gated else None)


def _several_steps(p: Problem) -> str | None:
    return "needs two Householder steps or more" if p.shape.num_householder == 1 else None


def _flat(p: Problem) -> tuple[Tensor, Tensor, Tensor]:
    """Return k, v [B, T N, H, .] and beta [B, T N, H], with Householder steps as further positions.

    Beta has the dtype of q, as in the peers' own layers.
    """
    return p.k.flatten(1, 2), p.v.flatten(1, 2), p.beta.flatten(1, 2).to(p.q.dtype)


def _transformers(p: Problem) -> Tensor:
    """Run the PyTorch path of transformers' Qwen3-Next."""
    rule = import_module("transformers.models.qwen3_next.modeling_qwen3_next").torch_chunk_gated_delta_rule
    k, v, beta = _flat(p)
    g = torch.zeros_like(beta) if p.g is None else p.g
    return rule(p.q, k, v, g=g, beta=beta, use_qk_l2norm_in_kernel=p.norm)[0]


def _fla(name: str, p: Problem) -> Tensor:
    k, v, beta = _flat(p)
    gate = () if name == "delta_rule" else (p.g,)
    steps = (p.shape.num_householder,) if name == "gated_delta_product" else ()
    kernel = getattr(import_module(f"fla.ops.{name}"), f"chunk_{name}")
    return kernel(p.q, k, v, *gate, beta, *steps, use_qk_l2norm_in_kernel=p.norm)[0]


def _flash_qla(p: Problem) -> Tensor:
    kernel = import_module("flash_qla").chunk_gated_delta_rule
    k, v, beta = _flat(p)
    return kernel(q=p.q, k=k, v=v, g=p.g, beta=beta, use_qk_l2norm_in_kernel=p.norm)[0]


def _attn_gym(p: Problem) -> Tensor:
    """Run attn-gym, which takes beta in fp32, after its kernel for the norm."""
    linear = import_module("attn_gym.linear")
    (q, k), v, beta = (p.q, p.k.flatten(1, 2)), p.v.flatten(1, 2), p.beta.flatten(1, 2)
    q, k = (linear.l2norm(q), linear.l2norm(k)) if p.norm else (q, k)
    return linear.chunk_gdn(q, k, v, p.g, beta)[0]


# fla's gated delta rule may call FlashQLA if it is installed.
PEERS = {
    "fla": [
        Implementation("fla chunk_delta_rule", partial(_fla, "delta_rule"), _one_ungated_step),
        Implementation("fla chunk_gated_delta_rule", partial(_fla, "gated_delta_rule"), _one_gated_step),
        Implementation("fla chunk_gated_delta_product", partial(_fla, "gated_delta_product"), _several_steps),
    ],
    "flash_qla": [Implementation("FlashQLA chunk_gated_delta_rule", _flash_qla, _one_gated_step)],
    "attn_gym": [Implementation("attn-gym chunk_gdn", _attn_gym, _one_gated_step)],
}


def run(options: Namespace, report: Report) -> None:
    """Measure each shape.

    Raises:
        ValueError: the options do not fit together.
    """
    if options.heads % options.group:
        raise ValueError(f"--heads {options.heads} is not a multiple of --group {options.group}")
    if options.peers and options.group > 1:
        raise ValueError("--peers need as many heads of q and k as of v: leave out --group")
    device, dtype = report.device, report.dtype
    implementations = ours(dict.fromkeys(resolve_backend(name, device) for name in options.backends))
    if options.peers:
        others, missing = peers(device)
        implementations += others
        report.print(f"not installed: {', '.join(missing) or 'none'}")
    sizes = (options.batch, options.tokens, options.heads, options.head_dim)
    value_dim, gates = options.value_dim or options.head_dim, (True, False)

    def problem(num_householder: int, gated: bool) -> Problem:
        shape = Shape(*sizes, value_dim, num_householder, gated, dtype.itemsize, options.group)
        return make_problem(shape, dtype, device, norm=options.norm)

    rows = (
        {"n_h": n, "gate": gated} | row
        for n, gated in product(options.num_householder, gates if options.gate is None else [options.gate])
        for row in compare(problem(n, gated), implementations, report, graphs=options.graphs)
    )
    report.table("rows", ("n_h", "gate", *COLUMNS), rows)
