"""What Gluon kernels for Blackwell have beyond Hopper's: tensor memory, tcgen05, TMA gathers.

A tcgen05 product and a commit are work in flight, as a load is: done as late as the waits allow,
or at a drawn moment before. Of one warp group they are done in the order in which it has issued them. One warp group is
slow, and mostly runs when no other can and nothing is in flight, so that the others get as far ahead as they may: by
seed and CTA, each in turn.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from gluon_emulator import Barrier, Barriers, Edits, Emulator
from gluon_values import Buffer, Descriptor, Registers, require
from torch import Tensor

from tilemoe.runtime.launch import Launch

SHARED_BYTES = 227 * 1024  # of a CTA
COLUMNS = 512  # of tensor memory, each of 128 lanes of 32 bits
_FEWEST_COLUMNS = 32  # of an allocation
_FEWEST_GATHERED = 8  # rows of a TMA gather


class TensorMemory:
    """fp32 accumulators, NaN until they are written. data: a view of an allocation; column: where it begins."""

    def __init__(self, data: Tensor, column: int, emulator: BlackwellEmulator) -> None:
        self.data, self.column, self.emulator = data, column, emulator
        self.shape, self.dtype, self.layout = list(data.shape), data.dtype, None

    def index(self, i: int) -> TensorMemory:
        require(0 <= i < self.shape[0], "index outside tensor memory")
        return TensorMemory(self.data[int(i)], self.column + int(i) * self.shape[-1], self.emulator)

    def slice(self, start: int, length: int) -> TensorMemory:
        require(start >= 0 and start + length <= self.shape[-1], "slice outside tensor memory")
        return TensorMemory(self.data.narrow(-1, start, length), self.column + start, self.emulator)

    def slices(self, width: int) -> TensorMemory:
        return TensorMemory(self.data.unflatten(-1, (-1, width)).transpose(0, 1), self.column, self.emulator)

    def load(self, layout: Any = None) -> Registers:
        self.emulator.require_access(self)
        value = self.data.clone().as_subclass(Registers)
        self.emulator.pause()
        return value

    def overlaps(self, other: TensorMemory) -> bool:
        ends = self.column + self.shape[-1], other.column + other.shape[-1]
        return self.column < ends[1] and other.column < ends[0]


class BlackwellEmulator(Emulator):
    """Runs a `Launch` of a Gluon kernel for Blackwell, see `Emulator`."""

    def __init__(self, seed: int = 0, late: float = 0.9, edits: Edits | None = None) -> None:
        super().__init__(seed, late, edits)
        self.columns = self.bytes = 0  # that the CTA has allocated
        self.warps: list[int] = []  # of the warp groups
        self.products: list[TensorMemory] = []  # accumulators of the products in flight
        self.in_order: dict[Any, list[Callable[[], None]]] = {}  # by warp group: what it has in flight, oldest first
        self.are_barriers_fenced = True
        self.seed = seed
        self.allocate_from_hopper = self.language["gl"].allocate_shared_memory
        self._extend_language()

    def _extend_language(self) -> None:
        gl = self.language["gl"]
        gl.allocate_shared_memory = self.allocate_shared_memory
        gl.num_warps = self.num_warps
        self.language |= {
            "TensorMemoryLayout": lambda *args, **kwargs: None,
            "allocate_tensor_memory": self.allocate_tensor_memory,
            "tcgen05_mma": self.multiply_into,
            "tcgen05_commit": self.commit,
            "tma_gather": self.gather,
            "tmem_load": TensorMemory.load,
            "tmem_slices": TensorMemory.slices,
            "tmem_zeros": lambda view: torch.zeros(view.shape).as_subclass(Registers),
        }

    def run(self, launch: Launch) -> None:
        self.warps = [launch.num_warps]
        super().run(launch)

    def start_cta(self, cta: int) -> None:
        super().start_cta(cta)
        self.columns = self.bytes = 0

    def specialise(self, parts: Sequence[tuple[Any, tuple[Any, ...]]], warps: Any, registers: Any) -> None:
        require(
            self.are_barriers_fenced, "TMA and tcgen05 may arrive at a barrier before a fence of its initialisation"
        )
        self.warps[1:] = warps
        self.products.clear()
        self.in_order.clear()
        super().specialise(parts, warps, registers)

    def ready(self, alive: list[Any]) -> list[Any]:
        found, slow = super().ready(alive), self.warp_groups[(self.seed + self.cta) % len(self.warp_groups)]
        others = [group for group in found if group is not slow]
        return others if (others or self.loads) and self.random.random() < self.late else found

    def num_warps(self) -> int:
        """Of this warp group; before the groups part, of the one that is there."""
        group = getattr(self.here, "warp_group", None)
        return self.warps[0 if group is None else self.warp_groups.index(group)]

    # Allocation

    def allocate_shared_memory(self, dtype: torch.dtype, shape: Sequence[int], layout: Any) -> Barriers | Buffer:
        self.bytes += math.prod(shape) * dtype.itemsize
        require(self.bytes <= SHARED_BYTES, "more shared memory than a CTA has")
        allocated: Barriers | Buffer = self.allocate_from_hopper(dtype, shape, layout)
        if isinstance(allocated, Barriers):
            self.are_barriers_fenced = False
        return allocated

    def allocate_tensor_memory(self, dtype: torch.dtype, shape: Sequence[int], layout: Any) -> TensorMemory:
        """(M, N), or as many of them as a first dimension says, side by side."""
        require(dtype == torch.float32 and shape[-2] in (64, 128), "accumulators of 64 or 128 rows are emulated")
        columns, first = max(_FEWEST_COLUMNS, math.prod(shape) // shape[-2]), self.columns
        self.columns += 1 << (columns - 1).bit_length()
        require(self.columns <= COLUMNS, "more columns than tensor memory has")
        return TensorMemory(torch.full(list(shape), torch.nan), first, self)

    # tcgen05

    def multiply_into(
        self,
        left: Buffer,
        right: Buffer,
        acc: TensorMemory,
        use_acc: Any = True,
        pred: Any = True,
        mbarriers: Sequence[Barrier] = (),
    ) -> None:
        """tcgen05.mma: has read its operands and written ``acc`` by the next commit's arrival, or before."""
        require(list(acc.shape) == [left.shape[0], right.shape[1]], "the accumulator has not the product's shape")
        require(left.shape[1] == right.shape[0] and left.dtype == right.dtype, "operands that do not fit")
        self.require_fenced(left)
        self.require_fenced(right)
        if pred:
            adds = bool(use_acc)

            def multiply() -> None:
                product = left.read().float() @ right.read().float()
                acc.data.copy_(acc.data + product if adds else product)
                self.products.remove(acc)

            self.products.append(acc)
            self._start(multiply)
        for barrier in mbarriers:
            self._commit(barrier)
        self.pause()

    def commit(self, barrier: Barrier, pred: Any = True) -> None:
        """tcgen05.commit: an arrival once all products are done that this warp group has issued."""
        if pred:
            self._commit(barrier)
        self.pause()

    def _commit(self, barrier: Barrier) -> None:
        self._start(lambda: barrier.count(arrived=1))

    def require_access(self, memory: TensorMemory) -> None:
        """That threads may load or store it."""
        require(self.num_warps() % 4 == 0, "a warp accesses a quarter of tensor memory's lanes")
        in_use = any(memory.overlaps(acc) for acc in self.products)
        require(not in_use, "tensor memory is accessed while a product that writes it is in flight")

    def _start(self, action: Callable[[], None]) -> None:
        """One more ``action`` in flight: whichever of the warp group's is to be done next, the oldest is."""
        mine = self.in_order.setdefault(self.warp_group, [])
        mine.append(action)
        self.loads.append(lambda: mine.pop(0)())

    # Loads

    def gather(
        self, descriptor: Descriptor, rows: Tensor, column: int, barrier: Barrier, target: Buffer, pred: Any = True
    ) -> None:
        """TMA gather4 of ``rows``, from ``column`` on: zeros outside the tensor; all bytes count."""
        width = descriptor.block_shape[1]
        require(descriptor.block_shape[0] == 1 and target.shape == [len(rows), width], "boxes of one row, and as many")
        require(len(rows) >= _FEWEST_GATHERED, "too few rows for a gather")
        require(column >= 0 and column * target.dtype.itemsize % 16 == 0, "a gather begins at a multiple of 16 bytes")
        rows = rows.clone()

        def arrive() -> None:
            source, count = descriptor.base, max(0, min(width, descriptor.shape[1] - column))
            values = source.new_zeros(len(rows), width)
            inside = (rows >= 0) & (rows < descriptor.shape[0])
            values[inside, :count] = source[rows[inside].long(), column : column + count]
            target.write(values)
            barrier.count(loaded=values.numel() * values.element_size())

        if pred:
            self.loads.append(arrive)
        self.pause()

    def fence(self) -> None:
        super().fence()
        self.are_barriers_fenced = True
