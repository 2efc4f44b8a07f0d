"""The text of PTX, the kinds of its numbers, and what its plain instructions compute."""

import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import numpy as np
from numpy.typing import NDArray

Array = NDArray
TYPES = {
    **{"b16": np.uint16, "u16": np.uint16, "s16": np.int16, "b32": np.uint32, "u32": np.uint32},
    **{"s32": np.int32, "f32": np.float32, "b64": np.uint64, "u64": np.uint64, "s64": np.int64, "pred": bool},
}
BITS = {2: np.uint16, 4: np.uint32, 8: np.uint64}
COMPARE = {
    **{"eq": np.equal, "ne": np.not_equal, "lt": np.less},
    **{"le": np.less_equal, "gt": np.greater, "ge": np.greater_equal},
}
SIMPLE: dict[str, Callable[..., Array]] = {
    **{"mov": lambda a: a, "add": np.add, "sub": np.subtract, "mul": np.multiply, "neg": np.negative},
    **{"and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor, "not": np.invert, "ex2": np.exp2},
    **{"mad": lambda a, b, c: a * b + c, "max": np.fmax, "min": np.fmin, "rsqrt": lambda a: 1 / np.sqrt(a)},
    "fma": lambda a, b, c: a.astype(np.float64) * b + c,
    "abs": np.abs,
    "rem": np.fmod,
    "div": lambda a, b: a / b if a.dtype == np.float32 else a // b,
}


def bfloat16(bits: Array) -> Array:
    return (bits.astype(np.uint32) << 16).view(np.float32)


def bfloat16_bits(x: Array) -> Array:
    """Rounded to the nearest, ties to even."""
    bits = np.ascontiguousarray(x, np.float32).view(np.uint32)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    return np.where(np.isnan(x), 0x7FC0, rounded).astype(np.uint16)


def half(bits: Array) -> Array:
    return bits.astype(np.uint16).view(np.float16).astype(np.float32)


def half_bits(x: Array) -> Array:
    return x.astype(np.float16).view(np.uint16)


@dataclass(frozen=True)
class Instruction:
    text: str
    name: str
    parts: tuple[str, ...]  # of the name
    operands: tuple[str, ...]
    guard: tuple[str, bool] | None  # the predicate, and whether it is negated


@cache
def parse(ptx: str) -> tuple[list[Instruction], dict[str, int]]:
    """Instructions of the only kernel, and the labels' places among them."""
    found, labels = [], {}
    for raw in ptx[ptx.index("\n{\n") :].split("\n"):
        line = raw.split("//")[0].strip().rstrip(";").strip()
        if label := re.match(r"(\$L_\w+):", line):
            labels[label.group(1)] = len(found)
        elif line and line not in "{}" and not line.startswith((".", "waitLoop", "@!complete")):
            guard = re.match(r"@(!?)(%p\d+)\s+(.*)", line)
            name, _, rest = (guard.group(3) if guard else line).replace("\t", " ").partition(" ")
            operands = re.findall(r"\[[^\]]*\]|\{[^}]*\}|[^,\s]+", rest)
            parts, negated = tuple(name.split(".")), guard and (guard.group(2), guard.group(1) == "!")
            found.append(Instruction(line, name, parts, tuple(operands), negated))
    return found, labels
