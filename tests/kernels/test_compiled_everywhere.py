"""Every Triton kernel compiles for an A100, an H100 and a B200, and fits into shared and tensor memory."""

import re
from pathlib import Path

import pytest

from fla_train.kernels import fused_ops
from tests.kernels.compiled_everywhere import SHARED, TENSOR, compile_everywhere

KERNELS = Path(fused_ops.__file__).parents[1]
FOLDERS = ("fused_ops", "delta_product/triton", "delta_product/hopper")
# Kernels that a GPU of that compute capability has no use for.
ELSEWHERE = {
    "8.0": ("fused_ops.float8", "delta_product.hopper"),
    "9.0": ("delta_product.triton.chunk_bwd.chunk_bwd_qkg_kernel",),  # in Gluon
    "10.0": ("delta_product.hopper",),
}


@pytest.mark.long
@pytest.mark.timeout(3000)
@pytest.mark.parametrize("architecture", SHARED)
def test_every_kernel_compiles_and_fits(architecture: str) -> None:
    found = compile_everywhere(architecture)
    assert all(kernel.shared <= SHARED[architecture] and kernel.tensor <= TENSOR for kernel in found)
    there = {
        ".".join((*path.relative_to(KERNELS).with_suffix("").parts, name))
        for folder in FOLDERS
        for path in (KERNELS / folder).glob("*.py")
        for name in re.findall(r"^def (\w+_kernel)\(", path.read_text(), re.MULTILINE)
    }
    missing = there - {f"{kernel.module}.{kernel.name}" for kernel in found}
    assert all(name.startswith(ELSEWHERE[architecture]) for name in missing), missing
