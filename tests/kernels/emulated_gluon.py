"""Runs a Gluon kernel's Python on the CPU: tensors for tiles, under the rules of Hopper's asynchronous units.

Layouts are ignored, numbers of 16 bits have 32, and programs run one after the other. Fails where the
hardware could go wrong unseen: a tile that was never filled or is still on its way, a product of a tile that
was stored without a fence and a barrier or that changes before the product has ended, a result that nobody
waited for, a load of what other threads have stored, without a barrier, a copy over a tile that threads may
still read, a copy or a store over one that another warp group's product may still read, a barrier's phase
that never completes, a copy that nobody waits for.
"""

import importlib.util
import inspect
import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from types import ModuleType, SimpleNamespace
from unittest.mock import patch

import torch
from torch import Tensor

from fla_train.kernels.delta_product.hopper import common, inside_chunk
from tests.kernels.emulated_memory import Descriptor, Pointer, Shared
from tests.untraced import untraced


class Emulator:
    """What the name `gl` and related ones mean to a kernel, and the state of one program.

    Args:
        late: copies arrive when they are waited for, instead of at once.
    """

    def __init__(self, *, late: bool):
        self.late = late
        self.reset(0, 1)

    def reset(self, program: int, programs: int) -> None:
        self.program, self.programs = program, programs
        self.memory: list[Shared] = []
        self.bars: dict[int, SimpleNamespace] = {}
        self.products: list[tuple] = []

    def init(self, shared: Shared, count: int) -> None:
        assert count == 1
        self.bars[shared.data.data_ptr()] = SimpleNamespace(expects=False, bytes=0, phase=0, copies=[])

    def expect(self, shared: Shared, count: int, pred: object = True) -> None:
        bar = self.bars[shared.data.data_ptr()]
        if pred:
            assert not bar.expects, "two expectations in a phase"
            bar.expects, bar.bytes = True, count

    def copy(self, source: Descriptor, place: list, shared: Shared, target: Shared, pred: object) -> None:
        if not pred:
            return
        (book,) = target.books
        assert not book.touched and not book.read, "a copy over a tile that threads may still use"
        assert not book.unfenced, "a copy over stores without a fence"
        read = any(book is tile.books[0] for _, tiles in self.products for tile, _ in tiles)
        assert not read, "a copy over a tile that a product reads"
        bar, tile = self.bars[shared.data.data_ptr()], source.tile(list(map(int, place)))
        target.data.copy_(torch.full_like(tile, torch.nan) if self.late else tile)
        book.empty = True
        bar.copies.append((target, tile))
        bar.bytes -= 2 * tile.numel()  # float32 here counts as what the kernel is written for, 16 bits
        if bar.expects and bar.bytes == 0:
            bar.expects, bar.phase = False, bar.phase + 1

    def wait(self, shared: Shared, phase: int) -> None:
        bar = self.bars[shared.data.data_ptr()]
        assert bar.phase % 2 != int(phase), "a phase that never completes"
        for target, tile in bar.copies:
            target.data.copy_(tile)
            target.books[0].empty = False
        bar.copies.clear()

    def barrier(self) -> None:
        for shared in self.memory:
            for book in shared.books:
                book.touched = book.written = book.read = False

    def fence(self) -> None:
        for shared in self.memory:
            for book in shared.books:
                book.unfenced = False

    def mma(self, a: Shared | Tensor, b: Shared, total: object, *, is_async: bool) -> SimpleNamespace:
        value = total.value if isinstance(total, SimpleNamespace) else total
        left = a.float() if isinstance(a, Tensor) else a.operand()
        result = SimpleNamespace(value=value + left @ b.operand())
        tiles = [tile for tile in (a, b) if isinstance(tile, Shared)]
        self.products.append((result, [(tile, tile.data.clone()) for tile in tiles]))
        return result

    def mma_wait(self, left: int, deps: list) -> list[Tensor] | Tensor:
        count = len(self.products) - left
        done, self.products = self.products[:count], self.products[count:]
        for tile, was in (pair for _, tiles in done for pair in tiles):
            same = torch.allclose(tile.data, was, rtol=0, atol=0, equal_nan=True)
            assert same, "a tile that changed in a product"
            tile.books[0].read = True  # this warp group has done with it
        assert all(any(dep is entry[0] for entry in done) for dep in deps), "a product still on its way"
        values = [dep.value for dep in deps]
        return values if len(values) > 1 else values[0]

    def allocate(self, dtype: torch.dtype, shape: list[int], layout: int) -> Shared:
        data = torch.zeros(shape, dtype=dtype)
        data = data.fill_(torch.nan) if dtype.is_floating_point else data
        return Shared.register(data, layout, self.memory)

    @staticmethod
    def load(p: Pointer, mask: object = True, other: float = 0.0) -> Tensor:
        offset, mask = torch.broadcast_tensors(torch.as_tensor(p.offset), torch.as_tensor(mask))
        inside = offset.where(mask, torch.zeros_like(offset))
        return torch.where(mask, p.data[inside], torch.as_tensor(other, dtype=p.data.dtype))

    @staticmethod
    def store(p: Pointer, value: Tensor, mask: object = True) -> None:
        offset, mask, value = torch.broadcast_tensors(*map(torch.as_tensor, (p.offset, mask, value)))
        p.store(offset[mask], value[mask])

    def add(self, p: Pointer, value: Tensor, mask: object, sem: str) -> None:
        assert sem == "relaxed"  # no thread waits for what another has added
        self.store(p, self.load(p, mask) + value, mask)

    @staticmethod
    def reduce(values: tuple, axis: int, combine: Callable) -> tuple:
        """Pairwise, by `combine` itself."""
        parts = list(zip(*(value.unbind(axis) for value in values), strict=True))
        while len(parts) > 1:
            parts = [combine(*a, *b) for a, b in zip(parts[::2], parts[1::2], strict=True)]
        return parts[0]

    @staticmethod
    def assembly(text: str, constraints: str, values: list, dtype: torch.dtype, **_: object) -> Tensor | int:
        """The shift of `rebuild`; `widened` has more, but not for tensors that are float32, as here."""
        assert (text, constraints, dtype) == ("shr.s32 $0, $1, 30;", "=r,r", torch.int32)
        return values[0] >> 30

    def language(self) -> SimpleNamespace:
        def number(x: object) -> Tensor:
            return torch.as_tensor(x)

        dtypes = {name: getattr(torch, name) for name in ("float32", "bfloat16", "int32", "int64")}
        shared_layouts = {
            "NVMMASharedLayout": lambda width, bits, rank: rank,
            "SwizzledSharedLayout": lambda vec, per_phase, max_phase, order: len(order),
        }
        layouts = ("SliceLayout", "BlockedLayout", "NVMMADistributedLayout", "DotOperandLayout")
        return SimpleNamespace(
            **dtypes,
            float16=torch.float32,
            **shared_layouts,
            **dict.fromkeys(layouts, lambda *_: None),
            constexpr=lambda value: value,
            pointer_type=lambda dtype: dtype,
            program_id=lambda axis: torch.tensor(self.program),
            num_programs=lambda axis: self.programs,
            arange=lambda start, end, layout=None: torch.arange(start, end),
            zeros=lambda shape, dtype, layout=None: torch.zeros(shape, dtype=dtype),
            where=lambda c, a, b: torch.where(c, number(a), number(b)),
            exp2=lambda x: torch.exp2(number(x)),
            rsqrt=torch.rsqrt,
            gather=lambda x, index, axis: x.gather(axis, index),
            associative_scan=lambda x, axis, combine: x.cumsum(axis),
            sum=lambda x, axis: x.sum(axis),
            max=lambda x, axis: x.amax(axis),
            abs=lambda x: number(x).abs(),
            reshape=torch.reshape,
            minimum=lambda a, b: torch.minimum(number(a), number(b)),
            maximum=lambda a, b: torch.maximum(number(a), number(b)),
            convert_layout=lambda x, layout: x,
            static_range=range,
            load=self.load,
            store=self.store,
            atomic_add=self.add,
            reduce=self.reduce,
            inline_asm_elementwise=self.assembly,
            allocate_shared_memory=self.allocate,
            shared_memory_descriptor=Shared,
            thread_barrier=self.barrier,
        )

    def load_kernel(self, path: Path) -> ModuleType:
        """The module at `path`, with this emulator in place of Gluon."""

        def jit(function: Callable | None = None, **_: object) -> Callable:
            return function or jit

        hopper = SimpleNamespace(
            fence_async_shared=self.fence,
            mbarrier=SimpleNamespace(
                MBarrierLayout=lambda: 1, init=self.init, expect=self.expect, wait=self.wait
            ),
            tma=SimpleNamespace(async_load=self.copy),
            warpgroup_mma=self.mma,
            warpgroup_mma_wait=self.mma_wait,
        )
        gluon = "triton.experimental.gluon"
        modules = {
            "triton.experimental": SimpleNamespace(gluon=SimpleNamespace(jit=jit)),
            gluon: SimpleNamespace(jit=jit, language=self.language()),
            f"{gluon}.language.nvidia.hopper": hopper,
            f"{gluon}.nvidia.hopper": SimpleNamespace(TensorDescriptor=object),
        }
        with patch.dict(sys.modules, modules):
            files = {module.__name__: Path(module.__file__) for module in (common, inside_chunk)}
            for name, file in (files | {"kernel": path}).items():
                spec = importlib.util.spec_from_file_location(name, file)
                sys.modules[name] = importlib.util.module_from_spec(spec)
                spec.loader.exec_module(sys.modules[name])
            return sys.modules["kernel"]

    @untraced
    def launch(
        self,
        kernel: Callable,
        arguments: Mapping,
        n_work: int,
        programs: int,
        warps: int,
        tiled: Iterable[str],
        slices: Mapping[str, int],
    ) -> None:
        """A kernel of `load_kernel` on what the Triton one gets, for so many chunks (or sequences) x heads.

        Those `tiled` are read by the copy engine, in `slices` of `common.with_tma_descriptors`.
        """
        states = [name for name in tiled if name.endswith("states")]
        arguments = common.with_tma_descriptors(arguments, set(tiled) - set(states), states, slices)
        further = {"n_work": n_work, "num_warps": warps}
        named = {}
        for name in inspect.signature(kernel).parameters:
            value = further.get(name, arguments.get(name))
            if name in tiled:
                value = Descriptor(value.base.view(value.shape), value.block_shape)
            elif isinstance(value, Tensor):
                value = Pointer.to_first(value)
            named[name] = value
        # Values of a kernel never change: without these, x *= y makes a new x.
        updates = dict.fromkeys(("__iadd__", "__isub__", "__imul__"), lambda *_: NotImplemented)
        for program in range(min(programs, n_work)):
            self.reset(program, min(programs, n_work))
            with torch.no_grad(), patch.multiple(Tensor, **updates):
                kernel(**named)
            # Its shared memory may be another program's by the time they come.
            assert not any(bar.copies for bar in self.bars.values()), "copies that nobody waits for"
