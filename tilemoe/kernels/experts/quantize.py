"""Quantisation to FP8 (e4m3) with a scale for each block: ``value = data * scale``, the largest of a block on 448.

Activations and gradients have a scale for each 128 elements of a row, weights for each 128 x 128, so that a weight and
its transpose share their scales. A scale is the block's largest magnitude / 448 in fp32; 1 for a block of zeros.
``data`` is ``value * (1 / scale)``, the inverse and the product in fp32, rounded to nearest, ties to even. A NaN or an
infinity makes its block NaN.

What was quantised, multiplied back and rounded to its dtype is quantised to the same ``data`` and scales: the scale is
that of the largest, which comes back as it was, and no step of e4m3 is as fine as the dtype. But where values are
subnormal in the dtype and the largest of their block is less than 448 * 2^9 times the smallest subnormal (0.014 in
fp16, 2e-35 in bf16), e4m3's steps are the finer ones, and a value may fall to the neighbour.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from tilemoe.config import FP8_BLOCK
from tilemoe.kernels.experts.base import Operand
from tilemoe.kernels.experts.torch.activations import row_blocks

BLOCK = FP8_BLOCK
ROWS, WEIGHTS = (1, BLOCK), (BLOCK, BLOCK)
LARGEST = 448.0  # of e4m3
SMALLEST_SCALE = torch.finfo(torch.float32).tiny  # below, fp32 would lose the scale's own digits


def quantize(values: Tensor, block: tuple[int, int]) -> Operand:
    """``values`` (..., p, q), any float dtype but fp64, in e4m3, fp32 scales of blocks of the last two dimensions."""
    *batch, p, q = values.shape
    rows, columns = -(-p // block[0]), -(-q // block[1])
    padded = F.pad(values.float(), (0, columns * block[1] - q, 0, rows * block[0] - p))
    blocks = padded.view(*batch, rows, block[0], columns, block[1])
    largest = blocks.abs().amax(dim=(-3, -1), keepdim=True)
    scale = torch.where(largest == 0, 1.0, (largest / LARGEST).clamp(min=SMALLEST_SCALE))
    data = (blocks * (1 / scale)).clamp(-LARGEST, LARGEST).to(torch.float8_e4m3fn).view(padded.shape)[..., :p, :q]
    return Operand(data.contiguous(), scale.view(*batch, rows, columns), block, values.dtype)


def words_of_row(width: int) -> int:
    """int32 words of a row of this many values, a multiple of 128, in e4m3 with its scales: 33 / 128 of ``width``."""
    return width // 4 + width // BLOCK


def pack_rows(rows: Tensor) -> Tensor:
    """Rows (R, p), p a multiple of 128, quantised, as (R, `words_of_row`) int32, which any exchange carries: p bytes of
    data, then the scales.
    """
    operand = quantize(rows, ROWS)
    return torch.cat((operand.data.view(torch.int32), operand.scale.view(torch.int32)), dim=1)


def unpack_rows(words: Tensor, dtype: torch.dtype) -> Tensor:
    """The values (R, p) of what `pack_rows` gave."""
    return packed_operand(words, dtype).dense(dtype)


def packed_operand(words: Tensor, dtype: torch.dtype) -> Operand:
    """Rows (R, p) as views of ``words``, which hold them as `pack_rows` says."""
    width = words.shape[1] * BLOCK // words_of_row(BLOCK)
    data = words.view(torch.float8_e4m3fn)[:, :width]
    return Operand(data, words.view(torch.float32)[:, width // 4 :], ROWS, dtype)


def quantize_rows(rows: Tensor) -> Operand:
    """`quantize` of rows (R, p) in blocks of 1 x 128, some rows at a time: its temporaries are in fp32."""
    data = rows.new_empty(rows.shape, dtype=torch.float8_e4m3fn)
    scale = rows.new_empty(rows.shape[0], -(-rows.shape[1] // BLOCK), dtype=torch.float32)
    for part in row_blocks(rows):
        found = quantize(rows[part], ROWS)
        data[part], scale[part] = found.data, found.scale
    return Operand(data, scale, ROWS, rows.dtype)


def dense_rows(rows: Operand) -> Tensor:
    """The values (R, p) of what `quantize_rows` gave, in the dtype that was quantised; some rows at a time."""
    values = rows.data.new_empty(rows.data.shape, dtype=rows.dtype)
    for part in row_blocks(values):
        values[part] = rows[part,].dense(rows.dtype)
    return values


def why_not_quantized(dtype: torch.dtype, *widths: int) -> str | None:
    """Why a layer of this dtype with these values of d and n is not computed in FP8, in a few words; None if it is."""
    if dtype == torch.float64:
        return "fp64 is not quantised"
    for name, width in zip("dn", widths, strict=False):
        if width % BLOCK:
            return f"{name} is not a multiple of {BLOCK}"
    return None
