"""Fixtures shared by the kernels' tests."""

from collections.abc import Iterator

import pytest
import torch

from fla_train.kernels.delta_product.select import override


@pytest.fixture
def poisoned_memory() -> Iterator[None]:
    """Fresh memory is filled with NaN, so that an element which is read but was never written shows."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    assert torch.empty(3).isnan().all() and torch.zeros(3).new_empty(3).isnan().all()
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture
def by_chunks() -> Iterator[None]:
    """Narrow heads in float32, the interpreter's cheapest cases, go by chunks as all others do."""
    with override(algorithm="chunk"):
        yield


@pytest.fixture(params=["chunk", "triton by chunks", "triton step by step"])
def backend(request: pytest.FixtureRequest) -> str:
    if request.param == "triton by chunks":
        request.getfixturevalue("by_chunks")
    return request.param.split()[0]
