"""What threads of PTX do without memory: registers, addresses and plain instructions, a warp at a time."""

from functools import cache

import numpy as np

from tests.kernels.ptx import (
    BITS,
    COMPARE,
    SIMPLE,
    TYPES,
    Array,
    Instruction,
    bfloat16,
    bfloat16_bits,
    half,
    half_bits,
)

BASE = 1024  # where a program's shared memory begins
WARP = 32
ALL = np.ones(WARP, bool)


@cache
def constant(operand: str, kind: type) -> Array:
    """A number, the address of shared memory, or a parameter's number; not to be written to."""
    if operand == "global_smem":
        return np.full(WARP, BASE, kind)
    if "_param_" in operand:
        return np.full(WARP, int(operand.rsplit("_", 1)[1]), kind)
    if operand.startswith("0f"):
        return np.full(WARP, int(operand[2:], 16), np.uint32).view(kind)
    number = int(operand.rstrip("U"), 0)
    if kind is bool:
        return np.full(WARP, number != 0)
    size = np.dtype(kind).itemsize
    return np.full(WARP, number % (1 << 8 * size), BITS[size]).view(kind)


class Threads:
    """The registers of program `number` of `programs`, and the instructions that need nothing else.

    Those of `name` are done by the method `_name`, the simplest by `_simple`, for the running warp's threads.
    """

    def __init__(self, warps: int, number: int, programs: int):
        self.warps = warps
        self.registers: dict[str, Array] = {}
        self.lanes = slice(0, 0)  # the threads of the running warp
        self._places = {"%ctaid.x": number, "%nctaid.x": programs}

    def _active(self, code: Instruction) -> Array:
        if code.guard is None:
            return ALL
        return self.registers[code.guard[0]][self.lanes] ^ code.guard[1]

    def _value(self, operand: str, kind: type = np.uint32) -> Array:
        if operand in self.registers:
            value = self.registers[operand][self.lanes]
            same = value.dtype != bool and value.dtype.itemsize == np.dtype(kind).itemsize
            return value.view(kind) if same else value.astype(kind)
        if operand == "%tid.x":
            return np.arange(self.lanes.start, self.lanes.stop, dtype=np.uint32)
        if operand in self._places:
            return np.full(WARP, self._places[operand], np.uint32)
        return constant(operand, kind)

    def _put(self, register: str, value: Array, active: Array = ALL) -> None:
        value = np.ascontiguousarray(value)
        if value.dtype != bool:
            value = value.view(BITS[value.dtype.itemsize])
        whole = self._register(register, value.dtype)
        whole[self.lanes] = value if active is ALL else np.where(active, value, whole[self.lanes])

    def _register(self, name: str, dtype: type = np.uint32) -> Array:
        """That of all threads."""
        if name not in self.registers:
            self.registers[name] = np.zeros(WARP * self.warps, dtype)
        return self.registers[name]

    def _address(self, operand: str) -> Array:
        register, _, offset = operand.strip("[] ").partition("+")
        kind = np.uint64 if register.startswith("%rd") else np.uint32
        return self._value(register.strip(), kind).astype(np.int64) + int(offset or 0)

    @staticmethod
    def _list(operand: str) -> list[str]:
        return [name.strip() for name in operand.strip("{} ").split(",")]

    def _elect(self, code: Instruction, _: Array) -> None:
        self._put(code.operands[0].split("|")[1], np.arange(32) == 0)

    def _shfl(self, code: Instruction, active: Array) -> None:
        lane, number = np.arange(32), self._value(code.operands[2]).astype(int)
        source = {"bfly": lane ^ number, "idx": number, "up": np.maximum(lane - number, 0)}
        assert code.parts[2] != "idx" or (number < 32).all()
        value = self._value(code.operands[1])
        target, _, inside = code.operands[0].partition("|")
        self._put(target, value[source[code.parts[2]]], active)
        if inside:
            self._put(inside, lane >= number if code.parts[2] == "up" else np.ones(32, bool), active)

    def _cvta(self, code: Instruction, _: Array) -> None:
        self._put(code.operands[0], self._value(code.operands[1], np.uint64))

    def _cvt(self, code: Instruction, active: Array) -> None:
        (target, *operands), (to, source) = code.operands, code.parts[-2:]
        rounded = {"bf16": bfloat16_bits, "f16": half_bits}
        if to[:-2] in rounded:  # two in a register, the first of them above
            high, low = (rounded[to[:-2]](self._value(x, np.float32)) for x in operands)
            value = high.astype(np.uint32) << 16 | low
        elif to in rounded:
            value = rounded[to](self._value(operands[0], np.float32))
        elif source in rounded:
            value = {"bf16": bfloat16, "f16": half}[source](self._value(operands[0], np.uint16))
        else:
            value = self._value(operands[0], TYPES[source]).astype(TYPES[to])
        self._put(target, value, active)

    def _setp(self, code: Instruction, active: Array) -> None:
        a, b = (self._value(x, TYPES[code.parts[-1]]) for x in code.operands[1:])
        self._put(code.operands[0], COMPARE[code.parts[1]](a, b), active)

    def _selp(self, code: Instruction, active: Array) -> None:
        a, b = (self._value(x, TYPES[code.parts[-1]]) for x in code.operands[1:3])
        self._put(code.operands[0], np.where(self._value(code.operands[3], bool), a, b), active)

    def _bfe(self, code: Instruction, active: Array) -> None:
        start, count = map(int, code.operands[2:])
        self._put(code.operands[0], self._value(code.operands[1]) >> start & (1 << count) - 1, active)

    def _prmt(self, code: Instruction, active: Array) -> None:
        low, high = (self._value(x).astype(np.uint64) for x in code.operands[1:3])
        both, chosen = low | high << np.uint64(32), int(code.operands[3].rstrip("U"), 0)
        value = np.zeros(32, np.uint64)
        for i in range(4):
            source = chosen >> 4 * i & 15
            assert source < 8
            value |= (both >> np.uint64(8 * source) & np.uint64(255)) << np.uint64(8 * i)
        self._put(code.operands[0], value.astype(np.uint32), active)

    def _simple(self, code: Instruction, active: Array) -> None:
        """Arithmetic, and moves between registers and halves of them."""
        target, *operands = code.operands
        kind = TYPES[code.parts[-1]]
        if target.startswith("{"):
            value = self._value(operands[0])
            for i, name in enumerate(self._list(target)):
                self._put(name, (value >> 16 * i & 0xFFFF).astype(np.uint16))
            return
        if operands[0].startswith("{"):
            low, high = (self._value(x, np.uint16).astype(np.uint32) for x in self._list(operands[0]))
            return self._put(target, low | high << 16)
        if code.parts[0] in ("shl", "shr"):
            value, count = self._value(operands[0], kind), self._value(operands[1])
            shift = np.left_shift if code.parts[0] == "shl" else np.right_shift
            return self._put(target, shift(value, count.astype(value.dtype)), active)
        values = [self._value(x, kind) for x in operands]
        size = np.dtype(kind).itemsize
        if {"wide", "hi"} & set(code.parts):
            wide = np.dtype(f"{np.dtype(kind).kind}{2 * size}")
            values = [x.astype(wide) for x in values[:2]] + [self._value(x, wide) for x in operands[2:]]
            value = SIMPLE[code.parts[0]](*values)
            value = (value >> wide.type(8 * size)).astype(kind) if "hi" in code.parts else value
        else:
            value = SIMPLE[code.parts[0]](*values).astype(kind)
        self._put(target, value, active)
