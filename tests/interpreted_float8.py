"""Triton's interpreter (3.7.1) makes 4 of 7.9 in e4m3; with this it rounds to the nearest float8 number."""

import numpy as np
import pytest
import torch
import triton.language as tl
from triton.runtime import interpreter

TYPES = {tl.float8e4nv: torch.float8_e4m3fn, tl.float8e5: torch.float8_e5m2}


def round_to_nearest(monkeypatch: pytest.MonkeyPatch) -> None:
    convert = interpreter._convert_float

    def rounding(x: np.ndarray, before: tl.dtype, after: tl.dtype, mode: object) -> np.ndarray:
        if after not in TYPES:
            return convert(x, before, after, mode)
        assert before == tl.float32
        return torch.from_numpy(x.view(np.float32).copy()).to(TYPES[after]).view(torch.uint8).numpy()

    monkeypatch.setattr(interpreter, "_convert_float", rounding)
