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

from tests.kernels.ptx import BITS, TYPES, Array, Instruction, bfloat16, half, parse
from tests.kernels.ptx_threads import BASE, WARP, Threads
from tests.untraced import untraced

SHARED = 232448  # bytes of shared memory
SPACE = 34  # an address is (number of the buffer) << SPACE, plus bytes


@dataclass(frozen=True)
class Matrix:
    """What a descriptor of the copy engine names: 16-bit numbers, copied in boxes of `rows` x 64."""

    bits: Array
    rows: int


class Program(Threads):
    """One program: its threads and shared memory.

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
        super().__init__(warps, number, programs)
        self.code, self.labels = parse(ptx)
        self.parameters, self.buffers = parameters, buffers
        self.shared = np.full(BASE + SHARED, 0xFF, np.uint8)  # NaN
        self.bars: dict[int, SimpleNamespace] = {}

    @untraced
    def run(self, order: Sequence[int]) -> None:
        """Run the warps, always the first of `order` first that can go on."""
        places, before = [0] * self.warps, None
        while places != before and min(places) < len(self.code):
            before = list(places)
            for warp in order:
                self.lanes = slice(WARP * warp, WARP * (warp + 1))
                places[warp] = self._run_warp(places[warp])
            for first in range(0, self.warps, 4):
                place, *others = places[first : first + 4]
                if others == [place] * 3 and self._is_at(place, "wgmma", "mma_async"):
                    self._product(self.code[place], slice(WARP * first, WARP * (first + 4)))
                    places[first : first + 4] = [place + 1] * 4
            if len(set(places)) == 1 and self._is_at(places[0], "bar", "sync"):
                places = [places[0] + 1] * self.warps
        assert min(places) == len(self.code), "warps that wait for ever"

    def _is_at(self, place: int, *name: str) -> bool:
        return place < len(self.code) and self.code[place].parts[: len(name)] == name

    def _run_warp(self, place: int) -> int:
        """Up to where this warp must wait for others, or for a copy."""
        while place < len(self.code):
            code = self.code[place]
            match code.parts:
                case ("bar", "sync") | ("wgmma", "mma_async", *_):
                    return place
                case ("mbarrier", "try_wait", *_):
                    bar = self.bars[int(self._address(code.operands[1])[0])]
                    if bar.phase % 2 == int(self._value(code.operands[2])[0]):
                        return place
                case ("ret",):
                    return len(self.code)
                case ("bra", *_):
                    taken = self._active(code)
                    assert taken.all() or not taken.any(), "threads of a warp part ways"
                    if taken[0]:
                        place = self.labels[code.operands[0]]
                        continue
                case ("fence" | "wgmma", *_):
                    pass
                case _:
                    self._execute(code)
            place += 1
        return place

    def _execute(self, code: Instruction) -> None:
        try:
            getattr(self, f"_{code.parts[0]}", self._simple)(code, self._active(code))
        except (KeyError, IndexError, ValueError, TypeError) as failure:
            raise NotImplementedError(f"{code.text}: {failure!r}") from failure

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
            whole = self._register(name)
            whole[group] = (part + whole[group].view(np.float32) if keep else part).view(np.uint32)
