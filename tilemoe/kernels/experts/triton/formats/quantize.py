"""`formats.fp8` on a GPU: ``data = e4m3(value / scale)``, ``scale`` = largest of the block / 448.

E experts · R rows · blocks of 1 x 128 or whole rows (rows), of 128 x 128 or whole rows (weights)

Memory-bound and not persistent: a CTA quantises 4096 values of rows, or one longer block of a row; one block or 64
rows of a weight. There are also kernels that dequantise, and that pack rows with their scales into int32 words.

Rows are quantised in each call. Weights are quantised once for each block shape and cached (`formats.fp8.kept`).
"""
# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from tilemoe.kernels.experts.formats.fp8 import (
    BLOCK,
    LARGEST,
    SMALLEST_SCALE,
    WEIGHTS,
    packed_operand,
    words_of_row,
)
from tilemoe.kernels.experts.formats.operand import Operand
from tilemoe.runtime.device import device_of, gpu_of
from tilemoe.runtime.launch import Launch, ceil_div, launch_of

_BLOCK = tl.constexpr(BLOCK)
_LARGEST = tl.constexpr(LARGEST)
_SMALLEST_SCALE = tl.constexpr(SMALLEST_SCALE)
_VALUES = 32 * BLOCK  # values of rows per CTA: 8 KB in 16 bits
_MOST_VALUES_OF_4_WARPS = 16384  # beyond, registers spill
_LINES = 64  # rows of a weight per CTA
_MIN_CAPABILITY = 89  # Ada is the first with instructions that multiply e4m3 and convert to it


def why_no_e4m3(device: torch.device) -> str | None:
    """Why the kernels cannot use e4m3 on this device; None if they can."""
    if device.type == "cuda" and gpu_of(device).capability < _MIN_CAPABILITY:
        return f"e4m3 needs compute capability {_MIN_CAPABILITY / 10}"
    return None


def quantized_blocks(rows: Tensor, width: int) -> Operand:
    """``rows`` (R, p), each row contiguous, quantised with a scale for each ``width`` elements of a row."""
    launch, operand = rows_launch(rows, width)
    if rows.shape[0]:
        launch.run()
    return operand


def dequantized_rows(rows: Operand) -> Tensor:
    """The inverse of `quantized_blocks`: values (R, p) in the dtype before quantisation."""
    launch, values = dense_rows_launch(rows)
    if values.shape[0]:
        launch.run()
    return values


def quantized_weight(weight: Tensor, block: tuple[int, int]) -> Operand:
    """``weight`` (E, p, q), any strides, quantised in blocks of 128 x 128 or of whole lines; contiguous along lines."""
    if block == WEIGHTS:
        launch, operand = block_weight_launch(weight)
    elif block[0] == 1:
        launch, operand = row_weight_launch(weight)
    else:
        launch, transposed = row_weight_launch(weight.transpose(1, 2))
        operand = transposed.transpose(1, 2)
    launch.run()
    return operand


def rows_launch(values: Tensor, block_width: int = BLOCK, into: Operand | None = None) -> tuple[Launch, Operand]:
    """(launch, operand): quantises values (R, p), rows contiguous, in blocks of 1 x block_width, which divides p.

    into: the operand to write to; its row stride is a whole number of words.
    """
    count, width = values.shape
    if into is None:
        data = values.new_empty(count, width, dtype=torch.float8_e4m3fn)
        scale = values.new_empty(count, width // block_width, dtype=torch.float32)
        into = Operand(data, scale, (1, block_width), values.dtype)
    strides = (values.stride(0), into.data.stride(0) // 4, into.scale.stride(0))
    padded = triton.next_power_of_2(block_width)
    constants = {"BLOCK_M": max(_VALUES // padded, 1), "BLOCK_P": padded}
    grid = (ceil_div(count, constants["BLOCK_M"]), width // block_width)
    args = (values, into.data, into.scale, count, block_width, *strides)
    num_warps = 8 if padded > _MOST_VALUES_OF_4_WARPS else 4
    return launch_of(quantize_rows_kernel, grid, args, constants, num_warps=num_warps), into


def pack_rows(rows: Tensor) -> Tensor:
    """`tilemoe.kernels.experts.formats.fp8.pack_rows` in one kernel."""
    device_of(rows)
    words = rows.new_empty(rows.shape[0], words_of_row(rows.shape[1]), dtype=torch.int32)
    if rows.shape[0]:
        values = rows if rows.stride(1) == 1 else rows.contiguous()
        rows_launch(values, values.shape[1], packed_operand(words, rows.dtype))[0].run()
    return words


def unpack_rows(words: Tensor, dtype: torch.dtype) -> Tensor:
    """`tilemoe.kernels.experts.formats.fp8.unpack_rows` in one kernel."""
    device_of(words)
    return dequantized_rows(packed_operand(words, dtype))


def dense_rows_launch(rows: Operand) -> tuple[Launch, Tensor]:
    """(launch, values (R, p)): dequantises contiguous rows with a scale per row, or per block, a multiple of 128."""
    data, scale = rows.data, rows.scale
    count, width = data.shape
    values = data.new_empty(count, width, dtype=rows.dtype)
    args = (data, scale, values, count, width, rows.block[1], data.stride(0) // 4, scale.stride(0))
    block_m = _VALUES // BLOCK
    grid = (ceil_div(count, block_m), ceil_div(width, BLOCK))
    return launch_of(dequantize_rows_kernel, grid, args, {"BLOCK_M": block_m}), values


def block_weight_launch(weight: Tensor) -> tuple[Launch, Operand]:
    """(launch, operand): quantises weight (E, p, q) of any strides in blocks of 128 x 128, to contiguous data."""
    experts, p, q = weight.shape
    scale = weight.new_empty(experts, p // BLOCK, q // BLOCK, dtype=torch.float32)
    data = weight.new_empty(experts, p, q, dtype=torch.float8_e4m3fn)
    grid = (q // BLOCK, p // BLOCK, experts)
    launch = launch_of(quantize_blocks_kernel, grid, (weight, data, scale, p, q, *weight.stride()), {}, num_warps=8)
    return launch, Operand(data, scale, WEIGHTS, weight.dtype)


def row_weight_launch(weight: Tensor) -> tuple[Launch, Operand]:
    """(launch, operand): quantises weight (E, p, q) of any strides with a scale per row (E, p), to contiguous data."""
    experts, p, q = weight.shape
    if weight.is_contiguous():  # a CTA that can hold a row reads it once
        launch, rows = rows_launch(weight.flatten(0, 1), q)
        return launch, Operand(rows.data.view(experts, p, q), rows.scale.view(experts, p, 1), (1, q), weight.dtype)
    data = weight.new_empty(experts, p, q, dtype=torch.float8_e4m3fn)
    scale = weight.new_empty(experts, p, 1, dtype=torch.float32)
    args = (weight, data, scale, p, q, *weight.stride())
    launch = launch_of(quantize_weight_rows_kernel, (ceil_div(p, _LINES), experts), args, {"BLOCK_P": _LINES})
    return launch, Operand(data, scale, (1, q), weight.dtype)


@triton.jit
def scale_for(largest, has_nan):
    scale = tl.where(largest == 0, 1.0, tl.maximum(largest / _LARGEST, _SMALLEST_SCALE))
    return tl.where(has_nan > 0, float("nan"), scale)  # tl.max and tl.maximum drop NaN


@triton.jit
def rounded(values, scale):
    """``values * (1 / scale)`` in e4m3. It is clamped, since a product above 448 would become NaN."""
    return tl.clamp(values * tl.div_rn(1.0, scale), -_LARGEST, _LARGEST, tl.PropagateNan.ALL).to(tl.float8e4nv)


@triton.jit
def quantize_rows_kernel(
    values, data, scale, count, block_width, stride, stride_words, stride_scale,
    BLOCK_M: tl.constexpr, BLOCK_P: tl.constexpr,
):  # fmt: skip
    """values (R, p) -> data (R, p) e4m3 and scale (R, p / block_width) fp32.

    The strides are row strides; data's counts words, so that the compiler knows that it may write four values at once.
    """
    row = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    block = tl.program_id(1)
    inner = tl.arange(0, BLOCK_P)
    inside = (row < count)[:, None] & (inner < block_width)[None, :]
    line, column = row.to(tl.int64), block * block_width + inner
    tile = tl.load(values + line[:, None] * stride + column[None, :], mask=inside, other=0.0).to(tl.float32)
    scale_of_row = scale_for(tl.max(tl.abs(tile), axis=1), tl.max((tile != tile).to(tl.int32), axis=1))
    tile = rounded(tile, scale_of_row[:, None])
    tl.store(data + line[:, None] * (4 * stride_words) + column[None, :], tile, mask=inside)
    tl.store(scale + line * stride_scale + block, scale_of_row, mask=row < count)


@triton.jit(do_not_specialize=["count"])
def dequantize_rows_kernel(
    data, scale, values, count, width, block_width, stride_words, stride_scale, BLOCK_M: tl.constexpr
):
    """data (R, p) and scale (R, p / block_width) -> values (R, p), contiguous; strides as in `quantize_rows_kernel`."""
    row = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    first = tl.program_id(1) * _BLOCK
    column = first + tl.arange(0, _BLOCK)
    inside = (row < count)[:, None] & (column < width)[None, :]
    line = row.to(tl.int64)
    tile = tl.load(data + line[:, None] * (4 * stride_words) + column[None, :], mask=inside, other=0.0).to(tl.float32)
    tile *= tl.load(scale + line * stride_scale + first // block_width, mask=row < count, other=0.0)[:, None]
    tl.store(values + line[:, None] * width + column[None, :], tile.to(values.dtype.element_ty), mask=inside)


@triton.jit
def quantize_blocks_kernel(weight, data, scale, p, q, stride_e, stride_p, stride_q):
    """weight (E, p, q) -> data (E, p, q) and scale (E, p / 128, q / 128)."""
    block_q, block_p, expert = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    line = (block_p * _BLOCK + tl.arange(0, _BLOCK)).to(tl.int64)
    column = block_q * _BLOCK + tl.arange(0, _BLOCK)
    pointers = weight + expert * stride_e + line[:, None] * stride_p + column.to(tl.int64)[None, :] * stride_q
    tile = tl.load(pointers).to(tl.float32)
    has_nan = tl.max(tl.max((tile != tile).to(tl.int32), axis=1), axis=0)
    scale_of_block = scale_for(tl.max(tl.max(tl.abs(tile), axis=1), axis=0), has_nan)
    tl.store(data + expert * p * q + line[:, None] * q + column[None, :], rounded(tile, scale_of_block))
    tl.store(scale + (expert * (p // _BLOCK) + block_p) * (q // _BLOCK) + block_q, scale_of_block)


@triton.jit
def quantize_weight_rows_kernel(weight, data, scale, p, q, stride_e, stride_p, stride_q, BLOCK_P: tl.constexpr):
    """weight (E, p, q) -> data (E, p, q) and scale (E, p). A CTA reads rows twice: for the scales, then to round."""
    expert = tl.program_id(1).to(tl.int64)
    row = tl.program_id(0) * BLOCK_P + tl.arange(0, BLOCK_P)
    step = tl.arange(0, _BLOCK)
    inside = (row < p)[:, None]
    pointers = weight + expert * stride_e + row.to(tl.int64)[:, None] * stride_p
    pointers += step.to(tl.int64)[None, :] * stride_q
    stride_block = tl.cast(stride_q, tl.int64) * _BLOCK
    largest = tl.zeros((BLOCK_P,), dtype=tl.float32)
    has_nan = tl.zeros((BLOCK_P,), dtype=tl.int32)
    for block in range(q // _BLOCK):
        tile = tl.load(pointers + block * stride_block, mask=inside, other=0.0).to(tl.float32)
        largest = tl.maximum(largest, tl.max(tl.abs(tile), axis=1))
        has_nan = tl.maximum(has_nan, tl.max((tile != tile).to(tl.int32), axis=1))
    scale_of_row = scale_for(largest, has_nan)
    out = data + (expert * p + row)[:, None] * q + step[None, :]
    for block in range(q // _BLOCK):
        tile = tl.load(pointers + block * stride_block, mask=inside, other=0.0).to(tl.float32)
        tl.store(out + block * _BLOCK, rounded(tile, scale_of_row[:, None]), mask=inside)
    tl.store(scale + expert * p + row, scale_of_row, mask=row < p)
