"""Quantisation to FP8 (e4m3) with one scale per block, in PyTorch: ``value = data * scale``.

For up_proj, down_proj_dgrad and up_proj_dgrad a block is a row of x, do or dh, or all of a weight that makes one
column of the product; for down_proj it is 1 x 128 of a or 128 x 128 of w2; for down_proj_wgrad and up_proj_wgrad,
where `quantizes_wgrad`, a row of x or do, and an expert's rows of dh or a_scaled, multiplied by their tokens' scales.
h is kept in blocks of 1 x 128. A scale is the block's largest magnitude / 448 in fp32, so that the largest value maps
to 448; 1 for a block of zeros. ``data`` is ``value * (1 / scale)``, the inverse and the product in fp32, rounded to
nearest, ties to even. A NaN or an infinity makes its block NaN.

Quantising is idempotent: values that were quantised, multiplied back and rounded to their dtype give the same ``data``
and scales again, since the block's largest value is reproduced exactly and e4m3 is coarser than the dtype. Exception:
values that are subnormal in the dtype, in a block whose largest value is less than 448 * 2^9 times the smallest
subnormal (0.014 in fp16, 2e-35 in bf16). There e4m3 is the finer one, and a value may change to its neighbour.
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
SMALLEST_SCALE = torch.finfo(torch.float32).tiny  # a smaller scale would be subnormal in fp32, and lose precision


def quantize(values: Tensor, block: tuple[int, int]) -> Operand:
    """``values`` (..., p, q), any float dtype but fp64, as e4m3; fp32 scales per block of the last two dimensions."""
    *batch, p, q = values.shape
    rows, columns = -(-p // block[0]), -(-q // block[1])
    padded = F.pad(values.float(), (0, columns * block[1] - q, 0, rows * block[0] - p))
    blocks = padded.view(*batch, rows, block[0], columns, block[1])
    largest = blocks.abs().amax(dim=(-3, -1), keepdim=True)
    scale = torch.where(largest == 0, 1.0, (largest / LARGEST).clamp(min=SMALLEST_SCALE))
    data = (blocks * (1 / scale)).clamp(-LARGEST, LARGEST).to(torch.float8_e4m3fn).view(padded.shape)[..., :p, :q]
    return Operand(data.contiguous(), scale.view(*batch, rows, columns), block, values.dtype)


def words_of_row(width: int) -> int:
    """int32 words that a row of ``width`` values, a multiple of 4, takes with its scale."""
    return width // 4 + 1


def pack_rows(rows: Tensor) -> Tensor:
    """Quantise rows (R, p), p a multiple of 4, to int32 words (R, `words_of_row`), which any collective can exchange.

    A row is p bytes of data, then its scale in fp32.
    """
    operand = quantize(rows, (1, rows.shape[1]))
    return torch.cat((operand.data.view(torch.int32), operand.scale.view(torch.int32)), dim=1)


def unpack_rows(words: Tensor, dtype: torch.dtype) -> Tensor:
    """The inverse of `pack_rows`: values (R, p) in ``dtype``."""
    return packed_operand(words, dtype).dense(dtype)


def packed_operand(words: Tensor, dtype: torch.dtype) -> Operand:
    """Rows (R, p) as an operand whose data and scales (R, 1) are views of ``words``, in the format of `pack_rows`."""
    width = 4 * (words.shape[1] - 1)
    data = words.view(torch.float8_e4m3fn)[:, :width]
    return Operand(data, words.view(torch.float32)[:, width // 4 :], (1, width), dtype)


def quantize_rows(rows: Tensor) -> Operand:
    """`quantize` of rows (R, p) in blocks of 1 x 128, some rows at a time, to bound the fp32 temporaries."""
    data = rows.new_empty(rows.shape, dtype=torch.float8_e4m3fn)
    scale = rows.new_empty(rows.shape[0], -(-rows.shape[1] // BLOCK), dtype=torch.float32)
    for part in row_blocks(rows):
        found = quantize(rows[part], ROWS)
        data[part], scale[part] = found.data, found.scale
    return Operand(data, scale, ROWS, rows.dtype)


def dense_rows(rows: Operand) -> Tensor:
    """The inverse of `quantize_rows`: values (R, p) in the dtype that was quantised; some rows at a time."""
    values = rows.data.new_empty(rows.data.shape, dtype=rows.dtype)
    for part in row_blocks(values):
        values[part] = rows[part,].dense(rows.dtype)
    return values


def why_not_quantized(dtype: torch.dtype, *widths: int) -> str | None:
    """Why a layer of this dtype with these values of d and n cannot be computed in FP8; None if it can."""
    if dtype == torch.float64:
        return "fp64 is not quantised"
    for name, width in zip("dn", widths, strict=False):
        if width % BLOCK:
            return f"{name} is not a multiple of {BLOCK}"
    return None
