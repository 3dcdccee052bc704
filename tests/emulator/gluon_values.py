"""What kernels in `gluon_emulator` compute with: shared memory, descriptors, pointers, registers."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

_SPAN = 128  # bytes of a row that the widest swizzle spans


class EmulationError(AssertionError):
    """What the emulated kernel may not do on a GPU; see the list above."""


def require(condition: bool, message: str) -> None:
    if not condition:
        raise EmulationError(message)


class Buffer:
    """Shared memory. In an NVMMA layout, blocks of 128 bytes of columns lie one after the other, each with all rows.

    data: a view of the memory in the buffer's shape; of more columns than a block's, the last dimension is two, blocks
    and columns of a block. ``wrote`` is told what a warp group has stored.
    """

    def __init__(self, data: Tensor, shape: Sequence[int], wrote: Callable[[Buffer], None]) -> None:
        self.data, self.shape, self.wrote = data, [int(size) for size in shape], wrote

    @classmethod
    def of_memory(cls, memory: Tensor, shape: Sequence[int], layout: Any, wrote: Callable[[Buffer], None]) -> Buffer:
        """A first dimension that is not the layout's counts buffers, each of which begins where the last one ends."""
        columns = _SPAN // memory.element_size()
        if layout is None or shape[-1] <= columns:
            return cls(memory.view(list(shape)), shape, wrote)
        require(shape[-1] % columns == 0, "blocks of 128 bytes are emulated")
        outer, rows = list(shape[: -layout.rank]), list(shape[-layout.rank : -1])
        blocks = memory.view(*outer, shape[-1] // columns, math.prod(rows), columns).transpose(-3, -2)
        return cls(blocks.unflatten(-3, rows), shape, wrote)

    def _view(self, data: Tensor, shape: Sequence[int] | None = None) -> Buffer:
        return Buffer(data, data.shape if shape is None else shape, self.wrote)

    @property
    def is_blocked(self) -> bool:
        return self.data.dim() > len(self.shape)

    @property
    def extent(self) -> tuple[int, int]:
        """First address, and the end."""
        last = sum((size - 1) * stride for size, stride in zip(self.data.shape, self.data.stride(), strict=True))
        start = self.data.data_ptr()
        return start, start + (last + 1) * self.data.element_size()

    def index(self, i: int) -> Buffer:
        require(0 <= i < self.shape[0], "index outside the buffer")
        return self._view(self.data[int(i)], self.shape[1:])

    def slice(self, start: int, length: int, dim: int = 0) -> Buffer:
        require(start >= 0 and start + length <= self.shape[dim], "slice outside the buffer")
        require(not self.is_blocked, "a slice of more than one block is not emulated")
        return self._view(self.data.narrow(dim, start, length))

    def reshape(self, shape: Sequence[int]) -> Buffer:
        require(not self.is_blocked or shape[-1] == self.shape[-1], "other columns are not emulated")
        columns = self.data.shape[-2:] if self.is_blocked else shape[-1:]
        return self._view(self.data.view([*shape[:-1], *columns]), shape)

    def permute(self, order: Sequence[int]) -> Buffer:
        if not self.is_blocked:
            return self._view(self.data.permute(list(order)))
        require(list(order) == [1, 0] and self.data.dim() == 3, "of several blocks only a matrix is transposed")
        return self._view(self.data.permute(1, 2, 0), self.shape[::-1])

    @property
    def dtype(self) -> torch.dtype:
        return self.data.dtype

    def reinterpret(self, dtype: torch.dtype, shape: Sequence[int], layout: Any) -> Buffer:
        start, end = self.extent
        require(end - start == self.data.numel() * self.data.element_size(), "a buffer with gaps")
        memory = torch.as_strided(self.data, (self.data.numel(),), (1,)).view(dtype)
        require(math.prod(shape) <= memory.numel(), "more than the buffer holds")
        return Buffer.of_memory(memory[: math.prod(shape)], shape, layout, self.wrote)

    def read(self) -> Tensor:
        return self.data.reshape(self.shape)

    def write(self, value: Tensor) -> None:
        self.data.copy_(value.reshape(self.data.shape))

    def load(self, layout: Any) -> Registers:
        return self.read().clone().as_subclass(Registers)

    def store(self, value: Tensor) -> None:
        require(list(value.shape) == self.shape and value.dtype == self.dtype, "stored as what the buffer holds")
        self.write(value)
        self.wrote(self)


class Product:
    """An accumulator that products in flight are added to; ``length`` of them were."""

    def __init__(self, value: Tensor) -> None:
        self.value, self.length = value.clone(), 0

    def add(self, left: Buffer, right: Buffer) -> None:
        self.length += 1
        self.value += left.read().float() @ right.read().float()


class Descriptor:
    """A TMA descriptor inside a kernel. Strides count modulo 2^64, as those of ragged descriptors need."""

    def __init__(self, host: TensorDescriptor) -> None:
        self.base, self.shape, self.strides = host.base, list(host.shape), list(host.strides)
        self.block_shape, self.dtype, self.layout = list(host.block_shape), host.base.dtype, host.layout
        self.block_type = SimpleNamespace(nbytes=host.base.element_size() * math.prod(host.block_shape))

    def _inside(self, place: Sequence[int], box: Buffer, memory: Tensor) -> tuple[Tensor, tuple[slice, ...]]:
        """The part of a box that lies inside the tensor: of ``memory``, which is laid out like it, and in the box."""
        require(box.shape == self.block_shape, "the buffer has not the box's shape")
        require(all(at >= 0 for at in place), "a negative coordinate")
        bounds = zip(self.shape, place, self.block_shape, strict=True)
        counts = [max(0, min(size - at, block)) for size, at, block in bounds]
        part = tuple(slice(count) for count in counts)
        if 0 in counts:
            return memory.new_empty(counts), part
        offset = sum(at * stride for at, stride in zip(place, self.strides, strict=True)) % 2**64
        strides = [stride if count > 1 else 0 for stride, count in zip(self.strides, counts, strict=True)]
        last = offset + sum((count - 1) * stride for count, stride in zip(counts, strides, strict=True))
        require(last < memory.numel(), "TMA outside the tensor")
        return torch.as_strided(memory, counts, strides, memory.storage_offset() + offset), part

    def load(self, place: Sequence[int], target: Buffer) -> None:
        """Zeros where the box lies outside the tensor."""
        source, part = self._inside(place, target, flat_storage(self.base))
        values = source.new_zeros(self.block_shape)
        values[part] = source
        target.write(values)

    def store(self, place: Sequence[int], source: Buffer, stored: dict[int, Tensor], adds: bool) -> None:
        """Only where the box lies inside. ``stored``: by address, what is stored already; adds: to what is there."""
        flat = flat_storage(self.base)
        target, part = self._inside(place, source, flat)
        values = source.read()[part]
        target.copy_(target + values if adds else values)
        marks, _ = self._inside(place, source, stored.setdefault(flat.data_ptr(), torch.zeros_like(flat, dtype=bool)))
        require(not bool(marks.any()) or not marks.numel(), "an element is stored twice")
        marks.fill_(True)


class Pointer:
    """A pointer, or a tensor of them: positions in a flat tensor."""

    def __init__(self, flat: Tensor, offset: Any = 0) -> None:
        self.flat, self.offset = flat, offset

    @property
    def dtype(self) -> SimpleNamespace:
        return SimpleNamespace(element_ty=self.flat.dtype)

    def __add__(self, offset: Any) -> Pointer:
        return Pointer(self.flat, self.offset + offset)

    @property
    def address(self) -> int:
        return self.flat.data_ptr()

    def expanded(self, mask: Any) -> Tensor:
        """``mask``, which may be one bool for all offsets, in their shape."""
        return torch.as_tensor(mask).expand(self.offset.shape)

    def load(self, mask: Any = None, other: Any = 0) -> Any:
        """``other`` where ``mask`` is False, and nothing is read."""
        if not isinstance(self.offset, Tensor):
            if mask is not None and not mask:
                return Int(other)
            require(0 <= self.offset < self.flat.numel(), "a load outside the tensor")
            value = self.flat[self.offset].item()
            return Int(value) if isinstance(value, int) else value
        if mask is None:
            self._require_inside(self.offset)
            return self.flat[self.offset]
        offset = torch.where(mask, self.offset, 0)
        self._require_inside(offset)
        return torch.where(mask, self.flat[offset], other)

    def add(self, value: Tensor, mask: Tensor) -> Tensor:
        """Atomically, one element at a time: what was there before. Where ``mask`` is False: nothing to rely on."""
        before = torch.full_like(value, -(1 << 24))
        for i in mask.nonzero().flatten().tolist():
            at = int(self.offset[i])
            require(0 <= at < self.flat.numel(), "an addition outside the tensor")
            before[i] = self.flat[at]
            self.flat[at] += value[i]
        return before

    def store(self, value: Any, mask: Any) -> None:
        if not isinstance(self.offset, Tensor):
            require(0 <= self.offset < self.flat.numel(), "a store outside the tensor")
            if mask:
                self.flat[self.offset] = value
            return
        mask = self.expanded(mask)
        offset = self.offset[mask]
        self._require_inside(offset)
        self.flat[offset] = value[mask].to(self.flat.dtype)

    def _require_inside(self, offset: Tensor) -> None:
        # A negative position would count from the end.
        require(offset.numel() == 0 or int(offset.min()) >= 0, "an access before the tensor")
        require(offset.numel() == 0 or int(offset.max()) < self.flat.numel(), "an access past the tensor")


class Registers(Tensor):
    """A tensor in registers: Gluon's methods where PyTorch's of the same name are others."""

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """As PyTorch's own, without what is not needed here: that is a fifth of the emulation's time."""
        with torch._C.DisableTorchFunctionSubclass():
            result = function(*args, **(kwargs or {}))
        return result.as_subclass(cls) if isinstance(result, Tensor) else result

    @property
    def type(self) -> Any:
        return SimpleNamespace(layout=None)

    def split(self) -> tuple[Tensor, Tensor]:
        require(self.shape[-1] == 2, "split into two")
        return self[..., 0], self[..., 1]


class Int(int):
    """A scalar in registers."""

    def to(self, dtype: Any) -> Int:
        return self


def _closed(name: str) -> Callable[..., Any]:
    """The method ``name`` of int, giving an Int."""
    method = getattr(int, name)

    def apply(self: Int, *other: Any) -> Any:
        value = method(self, *other)
        return value if value is NotImplemented else Int(value)

    return apply


for _name in ("add", "sub", "mul", "floordiv", "mod", "and", "xor"):
    setattr(Int, f"__{_name}__", _closed(f"__{_name}__"))
    setattr(Int, f"__r{_name}__", _closed(f"__r{_name}__"))


def flat_storage(t: Tensor) -> Tensor:
    """All of the storage from the first element of ``t`` on."""
    return torch.as_strided(t, (t.untyped_storage().nbytes() // t.element_size() - t.storage_offset(),), (1,))
