"""Runs the PTX that Triton makes of a Gluon kernel for sm_90a on the CPU.

Shared memory with its swizzle, the copy engine, matrix products and their descriptors, `ldmatrix` and
`stmatrix` are as the PTX manual has them, so layouts are tested without a GPU: what `emulated_gluon` leaves
out. Warps run one at a time, in any order, up to the next barrier of threads. What is asynchronous happens at
once, and the assembler's part isn't seen. Fails at what isn't known.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import SimpleNamespace

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
    parse,
)

BASE = 1024  # where a program's shared memory begins
SHARED = 232448  # bytes of it
SPACE = 34  # an address is (number of the buffer) << SPACE, plus bytes


@dataclass(frozen=True)
class Matrix:
    """What a descriptor of the copy engine names: 16-bit numbers, copied in boxes of `rows` x 64."""

    bits: Array
    rows: int


class Program:
    """One program's threads, registers and shared memory.

    Args:
        parameters: by number; matrices in place of descriptors.
        buffers: bytes in device memory by number; they are written to.
    """

    def __init__(
        self,
        ptx: str,
        warps: int,
        number: int,
        programs: int,
        parameters: Mapping[int, int | float | Matrix],
        buffers: Mapping[int, Array],
    ):
        self.code, self.labels = parse(ptx)
        self.warps, self.parameters, self.buffers = warps, parameters, buffers
        self.places = {"%ctaid.x": number, "%nctaid.x": programs}
        self.registers: dict[str, Array] = {}
        self.shared = np.full(BASE + SHARED, 0xFF, np.uint8)  # NaN
        self.bars: dict[int, SimpleNamespace] = {}
        self.lanes = slice(0, 0)  # the threads of the running warp

    def run(self, order: Sequence[int]) -> None:
        """Run the warps, always the first of `order` first that can go on."""
        places = [0] * self.warps
        ahead = True
        while ahead and min(places) < len(self.code):
            ahead = False
            for warp in order:
                start = places[warp]
                self.lanes = slice(32 * warp, 32 * warp + 32)
                places[warp] = self._run_warp(start)
                ahead |= places[warp] != start
            for group in range(0, self.warps, 4):
                at = set(places[group : group + 4])
                if len(at) == 1 and (place := at.pop()) < len(self.code):
                    if self.code[place].name.startswith("wgmma.mma_async"):
                        self._product(self.code[place], slice(32 * group, 32 * group + 128))
                        places[group : group + 4] = [place + 1] * 4
                        ahead = True
            if len(set(places)) == 1 and min(places) < len(self.code):
                if self.code[places[0]].name == "bar.sync":
                    places = [places[0] + 1] * self.warps
                    ahead = True
        assert min(places) == len(self.code), "warps that wait for ever"

    def _run_warp(self, place: int) -> int:
        """Up to where this warp must wait for others, or for a copy."""
        while place < len(self.code):
            code = self.code[place]
            if code.name == "bar.sync" or code.name.startswith("wgmma.mma_async"):
                return place
            if code.parts[:2] == ("mbarrier", "try_wait"):
                bar = self.bars[int(self._address(code.operands[1])[0])]
                if bar.phase % 2 == int(self._value(code.operands[2])[0]):
                    return place
            elif code.name == "ret":
                return len(self.code)
            elif code.parts[0] == "bra":
                taken = self._active(code)
                assert taken.all() or not taken.any(), "threads of a warp part ways"
                if taken[0]:
                    place = self.labels[code.operands[0]]
                    continue
            elif code.parts[0] not in ("fence", "wgmma"):
                try:
                    getattr(self, f"_{code.parts[0]}", self._simple)(code, self._active(code))
                except (KeyError, IndexError, ValueError, TypeError) as failure:
                    raise NotImplementedError(f"{code.text}: {failure!r}") from failure
            place += 1
        return place

    # Registers and addresses

    def _active(self, code: Instruction) -> Array:
        if code.guard is None:
            return np.ones(32, bool)
        return self.registers[code.guard[0]][self.lanes] ^ code.guard[1]

    def _value(self, operand: str, kind: type = np.uint32) -> Array:
        if operand == "%tid.x":
            return np.arange(self.lanes.start, self.lanes.stop, dtype=np.uint32)
        if operand in self.places:
            return np.full(32, self.places[operand], np.uint32)
        if operand[0] == "%":
            value = self.registers[operand][self.lanes]
            same = value.dtype != bool and value.dtype.itemsize == np.dtype(kind).itemsize
            return value.view(kind) if same else value.astype(kind)
        if operand == "global_smem":
            return np.full(32, BASE, kind)
        if "_param_" in operand:
            return np.full(32, int(operand.rsplit("_", 1)[1]), kind)
        if operand.startswith("0f"):
            return np.full(32, int(operand[2:], 16), np.uint32).view(kind)
        number = int(operand.rstrip("U"), 0)
        if kind is bool:
            return np.full(32, number != 0)
        size = np.dtype(kind).itemsize
        return np.full(32, number % (1 << 8 * size), BITS[size]).view(kind)

    def _put(self, register: str, value: Array, active: Array | bool = True) -> None:
        value = np.ascontiguousarray(value)
        if value.dtype != bool:
            value = value.view(BITS[value.dtype.itemsize])
        whole = self.registers.setdefault(register, np.zeros(32 * self.warps, value.dtype))
        whole[self.lanes] = np.where(active, value, whole[self.lanes])

    def _address(self, operand: str) -> Array:
        register, _, offset = operand.strip("[] ").partition("+")
        kind = np.uint64 if register.startswith("%rd") else np.uint32
        return self._value(register.strip(), kind).astype(np.int64) + int(offset or 0)

    @staticmethod
    def _list(operand: str) -> list[str]:
        return [name.strip() for name in operand.strip("{} ").split(",")]

    # Memory

    def _memory(self, code: Instruction, address: Array, active: Array) -> tuple[Array, Array]:
        """The bytes that hold the addresses, and the places in them."""
        if code.parts[1] == "shared":
            return self.shared, address
        numbers = np.unique(address[active] >> SPACE)
        assert len(numbers) <= 1, "two buffers at once"
        memory = self.buffers[int(numbers[0])] if len(numbers) else np.zeros(0, np.uint8)
        return memory, address & ((1 << SPACE) - 1)

    def _ld(self, code: Instruction, active: Array) -> None:
        registers, kind = self._list(code.operands[0]), TYPES[code.parts[-1]]
        if code.parts[1] == "param":
            value = self.parameters[int(re.search(r"_param_(\d+)", code.operands[1]).group(1))]
            kind = np.float32 if isinstance(value, float) else np.int64 if "%rd" in registers[0] else np.int32
            return self._put(registers[0], np.full(32, value).astype(kind))
        size = np.dtype(kind).itemsize
        memory, place = self._memory(code, self._address(code.operands[1]), active)
        for i, register in enumerate(registers):
            value = np.zeros((32, size), np.uint8)
            value[active] = memory[place[active, None] + i * size + np.arange(size)]
            self._put(register, value.view(BITS[size])[:, 0], active)

    def _st(self, code: Instruction, active: Array) -> None:
        kind = TYPES[code.parts[-1]]
        size = np.dtype(kind).itemsize
        memory, place = self._memory(code, self._address(code.operands[0]), active)
        for i, register in enumerate(self._list(code.operands[1])):
            value = np.ascontiguousarray(self._value(register, kind)).view(np.uint8).reshape(32, size)
            memory[place[active, None] + i * size + np.arange(size)] = value[active]

    def _ldmatrix(self, code: Instruction, _: Array) -> None:
        for register, places in zip(self._list(code.operands[0]), self._fragments(code, 1), strict=True):
            low, high = (self.shared[p].astype(np.uint32) | self._high(p) << 8 for p in places)
            self._put(register, low | high << 16)

    def _stmatrix(self, code: Instruction, _: Array) -> None:
        for register, places in zip(self._list(code.operands[1]), self._fragments(code, 0), strict=True):
            value = self._value(register)
            for place, bits in zip(places, (value & 0xFFFF, value >> 16), strict=True):
                self.shared[place], self.shared[place + 1] = bits & 0xFF, bits >> 8

    def _high(self, place: Array) -> Array:
        return self.shared[place + 1].astype(np.uint32)

    def _fragments(self, code: Instruction, operand: int) -> list[tuple[Array, Array]]:
        """Of each 8 x 8 matrix where the two numbers of each thread lie."""
        address, thread = self._address(code.operands[operand]), np.arange(32)
        first, second = thread // 4, 2 * (thread % 4)
        count = int(code.parts[4][1])
        if "trans" in code.parts:
            return [
                (address[8 * i + second] + 2 * first, address[8 * i + second + 1] + 2 * first)
                for i in range(count)
            ]
        rows = [address[8 * i + first] + 2 * second for i in range(count)]
        return [(row, row + 2) for row in rows]

    # Copies and products

    def _mbarrier(self, code: Instruction, active: Array) -> None:
        for lane in np.flatnonzero(active):
            if code.parts[1] == "init":
                assert code.operands[1] == "1"
                bar = SimpleNamespace(phase=0, arrived=False, bytes=0)
                self.bars[int(self._address(code.operands[0])[lane])] = bar
            else:
                bar = self.bars[int(self._address(code.operands[1])[lane])]
                bar.arrived = True
                self._come(bar, -int(self._value(code.operands[2])[lane]))

    def _come(self, bar: SimpleNamespace, count: int) -> None:
        bar.bytes += count
        if bar.arrived and bar.bytes == 0:
            bar.arrived, bar.phase = False, bar.phase + 1

    def _cp(self, code: Instruction, active: Array) -> None:
        descriptor, column, row = re.findall(r"%\w+", code.operands[1])
        for lane in np.flatnonzero(active):
            target, bar = (int(self._address(code.operands[i])[lane]) for i in (0, 2))
            matrix = self.parameters[int(self._value(descriptor, np.uint64)[lane])]
            i, j = (int(self._value(x, np.int32)[lane]) for x in (row, column))
            assert i >= 0 and j >= 0 and target % 1024 == 0
            box = np.zeros((matrix.rows, 64), np.uint16)
            found = matrix.bits[i : i + matrix.rows, j : j + 64]
            box[: found.shape[0], : found.shape[1]] = found
            place = self._swizzled(target + 128 * np.arange(matrix.rows)[:, None] + 2 * np.arange(64))
            self.shared[place], self.shared[place + 1] = box & 0xFF, box >> 8
            self._come(self.bars[bar], 2 * box.size)

    @staticmethod
    def _swizzled(place: Array) -> Array:
        return place ^ ((place >> 7 & 7) << 4)

    def _operand(self, descriptor: int, rows: int, transposed: bool) -> Array:
        """[rows, 16] bits of a product's operand."""
        start, leading, stride = ((descriptor >> shift & 0x3FFF) << 4 for shift in (0, 16, 32))
        assert descriptor >> 62 == 1 and descriptor >> 49 & 7 == 0, "another swizzle than that of 128 bytes"
        i, j = np.arange(rows)[:, None], np.arange(16)[None, :]
        if transposed:
            place = start + i % 64 * 2 + i // 64 * leading + j % 8 * 128 + j // 8 * stride
        else:
            place = start + i % 8 * 128 + i // 8 * stride + j * 2
        place = self._swizzled(place)
        return self.shared[place].astype(np.uint16) | self.shared[place + 1].astype(np.uint16) << 8

    def _left(self, names: str, group: slice) -> Array:
        """[64, 16] bits of a left operand in registers."""
        thread, bits = np.arange(128), np.zeros((64, 16), np.uint16)
        row, column = 16 * (thread // 32) + thread % 32 // 4, 2 * (thread % 4)
        for i, name in enumerate(self._list(names)):
            value = self.registers[name][group]
            for j in range(2):
                bits[row + 8 * (i % 2), column + 8 * (i // 2) + j] = value >> 16 * j & 0xFFFF
        return bits

    def _product(self, code: Instruction, group: slice) -> None:
        """One matrix instruction of the four warps that are `group`."""
        columns = int(re.search(r"m64n(\d+)k16", code.name).group(1))
        number = bfloat16 if code.parts[-1] == "bf16" else half
        registers, factors = self._list(code.operands[0]), []
        transposed = [x == "1" for x in code.operands[6:]]
        assert code.operands[4:6] == ("1", "1") and len(registers) == columns // 2
        for name, rows in zip(code.operands[1:3], (64, columns), strict=True):
            if name.startswith("{"):
                factors.append(number(self._left(name, group)))
                continue
            descriptors = self.registers[name][group]
            assert (descriptors == descriptors[0]).all()
            factors.append(number(self._operand(int(descriptors[0]), rows, transposed.pop(0))))
        product = (factors[0].astype(np.float64) @ factors[1].T.astype(np.float64)).astype(np.float32)
        keep = code.operands[3] != "0" and self.registers[code.operands[3]][group.start]
        thread = np.arange(128)
        row, column = 16 * (thread // 32) + thread % 32 // 4, 2 * (thread % 4)
        for i, name in enumerate(registers):
            part = product[row + 8 * (i % 4 // 2), column + 8 * (i // 4) + i % 2]
            whole = self.registers.setdefault(name, np.zeros(32 * self.warps, np.uint32))
            whole[group] = (part + whole[group].view(np.float32) if keep else part).view(np.uint32)

    # The rest

    def _elect(self, code: Instruction, _: Array) -> None:
        self._put(code.operands[0].split("|")[1], np.arange(32) == 0)

    def _shfl(self, code: Instruction, active: Array) -> None:
        lane, number = np.arange(32), int(code.operands[2])
        source = {"bfly": lane ^ number, "idx": np.full(32, number), "up": np.maximum(lane - number, 0)}
        assert code.parts[2] != "idx" or number < 32
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
