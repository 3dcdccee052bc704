"""Kernel arguments for operands: a tensor descriptor (TMA) where the GPU and the strides allow, else the tensor itself.

E experts · parts = 2 where gate and up are two parts of one tile, else 1
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from triton.tools.ragged_tma import create_ragged_descriptor
from triton.tools.tensor_descriptor import TensorDescriptor

from tilemoe.kernels.experts.triton.configs import RAGGED_EXTENT, WIDTH_MULTIPLE
from tilemoe.runtime.device import Device

_ALIGNMENT = 16  # bytes: TMA needs the address and every stride but the last (1) to be multiples of it


def can_describe(t: Tensor, device: Device) -> bool:
    """Whether TMA can address ``t``: last dimension contiguous, address and other strides aligned."""
    outer = t.stride()[:-1]
    return (
        device.has_tma
        and t.numel() > 0
        and t.stride(-1) == 1
        and t.data_ptr() % _ALIGNMENT == 0
        and all(stride > 0 and stride * t.element_size() % _ALIGNMENT == 0 for stride in outer)
    )


def can_describe_rows(device: Device, *tensors: Tensor) -> bool:
    """Whether all of these row-major matrices can have (ragged) descriptors."""
    return all(can_describe(t, device) and t.shape[0] <= RAGGED_EXTENT for t in tensors)


def aligned_rows(t: Tensor) -> Tensor:
    """``t`` (rows, width) if its rows are aligned, else a copy; for operands that are read by pointer.

    cp.async needs at least 4 bytes, and Triton's fallback for narrower loads needs more shared memory than there is.
    """
    return t if has_aligned_rows(t) else t.clone(memory_format=torch.contiguous_format)


def has_aligned_rows(t: Tensor) -> bool:
    """Whether each row of ``t`` (rows, width) can be read 16 bytes at a time."""
    return t.stride(1) == 1 and t.stride(0) % WIDTH_MULTIPLE == 0 and t.data_ptr() % 16 == 0


def weight_argument(weight: Tensor, device: Device, block_in: int, block_out: int) -> tuple[Any, str, tuple[int, ...]]:
    """(weight or a descriptor of it, ACCESS, strides), the kernels' arguments for a weight viewed as (E, parts, in,
    out). `tilemoe.kernels.experts.triton.operands.load_weight` explains ACCESS.
    """
    strides = tuple(weight.stride())
    by_out = weight.transpose(2, 3)  # (E, parts, out, in)
    if can_describe(by_out, device):
        return TensorDescriptor.from_tensor(by_out, [1, weight.shape[1], block_out, block_in]), "in", strides
    by_in = weight.transpose(1, 2)  # (E, in, parts, out)
    if can_describe(by_in, device):
        return TensorDescriptor.from_tensor(by_in, [1, block_in, weight.shape[1], block_out]), "out", strides
    axis = wide_axis(weight)
    return weight, f"{axis} by pointer" if axis else "by pointer", strides


def wide_axis(weight: Tensor) -> str:
    """The dimension, "in" or "out", along which a weight (E, ..., in, out) can be read 16 bytes at a time, or ""."""
    *outer, of_in, of_out = weight.stride()
    for name, along, others in (("in", of_in, (*outer, of_out)), ("out", of_out, (*outer, of_in))):
        if along == 1 and all(stride % WIDTH_MULTIPLE == 0 for stride in others):
            return name
    return ""


def gathered_argument(rows: Tensor, columns: int, device: Device) -> tuple[Any, bool]:
    """(the kernel argument for a matrix whose rows are gathered, ``columns`` at a time; whether TMA gathers them)."""
    by_tma = device.gathers and can_describe(rows, device)
    return TensorDescriptor.from_tensor(rows, [1, columns]) if by_tma else rows, by_tma


def rows_argument(rows: Tensor, block: list[int], use_tma: bool) -> Any:
    """The kernel argument for a matrix whose tiles may run past an expert's end, into the next expert's rows."""
    return TensorDescriptor.from_tensor(rows, block) if use_tma else rows


def ragged_argument(rows: Tensor, block: list[int], use_tma: bool) -> Any:
    """The kernel argument for a matrix bounded by the expert's rows: beyond them loads give 0, stores write nothing."""
    return create_ragged_descriptor(rows, block) if use_tma else rows
