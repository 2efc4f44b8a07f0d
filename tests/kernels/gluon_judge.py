"""Gluon kernels on the CPU in place of the Triton ones, judged by the float64 recurrence."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from types import ModuleType

import pytest
import torch
from torch import Tensor

from fla_train.kernels.delta_product.hopper import bwd_fused, bwd_qkg, bwd_qkg_wide, prepare_wy
from fla_train.kernels.delta_product.select import MAX_KEY_DIM, Selection, override, select_for
from fla_train.kernels.delta_product.triton import chunk, chunk_launch
from tests.kernels.operator_cases import Case, assert_close, backward, forward, make_inputs, results

MODULES: dict[str, ModuleType] = {
    "prepare_wy": prepare_wy,
    "bwd_qkg": bwd_qkg,
    "bwd_qkg_wide": bwd_qkg_wide,
    "bwd_fused": bwd_fused,
}
# Tensors that a kernel reads by the copy engine.
TILED = {
    "prepare_wy": ("q", "k"),
    "bwd_qkg": ("q", "k", "do", "dv", "u", "states", "dstates"),
    "bwd_qkg_wide": ("q", "k", "do", "dv", "u", "states", "dstates"),
    "bwd_fused": ("q", "k", "do", "u", "wy", "p", "states"),
}
# Runs a kernel on the arguments of the Triton ones: (arguments, programs, chunks or sequences x heads).
Launch = Callable[[dict, int, int], None]


def judge(
    name: str, case: Case, launch: Launch, bounds: dict[str, float], chunks: int = 0, launches: int = 1
) -> None:
    """`launch` of the kernel leads to results within `bounds` of the recurrence.

    Sequences are split into segments of so many chunks, or not at all. The other kernels are Triton's,
    interpreted, which takes longer than all the rest; so what comes before a kernel of the backward pass runs
    once for all of them.
    """
    inputs, gradients = _given(case)
    launched = []

    def count(*arguments: object) -> None:
        launched.append(arguments)
        launch(*arguments)

    with replaced(name, count, launches), override(segment_chunks=chunks):
        if name == "prepare_wy":
            found = results(case, inputs, *gradients, backend="triton")
        else:
            outputs, leaves = _forward(case, chunks)
            found = outputs | backward(outputs, leaves, *gradients)
    assert len(launched) == launches
    assert_close(found, _expected(case), bounds)


@contextmanager
def replaced(name: str, launch: Launch, launches: int = 1) -> Iterator[None]:
    """Inside, the Triton backend has `launch` run the Gluon kernel of that name.

    `bwd_fused` runs in so many launches.
    """

    def run(programs: int, **arguments: object) -> None:
        # Of two programs of `bwd_qkg`, each has several chunks.
        launch(arguments, min(2, programs) if "qkg" in name else programs, programs)

    def select(*arguments: object) -> Selection:
        selection = select_for(*arguments)
        if name == "bwd_fused":
            return replace(selection, fused_backward=True, fused_launches=launches)
        kernel = f"chunk_{name}".removesuffix("_wide")
        return replace(selection, **{kernel: replace(getattr(selection, kernel), hopper=True)})

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(MODULES[name], "launch", run)
        for module in (chunk, chunk_launch):
            patch.setattr(module, "select_for", select)
        # A GPU's limit; emulated, numbers of 16 bits have 32
        patch.setitem(MAX_KEY_DIM, torch.float32, 256)
        yield


@cache
def _given(case: Case) -> tuple[list[Tensor | None], list[Tensor | None]]:
    """Inputs, and gradients of the outputs."""
    inputs, *gradients = make_inputs(case, "cpu")
    return inputs, gradients


@cache
def _expected(case: Case) -> dict[str, Tensor]:
    inputs, gradients = _given(case)
    return results(case, inputs, *gradients, "recurrent", torch.float64)


@cache
def _forward(case: Case, chunks: int) -> tuple[dict[str, Tensor], list[Tensor | None]]:
    """Inside `override(segment_chunks=chunks)`."""
    return forward(case, _given(case)[0], backend="triton")
