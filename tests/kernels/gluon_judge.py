"""Gluon kernels on the CPU in place of the Triton ones, judged by the float64 recurrence."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from types import ModuleType, SimpleNamespace

import pytest
import torch
from torch import Tensor

from fla_train.kernels.delta_product.hopper import bwd_fused, bwd_qkg, prepare_wy
from fla_train.kernels.delta_product.triton import chunk_launch
from fla_train.kernels.delta_product.triton.sequence_split import cutting
from tests.kernels.operator_cases import Case, assert_close, backward, forward, make_inputs, results

MODULES: dict[str, ModuleType] = {
    "gradient": bwd_qkg,
    "prepare": prepare_wy,
    "reverse": bwd_fused,
}
# Tensors that a kernel reads by the copy engine.
TILED = {
    "prepare": ("q", "k"),
    "gradient": ("q", "k", "do", "dv", "errors", "states", "dstates"),
    "reverse": (*bwd_fused.ROW_TILES, *bwd_fused.STATE_TILES),
}
# Runs a kernel on the arguments of the Triton ones: (arguments, programs, chunks or sequences x heads).
Launch = Callable[[dict, int, int], None]


def judge(
    name: str,
    case: Case,
    launches: Sequence[Launch],
    bounds: dict[str, float],
    dtype: torch.dtype = torch.float32,
    piece: int = 0,
) -> None:
    """All of `launches` of the kernel lead to the same bits, within `bounds` of the recurrence.

    The tensors that are q, k, v and dO hold numbers of `dtype`; sequences are cut into pieces of so many
    chunks, or not at all. The other kernels are Triton's, interpreted,
    which takes longer than all the rest; so what comes before a kernel of the backward pass runs once.
    """
    inputs, gradients = _rounded(case, dtype)
    found = []
    for launch in launches:
        with replaced(name, launch), cutting(piece):
            if name == "prepare":
                found.append(results(case, inputs, *gradients, backend="triton"))
            else:
                outputs, leaves = _forward(case, dtype, piece)
                found.append(outputs | backward(outputs, leaves, *gradients))
    assert_close(found[0], results(case, inputs, *gradients, "recurrent", torch.float64), bounds)
    for other in found[1:]:
        assert all(torch.equal(x, other[key]) for key, x in found[0].items()), "launches that differ"


@contextmanager
def replaced(name: str, launch: Launch) -> Iterator[None]:
    """Inside, the Triton backend has `launch` run the kernel of that name."""

    class Kernel:
        def __init__(self, arg_names: Sequence[str]) -> None:
            self.arg_names = arg_names

        def __getitem__(self, grid: tuple[int]) -> Callable[..., None]:
            # Of two programs of `gradient`, each has several chunks.
            programs = min(2, grid[0]) if name == "gradient" else grid[0]
            return lambda **arguments: launch(arguments, programs, grid[0])

    whole = SimpleNamespace(fits=lambda *_: True, launch=lambda arguments, n: launch(arguments, n, n))
    with pytest.MonkeyPatch.context() as patch:
        if name == "reverse":
            only = {"bwd_fused": whole}
            patch.setattr(chunk_launch, "_hopper", lambda _, module: only.get(module))
        else:
            arg_names = getattr(chunk_launch, f"{name}_kernel").arg_names
            patch.setattr(chunk_launch, f"{name}_kernel", Kernel(arg_names))
        yield


@cache
def _rounded(case: Case, dtype: torch.dtype) -> tuple[list[Tensor | None], list[Tensor | None]]:
    """Inputs, and gradients of the outputs."""
    inputs, *gradients = make_inputs(case, "cpu")
    *inputs[:3], gradients[0] = (x.to(dtype).float() for x in (*inputs[:3], gradients[0]))
    return inputs, gradients


@cache
def _forward(case: Case, dtype: torch.dtype, piece: int) -> tuple[dict[str, Tensor], list[Tensor | None]]:
    """Inside `cutting(piece)`."""
    return forward(case, _rounded(case, dtype)[0], backend="triton")
