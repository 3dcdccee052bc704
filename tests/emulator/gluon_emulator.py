"""Runs warp-specialised Gluon kernels for Hopper on a CPU, from the very sources that the GPU compiles.

Each warp group is a thread, of which one runs at a time, drawn from a seed. Asynchronous work is done as late as the
kernel's waits allow or, drawn as well, earlier. README.md says what is an error here, and what is not modelled.
"""

from __future__ import annotations

import inspect
import math
import random
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache, partial
from types import SimpleNamespace
from typing import Any

import torch
from gluon_values import Buffer, Descriptor, Int, Pointer, Product, Registers, flat_storage, require
from torch import Tensor
from triton.experimental.gluon import language as gluon_language
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from tilemoe.runtime.launch import Launch

_NO_TILE = 1 << 24  # what an int holds that nobody has written: far outside everything
_NAN = 0xFF  # every byte of a float that nobody has written: NaN in any dtype, and for who reads it as e4m3
# Name of a function, after as much of its module's as tells it apart: (text of its source, what to put in its place).
Edits = Mapping[str, tuple[str, str]]


class _Stopped(Exception):
    """Ends the other warp groups once one has failed."""


class Emulator:
    """Runs a `Launch` of a Gluon kernel. ``late``: the probability that a load waits as long as somebody else can run.

    ``edits`` plants faults in the kernels' sources.
    """

    def __init__(self, seed: int = 0, late: float = 0.9, edits: Edits | None = None) -> None:
        self.random = random.Random(seed)
        self.late = late
        self.edits = dict(edits or {})
        self.modules: dict[str, dict[str, Any]] = {}
        self.stored: dict[int, Tensor] = {}
        self.writers: dict[int, Tensor] = {}  # by address of a tensor: who of `me` has stored each element, -1: nobody
        self.cta, self.ctas = 0, 0
        self.warp_groups: list[_WarpGroup] = []
        self.loads: list[Callable[[], None]] = []
        self.stopped = False
        self.finished = threading.Event()
        self.here = threading.local()
        self.language = _language(self)

    def run(self, launch: Launch) -> None:
        """Run every CTA of the grid, one after the other."""
        kernel = self.function(launch.kernel)
        self.stored.clear()
        self.writers.clear()
        args = {name: self._argument(value) for name, value in {**launch.args, **launch.constants}.items()}
        self.ctas = launch.grid[0]
        for cta in range(self.ctas):
            self.start_cta(cta)
            kernel(**args)

    def start_cta(self, cta: int) -> None:
        self.cta = cta

    def function(self, jitted: Any) -> Any:
        """The Python function behind a Gluon or Triton function, its globals replaced by what runs here."""
        return self._module(jitted.fn)[jitted.fn.__name__]

    def _module(self, function: Any) -> dict[str, Any]:
        """The emulated globals of ``function``."""
        name = function.__module__
        if name not in self.modules:
            members = self.modules[name] = dict(self.language)
            for key, value in function.__globals__.items():
                if isinstance(value, gluon_language.constexpr):
                    members[key] = value.value
                elif key not in self.language and inspect.isfunction(getattr(value, "fn", None)):
                    if value.fn.__module__ == name:
                        exec(self._compiled(value.fn), members)
                    else:
                        members[key] = self.function(value)
        return self.modules[name]

    def _compiled(self, function: Any) -> Any:
        """Its source, edited and compiled."""
        source, name = _source(function), f".{function.__module__}.{function.__name__}"
        for edited, (old, new) in self.edits.items():
            if name.endswith(f".{edited}"):
                if source.count(old) != 1:
                    raise ValueError(f"{old!r} is not once in {edited}, which has changed: edit otherwise")
                source = source.replace(old, new)
        return _code(source, inspect.getfile(function))

    def _argument(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            return Pointer(flat_storage(value))
        if isinstance(value, TensorDescriptor):
            return Descriptor(value)
        return Int(value) if isinstance(value, int) and not isinstance(value, bool) else value

    # Warp groups

    def specialise(self, parts: Sequence[tuple[Any, tuple[Any, ...]]], warps: Any, registers: Any) -> None:
        """gl.warp_specialize: run the warp groups until all have ended."""
        self.loads.clear()
        self.stopped = False
        self.finished.clear()
        self.warp_groups = [_WarpGroup(self, function, args) for function, args in parts]
        with ThreadPoolExecutor(len(parts)) as threads:
            runs = [threads.submit(group.run) for group in self.warp_groups]
            self.next()
            self.finished.wait()
            for group in self.warp_groups:
                if group.turn.locked():  # a failure left it waiting
                    group.turn.release()
        for run in runs:
            error = run.exception()
            if error is not None and not isinstance(error, _Stopped):
                raise error

    def pause(self, until: Callable[[], bool] | None = None) -> None:
        """Let others run; come back once ``until`` holds."""
        mine = self.warp_group
        mine.until = until
        if self.next() is not mine:
            mine.turn.acquire()
        if self.stopped:
            raise _Stopped

    def next(self) -> _WarpGroup | None:
        """Give the turn to a warp group that can run, after loads that arrive by then; None when all have ended."""
        while not self.stopped:
            alive = [p for p in self.warp_groups if not p.ended]
            ready = self.ready(alive)
            if not alive:
                require(not self.loads, "a load that nobody waited for")
                self.finished.set()
                return None
            if self.loads and (not ready or self.random.random() >= self.late):
                self.loads.pop(self.random.randrange(len(self.loads)))()
            else:
                require(bool(ready), "deadlock: every warp group waits, and no load is on its way")
                chosen = self.random.choice(ready)
                if chosen is not getattr(self.here, "warp_group", None):
                    chosen.turn.release()
                return chosen
        return None

    def ready(self, alive: list[_WarpGroup]) -> list[_WarpGroup]:
        """Those that can run."""
        return [group for group in alive if group.until is None or group.until()]

    def stop(self) -> None:
        """Let nobody go on."""
        self.stopped = True
        self.finished.set()

    @property
    def warp_group(self) -> _WarpGroup:
        return self.here.warp_group

    @property
    def me(self) -> int:
        """A number of this warp group of this CTA."""
        return self.cta * len(self.warp_groups) + self.warp_groups.index(self.warp_group)

    # Global memory by threads

    def load(self, pointer: Pointer, mask: Any = None, other: Any = 0) -> Any:
        if pointer.address in self.writers:
            self._require_no_others(pointer, True if mask is None else mask)
        return pointer.load(mask, other)

    def store(self, pointer: Pointer, value: Any, mask: Any = True) -> None:
        pointer.store(value, mask)
        if isinstance(pointer.offset, Tensor):
            writers = self.writers.setdefault(pointer.address, torch.full(pointer.flat.shape, -1))
            writers[self._require_no_others(pointer, mask)] = self.me

    def _require_no_others(self, pointer: Pointer, mask: Any) -> Tensor:
        """The offsets, where no other warp group has stored anything in this launch: nobody would wait for it."""
        at, writers = pointer.offset[pointer.expanded(mask)], self.writers[pointer.address]
        require(bool(((writers[at] == -1) | (writers[at] == self.me)).all()), "another warp group has stored there")
        return at

    # What is done later

    def load_tile(self, descriptor: Descriptor, place: list[Any], barrier: Barrier, target: Buffer) -> None:
        """TMA, from global to shared memory."""

        def arrive() -> None:
            descriptor.load(place, target)
            barrier.count(loaded=descriptor.block_type.nbytes)

        self.loads.append(arrive)
        self.pause()

    def store_tile(self, descriptor: Descriptor, place: list[Any], source: Buffer, adds: bool = False) -> None:
        """TMA, from shared to global memory: a group of its own."""
        self.require_fenced(source)
        self.warp_group.stores.append(lambda: descriptor.store(place, source, self.stored, adds))
        self.pause()

    def store_wait(self, pending: int) -> None:
        _run_down_to(pending, self.warp_group.stores)
        self.pause()

    def copy_rows(self, target: Buffer, source: Pointer, mask: Tensor | None = None) -> None:
        """cp.async: 0 where ``mask`` is False."""
        group = self.warp_group

        def arrive() -> None:
            target.write(source.load(mask, 0))
            group.unfenced.append(target.extent)

        group.open_group.append(arrive)
        if self.random.random() >= self.late:
            group.open_group.pop()()

    def commit_group(self) -> None:
        copies, self.warp_group.open_group = self.warp_group.open_group, []
        self.warp_group.groups.append(lambda: [copy() for copy in copies])

    def wait_group(self, pending: int) -> None:
        _run_down_to(pending, self.warp_group.groups)
        self.pause()

    def multiply(self, left: Buffer, right: Buffer, acc: Any, use_acc: bool, is_async: bool) -> Product:
        """wgmma: reads its operands by the time that `multiply_wait` says, or before."""
        require(is_async, "only asynchronous products are emulated")
        self.require_fenced(left)
        self.require_fenced(right)
        if not use_acc:
            require(not isinstance(acc, Product), "a product that forgets others in flight is not emulated")
            acc = torch.zeros_like(acc)
        product = acc if isinstance(acc, Product) else Product(acc)
        self.warp_group.products.append(lambda: product.add(left, right))
        self.pause()
        return product

    def multiply_wait(self, pending: int, deps: tuple[Any, ...]) -> Any:
        _run_down_to(pending, self.warp_group.products)
        self.pause()
        results = tuple(acc.value if pending == 0 and isinstance(acc, Product) else acc for acc in deps)
        return results if len(results) > 1 else results[0]

    def fence(self) -> None:
        """What this warp group has written becomes visible to matrix units and TMA; before they part, nothing has."""
        if hasattr(self.here, "warp_group"):
            self.warp_group.unfenced.clear()

    def wrote(self, buffer: Buffer) -> None:
        """The warp group has stored to ``buffer``."""
        self.warp_group.unfenced.append(buffer.extent)
        self.pause()

    def require_fenced(self, buffer: Buffer) -> None:
        low, high = buffer.extent
        for group in self.warp_groups:
            for start, end in group.unfenced:
                require(high <= start or end <= low, "shared memory is read by the async proxy before a fence")


@cache
def _source(function: Any) -> str:
    """As many empty lines as are before it in its file, and its source."""
    lines, first = inspect.getsourcelines(function)
    return "\n" * (first - 1) + "".join(lines)


@cache
def _code(source: str, file: str) -> Any:
    """Compiled with this file's future import, so that nobody evaluates annotations."""
    return compile(source, file, "exec")


class _WarpGroup:
    """One warp group: its thread, and what it has started and not waited for."""

    def __init__(self, emulator: Emulator, function: Any, args: tuple[Any, ...]) -> None:
        self.turn = threading.Lock()  # held until the warp group may run: a binary semaphore, and a fast one
        self.turn.acquire()
        self.until: Callable[[], bool] | None = None
        self.ended = False
        self.stores: list[Callable[[], Any]] = []
        self.open_group: list[Callable[[], Any]] = []
        self.groups: list[Callable[[], Any]] = []
        self.products: list[Callable[[], Any]] = []
        self.unfenced: list[tuple[int, int]] = []
        self.emulator, self.function, self.args = emulator, function, args

    def run(self) -> None:
        """What the warp group's thread does."""
        torch.set_num_threads(1)  # of this thread: a pool for each would fight for the cores
        self.emulator.here.warp_group = self
        self.turn.acquire()
        finished = False
        try:
            if not self.emulator.stopped:
                self.function(*self.args)
                left = self.stores or self.open_group or self.groups or self.products
                require(not left, f"{self.function.__name__} ends with work that it has not waited for")
                self.ended = True
                self.emulator.next()
                finished = True
        finally:
            if not finished:
                self.emulator.stop()


def _run_down_to(pending: int, work: list[Callable[[], Any]]) -> None:
    while len(work) > pending:
        work.pop(0)()


class Barrier:
    """An mbarrier: a phase ends when ``arrivals`` have come and as many bytes as were expected."""

    def __init__(self, emulator: Emulator) -> None:
        self.emulator = emulator
        self.arrivals = self.missing = self.bytes = self.phases = 0

    def init(self, count: int) -> None:
        self.arrivals = self.missing = count

    def count(self, arrived: int = 0, expected: int = 0, loaded: int = 0) -> None:
        require(self.arrivals > 0, "a barrier is used before it is initialised")
        self.missing -= arrived
        self.bytes += expected - loaded
        require(self.missing >= 0, "more arrivals than the barrier counts")
        if self.missing == 0:
            require(self.bytes >= 0, "more bytes than the barrier was told to expect")
            if self.bytes == 0:
                self.missing = self.arrivals
                self.phases += 1

    def expect(self, size: int) -> None:
        self.count(arrived=1, expected=size)
        self.emulator.pause()

    def arrive(self, count: int = 1, pred: bool = True) -> None:
        if pred:
            self.count(arrived=count)
        self.emulator.pause()

    def wait(self, phase: int) -> None:
        """Until the phase of this parity has ended; before the first one, the phase of parity 1 has."""
        self.emulator.pause(lambda: self.phases % 2 != phase % 2)


class Barriers:
    """(count, 1) barriers in shared memory."""

    def __init__(self, emulator: Emulator, count: int) -> None:
        self.barriers = [Barrier(emulator) for _ in range(count)]
        self.shape = (count, 1)

    def index(self, i: int) -> Barrier:
        require(0 <= i < len(self.barriers), "index outside the barriers")
        return self.barriers[i]


def _either(of_tensors: Callable[..., Any], of_scalars: Callable[..., Any]) -> Callable[..., Any]:
    def apply(a: Any, b: Any) -> Any:
        if isinstance(a, Tensor) or isinstance(b, Tensor):
            return of_tensors(torch.as_tensor(a), torch.as_tensor(b))
        return Int(of_scalars(a, b))

    return apply


def _bound(of_tensors: Callable[[Tensor, Tensor], Tensor]) -> Callable[..., Tensor]:
    return lambda value, bound, propagate_nan: of_tensors(value, torch.as_tensor(bound, dtype=value.dtype))


def _where(condition: Any, a: Any, b: Any) -> Any:
    return torch.where(condition, a, b) if isinstance(condition, Tensor) else a if condition else b


def _language(emulator: Emulator) -> dict[str, Any]:
    """What kernels' modules import, by the names that they import it by."""

    def allocate(dtype: torch.dtype, shape: Sequence[int], layout: Any) -> Barriers | Buffer:
        if dtype == torch.int64:
            return Barriers(emulator, shape[0])
        memory = torch.full([math.prod(shape)], _NO_TILE, dtype=torch.int32)
        if dtype.is_floating_point:
            memory = torch.full([math.prod(shape) * dtype.itemsize], _NAN, dtype=torch.uint8).view(dtype)
        return Buffer.of_memory(memory, shape, layout, emulator.wrote)

    def full(shape: Sequence[int], value: Any, dtype: torch.dtype, layout: Any) -> Tensor:
        return torch.full(shape, value, dtype=dtype).as_subclass(Registers)

    def total(value: Tensor, axis: int) -> Any:
        of_tensor = value.sum(axis, dtype=value.dtype)
        return of_tensor if of_tensor.dim() else Int(int(of_tensor))

    layouts = ["BlockedLayout", "NVMMADistributedLayout", "SliceLayout", "SwizzledSharedLayout"]
    gl = SimpleNamespace(
        **dict.fromkeys(layouts, lambda *args: None),
        NVMMASharedLayout=gluon_language.NVMMASharedLayout,
        int64=torch.int64,
        int32=torch.int32,
        float32=torch.float32,
        float8e4nv=torch.float8_e4m3fn,
        program_id=lambda axis: Int(emulator.cta),
        num_programs=lambda axis: Int(emulator.ctas),
        num_warps=lambda: 4,
        static_range=range,
        cdiv=lambda a, b: Int(-(-int(a) // int(b))),
        minimum=_either(torch.minimum, min),
        maximum=_either(torch.maximum, max),
        where=_where,
        arange=lambda start, end, layout=None: torch.arange(start, end).as_subclass(Registers),
        full=full,
        zeros=lambda shape, dtype, layout: full(shape, 0, dtype, layout),
        sum=total,
        max=lambda value, axis: value.amax(axis),
        abs=torch.abs,
        convert_layout=lambda value, layout: value,
        join=lambda a, b: torch.stack((a, b), -1).as_subclass(Registers),
        static_assert=require,
        load=emulator.load,
        store=emulator.store,
        atomic_add=lambda pointer, value, mask, sem: pointer.add(value, mask),
        allocate_shared_memory=allocate,
        warp_specialize=emulator.specialise,
    )
    tl = SimpleNamespace(
        where=_where,
        abs=torch.abs,
        maximum=_bound(torch.maximum),
        minimum=_bound(torch.minimum),
        clamp=lambda value, low, high, propagate_nan: torch.clamp(value, low, high),
        PropagateNan=SimpleNamespace(ALL=None),  # PyTorch's way
        static_assert=require,
        math=SimpleNamespace(rsqrt=torch.rsqrt, exp2=torch.exp2),
        **{name: getattr(torch, name) for name in ("sigmoid", "erf", "exp")},
    )
    jit = SimpleNamespace(jit=lambda function=None, **options: (lambda f: f) if function is None else function)
    return {
        "gluon": jit,
        "triton": jit,
        "gl": gl,
        "tl": tl,
        "mbarrier": SimpleNamespace(
            MBarrierLayout=lambda: None,
            init=lambda barrier, count: barrier.init(count),
            expect=lambda barrier, size: barrier.expect(size),
            arrive=lambda barrier, count=1, pred=True: barrier.arrive(count, pred),
            wait=lambda barrier, phase: barrier.wait(phase),
        ),
        "tma": SimpleNamespace(store_wait=emulator.store_wait),
        "async_copy": SimpleNamespace(commit_group=emulator.commit_group, wait_group=emulator.wait_group),
        "fence_async_shared": emulator.fence,
        "warpgroup_mma": emulator.multiply,
        "warpgroup_mma_wait": emulator.multiply_wait,
        "cp_async": emulator.copy_rows,
        "tma_load": emulator.load_tile,
        "tma_store": emulator.store_tile,
        "tma_add": partial(emulator.store_tile, adds=True),
        "reinterpret": lambda buffer, dtype, shape, layout: buffer.reinterpret(dtype, shape, layout),
    }
