"""A driver for Triton that compiles and launches nothing and notes what it is asked to launch: CPU tensors stand in for
a GPU's. For a process of its own, which then cannot launch anything else.

What is real: `Launch`, Triton's binding of arguments, its specialisation of kernels and all of its launcher that is
written in Python.
"""

from __future__ import annotations

import re
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor
from torch._C import DispatchKey
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode
from torch.utils._pytree import tree_leaves, tree_map_only
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.driver import CudaLauncher, wrap_handle_tensordesc
from triton.compiler import CompiledKernel
from triton.runtime import _async_compile
from triton.runtime.jit import JITFunction

from tilemoe.runtime import operator as replayed
from tilemoe.runtime.device import Device

H200 = Device(capability=90, shared_bytes=227 * 1024, multiprocessors=132)
# What a kernel's descriptor says of itself once it is compiled: nothing that the host decides.
_DESCRIPTOR = {"swizzle": 3, "elem_size": 2, "elem_type": 0, "block_size": (), "fp4_padded": False}


class Address(NamedTuple):
    """A pointer among a launch's arguments."""

    value: int


class FakeDriver:
    """What Triton asks of a driver between a call of a kernel and its launch. ``stream``: PyTorch's current one."""

    def __init__(self) -> None:
        self.stream = 7
        self.utils = SimpleNamespace(fill_tma_descriptor=lambda address, *rest: (Address(address), *map(_frozen, rest)))

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return self.stream

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)


class Tracker(TorchDispatchMode):
    """Notes what one call does, in order: allocations, launches and operators of PyTorch's, with every tensor that is
    made inside as its number and everything else by address. AssertionError for a pointer to memory that is gone.

    ``alive``: at each allocation, the numbers of those that are not given back. ``limit``: how many there may be before
    ``error`` is raised.
    """

    def __init__(self, operands: list[Tensor], limit: int = 10**6, error: Exception | None = None) -> None:
        super().__init__()
        self.events: list[Any] = []
        self.alive: list[set[int]] = []
        self.bytes: list[int] = []
        self._limit, self._error = limit, error
        self._operands = [(t.data_ptr(), t.untyped_storage()) for t in operands]
        self._made: list[StorageWeakRef] = []
        self._ranges: list[tuple[int, int]] = []
        self._number: dict[int, int] = {}  # storage to its number

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.has_kernel_for_dispatch_key(DispatchKey.CompositeImplicitAutograd):
            with self:
                return func.decompose(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        allocates = "empty" in name or "zeros" in name
        if allocates and len(self._made) >= self._limit:
            assert self._error is not None
            raise self._error
        given = tree_map_only(Tensor, self.name_of, (args, kwargs or {}))
        result = func(*args, **(kwargs or {}))
        for tensor in [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]:
            self._note(tensor)
        if name in ("new_zeros", "zeros", "zeros_like", "zero_"):
            self.events.append(("zero", self.name_of(result)))
        elif not allocates and not func.is_view:
            self.events.append((name, _frozen(given), self.name_of(result)))
        return result

    def name_of(self, tensor: Tensor) -> Any:
        """The same of two tensors only if they are the same memory, in the same layout."""
        return self.place(tensor.data_ptr(), self._number.get(tensor.untyped_storage()._cdata)), layout(tensor)

    def place(self, address: int, number: int | None = None) -> Any:
        """(number, offset) of an allocation inside, or the address of what was there before."""
        for found in range(len(self._made)) if number is None else (number,):
            first, last = self._ranges[found]
            if not self._made[found].expired() and (first <= address < last or number is not None):
                return found, address - first
        within = [s for _, s in self._operands if s.data_ptr() <= address < s.data_ptr() + s.nbytes()]
        assert address == 0 or within, "a pointer to memory that nobody has"
        return address

    def all_expired(self) -> bool:
        """Whether nothing that was made inside is alive."""
        return all(made.expired() for made in self._made)

    def _note(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        number = self._number.get(storage._cdata)
        is_known = number is not None and not self._made[number].expired()
        if is_known or any(storage._cdata == operand._cdata for _, operand in self._operands):
            return
        alive = {number for number, ref in enumerate(self._made) if not ref.expired()}
        self.alive.append(alive)
        self._number[storage._cdata] = len(self._made)
        self._made.append(StorageWeakRef(storage))
        self._ranges.append((storage.data_ptr(), storage.data_ptr() + storage.nbytes()))
        self.bytes.append(storage.nbytes())
        self.events.append(("make", self._number[storage._cdata], layout(tensor)))

    def peak_bytes(self) -> int:
        """The most that was allocated at once."""
        return max(sum(self.bytes[n] for n in alive) + self.bytes[i] for i, alive in enumerate(self.alive))


class _Here(threading.local):
    tracker: Tracker | None = None


_here = _Here()


@contextmanager
def tracked(operands: list[Tensor], **limits: Any) -> Iterator[Tracker]:
    """Inside, this thread's allocations and launches are noted."""
    with Tracker(operands, **limits) as tracker:
        _here.tracker = tracker
        try:
            yield tracker
        finally:
            _here.tracker = None


def install() -> FakeDriver:
    """From now on, Triton launches through the fake, and operators of CPU tensors are recorded as those of a GPU's."""
    driver = FakeDriver()
    triton.runtime.driver.set_active(driver)
    JITFunction._do_compile = _compile  # type: ignore[method-assign]
    for name, module in list(sys.modules.items()):
        if name.startswith("tilemoe.") and hasattr(module, "device_of"):
            module.device_of = lambda t: H200  # type: ignore[attr-defined]
    replayed.is_replayable = _is_replayable
    torch.cuda.set_device = lambda device: None  # type: ignore[assignment]  # for the threads that compile
    return driver


def _is_replayable(first: Tensor) -> bool:
    watching = torch._C._len_torch_dispatch_stack()
    return watching == 0 or (watching == 1 and isinstance(_get_current_dispatch_mode(), Tracker))


def _compile(kernel: Any, key: Any, signature: dict[str, Any], device: int, *rest: Any) -> Any:
    """What Triton's own does, but for the compilation: at once, or by a thread of an AsyncCompileMode."""
    found, make = kernel.device_caches[device][0], partial(_compiled, kernel, key, signature)
    mode = _async_compile.active_mode.get()
    if mode is not None:
        return mode.submit((kernel, key), make, partial(found.__setitem__, key))
    return found.setdefault(key, make())


def _compiled(kernel: Any, key: Any, signature: dict[str, Any]) -> CompiledKernel:
    """A kernel compiled for these types, without the compilation."""
    compiled: Any = object.__new__(CompiledKernel)
    compiled.name = kernel.fn.__name__
    described = [_DESCRIPTOR for kind in signature.values() if kind.startswith("tensordesc")]
    compiled.metadata = SimpleNamespace(
        name=compiled.name, global_scratch_size=0, profile_scratch_size=0, tensordesc_meta=described
    )
    compiled.src, compiled.module, compiled.packed_metadata = None, object(), ("packed", key)
    compiled.function = id(compiled)
    compiled._run = _launcher(compiled, signature)
    return compiled


def _launcher(compiled: Any, signature: dict[str, Any]) -> CudaLauncher:
    """Triton's own, whose C function is the fake."""
    kinds = [kind for each in signature.values() for kind in _expanded(each)]

    launch = partial(_launch, compiled.name, kinds)  # no Python function, as C's is none
    launcher: Any = object.__new__(CudaLauncher)
    launcher.num_ctas = 1
    launcher.launch = wrap_handle_tensordesc(launch, signature, compiled.metadata.tensordesc_meta)
    launcher.global_scratch_size = launcher.profile_scratch_size = 0
    launcher.global_scratch_align = launcher.profile_scratch_align = 1
    launcher.launch_cooperative_grid, launcher.launch_pdl = False, False
    return launcher


def _expanded(kind: str) -> list[str]:
    """The types of an argument of the C function: a descriptor is followed by its shape and its strides."""
    described = re.match(r"tensordesc<[^[>]*\[([^]]*)\]", kind)
    return [kind] if described is None else ["descriptor", *["size"] * 2 * (described[1].count(",") + 1)]


def _launch(
    name: str,
    kinds: list[str],
    x: int,
    y: int,
    z: int,
    stream: int,
    function: int,
    cooperative: bool,
    dependent: bool,
    scratch: None,
    profile_scratch: None,
    packed: Any,
    metadata: Any,
    enter: Any,
    leave: Any,
    *args: Any,
) -> None:
    assert scratch is profile_scratch is None
    if enter is not None:
        enter(metadata)
    flat: list[Any] = []
    for value, kind in zip(args, kinds, strict=True):
        if kind.startswith("*"):
            flat.append(Address(value if isinstance(value, int) else 0 if value is None else value.data_ptr()))
        else:
            assert not isinstance(value, Tensor)
            assert (kind == "descriptor") == (isinstance(value, tuple) and isinstance(value[0], Address))
            flat.append(value)
    tracker = _here.tracker
    if tracker is not None:
        placed = [_placed(tracker, value) for value in flat]
        tracker.events.append((name, function, (packed, cooperative, dependent), (x, y, z), stream, placed))
    if leave is not None:
        leave(metadata)


def _placed(tracker: Tracker, value: Any) -> Any:
    if isinstance(value, Address):
        return tracker.place(value.value)
    return tuple([_placed(tracker, each) for each in value]) if isinstance(value, (tuple, list)) else value


def layout(t: Tensor) -> tuple[Any, ...]:
    """Shape, strides and dtype."""
    return tuple(t.shape), t.stride(), t.dtype


def _frozen(value: Any) -> Any:
    return tuple([_frozen(each) for each in value]) if isinstance(value, (tuple, list)) else value
