"""TMA descriptors of the Hopper kernels' operands and outputs, all with the 128-byte swizzle.

E experts · parts = 2 where gate and up are two halves of one tile, else 1
"""

from __future__ import annotations

from functools import cache

from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from tilemoe.activations import ActivationSpec
from tilemoe.kernels.experts.formats.dense import is_column_major
from tilemoe.kernels.experts.hopper.configs import ADDED_N, BLOCK_K, EPILOGUE_N
from tilemoe.kernels.experts.triton.configs import RAGGED_EXTENT
from tilemoe.kernels.experts.triton.host import gate_up_layout


def described(t: Tensor, block: list[int]) -> TensorDescriptor:
    return TensorDescriptor(t, list(t.shape), list(t.stride()), block, _swizzled(t.element_size(), len(block)))


def weight_descriptor(weight: Tensor, columns: int) -> tuple[TensorDescriptor, bool]:
    """(descriptor of a weight (E, parts, in, out) with boxes of BLOCK_K by ``columns`` of each part, is it K-major).

    K-major: ``in``, the contraction, is contiguous. Otherwise ``out`` must be.
    """
    parts = weight.shape[1]
    if weight.stride(2) == 1:
        return described(weight.transpose(2, 3), [1, parts, columns, BLOCK_K]), True
    return described(weight, [1, parts, BLOCK_K, columns]), False


def gradient_descriptor(out: Tensor, rows: int, adds: bool) -> tuple[TensorDescriptor, bool]:
    """(descriptor of a gradient (E, p, q) to store or add slices of ``rows``, is it transposed); p or q contiguous."""
    block = [rows, ADDED_N if adds else EPILOGUE_N]
    if is_column_major(out):
        return described(out.transpose(1, 2), [1, *block[::-1]]), True
    return described(out, [1, *block]), False


def ragged_descriptor(rows: Tensor, block: list[int], rows_at: int = 0) -> TensorDescriptor:
    """Like `triton.tools.ragged_tma.create_ragged_descriptor`, whose descriptor Gluon does not accept.

    Rows are dimension ``rows_at``. Two extra leading dimensions, whose strides cancel modulo 2^64, let the coordinates
    move TMA's bounds check to an expert's last row: loads past it give zeros, and stores write nothing.
    """
    stride = rows.stride(rows_at)
    shape = [0x7FFF0000, 0x7FFF0000, *rows.shape]
    shape[2 + rows_at] = RAGGED_EXTENT
    block = [1, 1, *block]
    return TensorDescriptor(
        rows, shape, [2**34 - stride, stride, *rows.stride()], block, _swizzled(rows.element_size(), len(block))
    )


def h_output(h: Tensor, parts: int, n: int, rows: int) -> TensorDescriptor:
    """A ragged descriptor to store ``rows`` of h (R_max, w), viewed as (R_max, 2, n) if gate and up are two parts."""
    if parts == 2:
        return ragged_descriptor(h.unflatten(1, (2, n)), [rows, 1, EPILOGUE_N])
    return ragged_descriptor(h, [rows, EPILOGUE_N])


def h_descriptors(
    h: Tensor, dh: Tensor, n: int, spec: ActivationSpec, rows: int
) -> tuple[TensorDescriptor, TensorDescriptor]:
    """(descriptor to read h in down_proj_dgrad, ragged one to write dh); concatenated gate and up share a box."""
    block = [rows, EPILOGUE_N]
    if gate_up_layout(spec) != "concatenated":
        return described(h, block), ragged_descriptor(dh, block)
    h, dh = (t.unflatten(1, (2, n)).transpose(0, 1) for t in (h, dh))
    block = [2, *block]
    return described(h, block), ragged_descriptor(dh, block, rows_at=1)


@cache
def _swizzled(itemsize: int, rank: int) -> gl.NVMMASharedLayout:
    return gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=8 * itemsize, rank=rank)
