"""Every Triton kernel compiles for an A100, an H100 and a B200, and fits into their shared memory."""

import re
from pathlib import Path

import pytest

from fla_train.kernels import fused_ops
from tests.kernels.compiled_everywhere import SHARED, compile_everywhere

KERNELS = Path(fused_ops.__file__).parents[1]


@pytest.mark.long
@pytest.mark.timeout(3000)
@pytest.mark.parametrize("architecture", SHARED)
def test_every_kernel_compiles_and_fits(architecture: str) -> None:
    found = compile_everywhere(architecture)
    assert all(kernel.shared <= SHARED[architecture] for kernel in found)
    folders = ("fused_ops", "delta_product/triton")
    text = "\n".join(path.read_text() for folder in folders for path in (KERNELS / folder).glob("*.py"))
    names = {kernel.name for kernel in found}
    missing = set(re.findall(r"^def (\w+_kernel)\(", text, re.MULTILINE)) - names
    elsewhere = {
        "8.0": set(
            re.findall(r"^def (\w+_kernel)\(", (KERNELS / "fused_ops/float8.py").read_text(), re.MULTILINE)
        ),
        "9.0": {"chunk_prepare_wy_kernel", "chunk_bwd_state_kernel", "chunk_bwd_qkg_kernel"},  # in Gluon
    }
    assert missing <= elsewhere.get(architecture, set())
