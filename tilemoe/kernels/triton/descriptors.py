"""How a kernel reaches an operand: by tensor descriptor (TMA) where the GPU and the layout allow, else by pointer.

T tokens · E experts · parts = 2 where gate and up are two tiles of one step, else 1
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from triton.tools.ragged_tma import create_ragged_descriptor
from triton.tools.tensor_descriptor import TensorDescriptor

from tilemoe.kernels.tiling import WIDTH_MULTIPLE, Device

_ALIGNMENT = 16  # bytes: what TMA asks of the address and of every stride but the last, which is 1
_MAX_ROWS = 1 << 30  # of a ragged descriptor


def can_describe(t: Tensor, device: Device) -> bool:
    """Whether ``t``, its last dimension contiguous, can be reached through TMA."""
    outer = t.stride()[:-1]
    return (
        device.has_tma
        and t.numel() > 0
        and t.stride(-1) == 1
        and t.data_ptr() % _ALIGNMENT == 0
        and all(stride > 0 and stride * t.element_size() % _ALIGNMENT == 0 for stride in outer)
    )


def can_describe_rows(device: Device, *tensors: Tensor) -> bool:
    """Whether row-major tensors can all be reached through (ragged) descriptors."""
    return all(can_describe(t, device) and t.shape[0] <= _MAX_ROWS for t in tensors)


def weight_operand(weight: Tensor, device: Device, block_in: int, block_out: int) -> tuple[Any, str, tuple[int, ...]]:
    """The kernel's arguments for a weight seen as (E, parts, in, out): itself or a descriptor, its access, its strides.

    Access is that of `tilemoe.kernels.triton.operands.load_weight`.
    """
    strides = tuple(weight.stride())
    by_out = weight.transpose(2, 3)  # (E, parts, out, in)
    if can_describe(by_out, device):
        return TensorDescriptor.from_tensor(by_out, [1, weight.shape[1], block_out, block_in]), "in", strides
    by_in = weight.transpose(1, 2)  # (E, in, parts, out)
    if can_describe(by_in, device):
        return TensorDescriptor.from_tensor(by_in, [1, block_in, weight.shape[1], block_out]), "out", strides
    for along, across, access in ((2, 3, "in by pointer"), (3, 2, "out by pointer")):
        outer = (strides[0], strides[1], strides[across])
        if strides[along] == 1 and all(stride % WIDTH_MULTIPLE == 0 for stride in outer):
            return weight, access, strides
    return weight, "by pointer", strides


def rows_operand(rows: Tensor, block: list[int], use_tma: bool) -> Any:
    """A matrix whose tiles are read wherever they lie: rows past an expert's end belong to others."""
    return TensorDescriptor.from_tensor(rows, block) if use_tma else rows


def ragged_operand(rows: Tensor, block: list[int], use_tma: bool) -> Any:
    """Rows of which each expert owns a range: loads past the range's end give zeros, stores there write nothing."""
    return create_ragged_descriptor(rows, block) if use_tma else rows
