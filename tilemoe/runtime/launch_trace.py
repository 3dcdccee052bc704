"""Recordings of an operator's launches, so that the host's decisions for a layout of the operands are made only once.

Replaying reduced the host time of a layer's forward from 2.0 to 1.1 ms (on an H200's host, docs/lab/memory.md).

Choosing a kernel, describing its operands and binding its arguments takes the host longer than a small layer takes the
GPU. All of it follows from shapes, strides, dtypes and alignments. So a `LaunchTracer` records one call, and its
`LaunchTrace` replays it for other operands of the same layout: it allocates, launches and frees in the same order.
Unlike a CUDA graph, it keeps no memory and no address.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor
from torch._C import DispatchKey
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode
from torch.utils._pytree import tree_leaves

from tilemoe.runtime.c_launcher import Direct, Encoded, direct

_aten = torch.ops.aten
_EMPTY = (_aten.empty, _aten.empty_like, _aten.empty_strided, _aten.new_empty, _aten.new_empty_strided)
_ZEROS = (_aten.zeros, _aten.zeros_like, _aten.new_zeros)


class _Slot(NamedTuple):
    """A tensor of a recording, by number: operands first, then new tensors in order of creation. ``view``: None, or
    the size, the stride and the offset in elements of a view of that tensor.
    """

    number: int
    view: tuple[tuple[int, ...], tuple[int, ...], int] | None = None

    def of(self, tensors: list[Any]) -> Tensor:
        tensor: Tensor = tensors[self.number]
        if self.view is None:
            return tensor
        size, stride, offset = self.view
        return tensor.as_strided(size, stride, tensor.storage_offset() + offset)


class _Address(NamedTuple):
    """An address in place of a descriptor's base tensor: it has the only method that is called on the base."""

    address: int

    def data_ptr(self) -> int:
        return self.address


class _Descriptor(NamedTuple):
    """A tensor descriptor without its base: its class and its other fields."""

    kind: type
    fields: dict[str, Any]

    def at(self, address: int) -> Any:
        descriptor: Any = object.__new__(self.kind)  # without __init__: its checks passed when the call was recorded
        descriptor.__dict__ = {**self.fields, "base": _Address(address)}
        return descriptor


class _Made(NamedTuple):
    """A step that allocates a tensor."""

    slot: int
    size: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    zeros: bool

    def __call__(self, tensors: list[Any], pointers: list[int], device: torch.device, stream: int) -> None:
        slot, size, stride, dtype, zeros = self  # unpacked at once, which is faster than reading each field
        made = torch.empty_strided(size, stride, dtype=dtype, device=device)
        tensors[slot] = made.zero_() if zeros else made
        pointers[slot] = made.data_ptr()


class _Launched(NamedTuple):
    """A step that calls ``launch(x, y, z, stream, *fixed, *args)``. Each entry of pointers and descriptors is set in
    ``args``: (position, slot, offset in bytes), and for a descriptor the object whose ``at(address)`` is passed.
    """

    launch: Callable[..., None]
    grid: tuple[int, int, int]
    fixed: tuple[Any, ...]
    args: list[Any]
    pointers: list[tuple[int, int, int]]
    descriptors: Sequence[tuple[int, int, int, _Descriptor | Encoded]]

    def __call__(self, tensors: list[Any], pointers: list[int], device: torch.device, stream: int) -> None:
        launch, grid, fixed, template, places, descriptors = self
        args = template.copy()
        for position, slot, offset in places:
            args[position] = pointers[slot] + offset
        for position, slot, offset, descriptor in descriptors:
            args[position] = descriptor.at(pointers[slot] + offset)
        launch(*grid, stream, *fixed, *args)


class _Called(NamedTuple):
    """A step that calls a PyTorch operator. Its one result is a new tensor, or with ``slot`` None its first argument,
    changed in place."""

    slot: int | None
    func: Any
    args: list[Any]
    kwargs: dict[str, Any]

    def __call__(self, tensors: list[Any], pointers: list[int], device: torch.device, stream: int) -> None:
        args = [arg.of(tensors) if isinstance(arg, _Slot) else arg for arg in self.args]
        kwargs = {name: arg.of(tensors) if isinstance(arg, _Slot) else arg for name, arg in self.kwargs.items()}
        result = self.func(*args, **kwargs)
        if self.slot is not None:
            tensors[self.slot] = result
            pointers[self.slot] = result.data_ptr()


class _Kept(NamedTuple):
    """A step that looks up the cached tensors of an operand again; they differ if the operand has changed."""

    slots: list[int]
    source: int
    find: Callable[[Tensor], Sequence[Tensor]]

    def __call__(self, tensors: list[Any], pointers: list[int], device: torch.device, stream: int) -> None:
        for slot, found in zip(self.slots, self.find(tensors[self.source]), strict=True):
            tensors[slot] = found
            pointers[slot] = found.data_ptr()


class _Freed(NamedTuple):
    """A step that frees the tensors which later steps do not use."""

    slots: list[int]

    def __call__(self, tensors: list[Any], pointers: list[int], device: torch.device, stream: int) -> None:
        for slot in self.slots:
            tensors[slot] = None


class LaunchTrace(NamedTuple):
    """The recorded steps of one call of an operator. ``results``: its return value, a tensor or a tuple."""

    device: torch.device
    operands: list[int]  # positions of the tensors among the arguments
    num_slots: int
    steps: list[Any]
    results: _Slot | tuple[_Slot | None, ...]

    def __call__(self, args: tuple[Any, ...]) -> Any:
        """The operator's result for arguments of the recorded layout, computed on the current stream."""
        tensors: list[Any] = [args[position] for position in self.operands]
        pointers = [operand.data_ptr() for operand in tensors]
        more = self.num_slots - len(tensors)
        tensors += [None] * more
        pointers += [0] * more
        device = self.device
        stream = triton.runtime.driver.active.get_current_stream(device.index)
        for step in self.steps:
            step(tensors, pointers, device, stream)
        if isinstance(self.results, _Slot):
            return self.results.of(tensors)
        return tuple([None if slot is None else slot.of(tensors) for slot in self.results])


class LaunchTracer(TorchDispatchMode):
    """Records one call. A step that cannot be replayed spoils the recording, not the call; ``problem`` describes it.

    ``store`` is called with the recording, or with None if there is none.
    """

    withheld = False  # launches are not withheld, as `Precompile` does

    def __init__(self, args: tuple[Any, ...], store: Callable[[LaunchTrace | None], None] = lambda trace: None) -> None:
        super().__init__()
        self._store = store
        self.problem: str | None = None
        self._operands = [position for position, arg in enumerate(args) if isinstance(arg, Tensor)]
        tensors = [args[position] for position in self._operands]
        self._device = tensors[0].device
        self._steps: list[Any] = []
        # Address range and layout of each tensor; later tensors may reuse the memory of earlier ones.
        self._ranges = [_range(tensor) for tensor in tensors]
        self._layouts = [layout(tensor) for tensor in tensors]
        self._alive = set(range(len(tensors)))
        self._is_finding = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self._is_finding:
            return func(*args, **(kwargs or {}))
        if func.has_kernel_for_dispatch_key(DispatchKey.CompositeImplicitAutograd):
            # Without autograd's keys, as in inference mode, `contiguous` and the like arrive here undecomposed.
            with self:
                return func.decompose(*args, **(kwargs or {}))
        result = func(*args, **(kwargs or {}))
        packet = func.overloadpacket
        if packet in _EMPTY or packet in _ZEROS:
            size, stride, dtype = tuple(result.shape), result.stride(), result.dtype
            self._steps.append(_Made(self._add(result), size, stride, dtype, packet in _ZEROS))
        elif not func.is_view:
            self._call(func, args, kwargs or {}, result)
        return result

    def launched(self, kernel: Any, grid: tuple[int, ...], args: list[Any]) -> None:
        """Record a launch of the compiled ``kernel``; `tilemoe.runtime.launch.Launch` calls this."""
        if self._is_finding:
            return
        metadata = kernel.metadata
        if metadata.global_scratch_size or metadata.profile_scratch_size:
            self.problem = f"{metadata.name} asks Triton for memory"
        template: list[Any] = list(args)
        pointers, descriptors = [], []
        for position, arg in enumerate(args):
            if isinstance(arg, Tensor):
                template[position] = None
                if arg.data_ptr() != 0:
                    pointers.append((position, *self._find(arg)))
            elif hasattr(arg, "base"):
                template[position] = None
                fields = {name: value for name, value in vars(arg).items() if name != "base"}
                descriptors.append((position, *self._find(arg.base), _Descriptor(type(arg), fields)))
        x, y, z = (*grid, 1, 1)[:3]
        fixed = (kernel.function, kernel.packed_metadata, None, None, None)  # the last are for hooks: none is set
        step = _Launched(kernel.run, (x, y, z), fixed, template, pointers, descriptors)
        how = direct(kernel)
        self._steps.append(step if how is None or len(how.metadata) != len(descriptors) else _directly(step, how))

    def kept(self, find: Callable[[Tensor], Sequence[Tensor]], operand: Tensor) -> Sequence[Tensor]:
        """``find(operand)``. Every replay calls it again; its own launches are not recorded."""
        source = self._whole(operand)
        if source not in range(len(self._operands)):
            self.problem = "something is kept for what is no operand"
        self._is_finding = True
        try:
            found = find(operand)
        finally:
            self._is_finding = False
        self._steps.append(_Kept([self._add(tensor) for tensor in found], source, find))
        return found

    def keep(self, results: Any) -> None:
        """Store the recording of a call that returned ``results``, or None if it was spoiled."""
        is_one = isinstance(results, Tensor)
        slots: list[_Slot | None] = []
        for result in (results,) if is_one else results:
            taken = [slot.number for slot in slots if slot is not None]
            slots.append(None if result is None else self._part(result, taken))
        made = [slot.number for slot in slots if slot is not None]
        is_view_of_operand = any(slot is not None and slot.view and slot.number < len(self._operands) for slot in slots)
        if self.problem is not None or is_view_of_operand:
            self._store(None)
            return
        steps = _with_frees(self._steps, len(self._operands), made)
        one_or_all = next(slot for slot in slots if slot is not None) if is_one else tuple(slots)
        self._store(LaunchTrace(self._device, self._operands, len(self._ranges), steps, one_or_all))

    def _add(self, tensor: Tensor) -> int:
        """A slot for a new tensor. Tensors whose memory it reuses no longer exist."""
        first, last = _range(tensor)
        if tensor.device != self._device:
            self.problem = f"a tensor is made on {tensor.device}"
        self._alive = {slot for slot in self._alive if not self._overlaps(slot, first, last)}
        self._ranges.append((first, last))
        self._layouts.append(layout(tensor))
        self._alive.add(len(self._ranges) - 1)
        return len(self._ranges) - 1

    def _overlaps(self, slot: int, first: int, last: int) -> bool:
        return self._ranges[slot][0] < last and first < self._ranges[slot][1]

    def _find(self, tensor: Tensor) -> tuple[int, int]:
        """(slot, offset in bytes) of the tensor that ``tensor`` is a part of."""
        first, last = _range(tensor)
        slots = [slot for slot in self._alive if self._overlaps(slot, first, last)]
        if len(slots) != 1 or first < self._ranges[slots[0]][0] or last > self._ranges[slots[0]][1]:
            self.problem = "an argument is a part of no operand, or of several that overlap"
            return 0, 0
        return slots[0], first - self._ranges[slots[0]][0]

    def _part(self, tensor: Tensor, but: Sequence[int] = ()) -> _Slot:
        """The slot of this tensor if there is one with its layout, not in ``but``; else a view of its larger tensor."""
        slot = self._whole(tensor, but)
        if slot >= 0:
            return _Slot(slot)
        slot, offset = self._find(tensor)
        if self._layouts[slot][2] != tensor.dtype:
            self.problem = "an argument is a view in another dtype"
        return _Slot(slot, (tuple(tensor.shape), tensor.stride(), offset // tensor.element_size()))

    def _whole(self, tensor: Tensor, but: Sequence[int] = ()) -> int:
        """The slot that is exactly this tensor and not in ``but``; -1 if there is none."""
        first = tensor.data_ptr()
        slots = [slot for slot in self._alive if self._ranges[slot][0] == first and slot not in but]
        slots = [slot for slot in slots if self._layouts[slot] == layout(tensor)]
        # Among several tensors without elements, any will do.
        return -1 if not slots or (len(slots) > 1 and tensor.numel()) else max(slots)

    def _call(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        """Record a PyTorch operator that computes. An in-place one may only change a tensor made in this call."""
        given = [self._part(arg) if isinstance(arg, Tensor) else arg for arg in args]
        named = {name: self._part(arg) if isinstance(arg, Tensor) else arg for name, arg in kwargs.items()}
        unknown = any(isinstance(leaf, Tensor) for leaf in tree_leaves((given, named)))
        if unknown or not isinstance(result, Tensor) or torch.Tag.dynamic_output_shape in func.tags:
            self.problem = f"{func} of a list, with several results, or of a shape that values decide"
        elif not func._schema.is_mutable:
            self._steps.append(_Called(self._add(result), func, given, named))
        elif result is args[0] and given[0].number >= len(self._operands) and result.numel():
            self._steps.append(_Called(None, func, given, named))
        else:
            self.problem = f"{func} writes to an operand, to another than its first argument, or to nothing"


def _directly(step: _Launched, how: Direct) -> _Launched:
    """The same launch by `tilemoe.runtime.c_launcher`, where its shape and strides follow a descriptor."""
    encoded = {
        position: Encoded(descriptor.at, metadata)
        for (position, _, _, descriptor), metadata in zip(step.descriptors, how.metadata, strict=True)
    }
    args: list[Any] = []
    moved = []
    for position, arg in enumerate(step.args):
        moved.append(len(args))
        args += [None, *encoded[position].sizes()] if position in encoded else [arg]
    pointers = [(moved[position], slot, offset) for position, slot, offset in step.pointers]
    descriptors = [(moved[position], slot, offset, encoded[position]) for position, slot, offset, _ in step.descriptors]
    return step._replace(launch=how.launch, fixed=how.fixed, args=args, pointers=pointers, descriptors=descriptors)


def recorder() -> LaunchTracer | None:
    """The tracer that is recording at present, if any."""
    mode = _get_current_dispatch_mode()
    return mode if isinstance(mode, LaunchTracer) else None


def is_hooked() -> bool:
    """Whether a profiler has set a hook for Triton's launches."""
    runtime = triton.knobs.runtime
    return bool(_calls(runtime.launch_enter_hook) or _calls(runtime.launch_exit_hook))


def layout(t: Tensor) -> tuple[Any, ...]:
    """The properties of a tensor that a launch depends on, except its address."""
    return t.shape, t.stride(), t.dtype, t.data_ptr() & 15


def _calls(hook: Any) -> Any:
    return getattr(hook, "calls", hook)


def _range(t: Tensor) -> tuple[int, int]:
    """The tensor's first address, and the address after its last element."""
    first = t.data_ptr()
    if t.numel() == 0:
        return first, first
    elements = 1 + sum((size - 1) * stride for size, stride in zip(t.shape, t.stride(), strict=True))
    return first, first + elements * t.element_size()


def _with_frees(steps: list[Any], num_operands: int, results: list[int]) -> list[Any]:
    """The steps, each followed by one that frees the tensors whose last use it was."""
    last_use: dict[int, int] = {}
    for index, step in enumerate(steps):
        for slot in _slots_of(step):
            last_use[slot] = index
    freed: list[Any] = []
    for index, step in enumerate(steps):
        freed.append(step)
        ended = [
            slot for slot, last in last_use.items() if last == index and slot >= num_operands and slot not in results
        ]
        if ended:
            freed.append(_Freed(ended))
    return freed


def _slots_of(step: Any) -> list[int]:
    if isinstance(step, _Launched):
        return [entry[1] for entry in step.pointers] + [entry[1] for entry in step.descriptors]
    if isinstance(step, _Made):
        return [step.slot]
    if isinstance(step, _Kept):
        return [*step.slots, step.source]
    given = (*step.args, *step.kwargs.values())
    slots = [arg.number for arg in given if isinstance(arg, _Slot)]
    return slots if step.slot is None else [step.slot, *slots]
