"""The loads of 4-bit weights: values of codes, and factors of scales, by format.

BN, BK tile
"""
# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

import triton
import triton.language as tl

from tilemoe.kernels.experts.formats import mxfp4, nf4

_NF4 = tl.constexpr(nf4.CODES)
_MXFP4 = tl.constexpr(mxfp4.VALUES)


@triton.jit
def code_table(FORMAT: tl.constexpr):
    """The 16 values of the codes, fp32."""
    index = tl.arange(0, 16)
    table = tl.zeros((16,), tl.float32)
    for code in tl.static_range(16):
        table = tl.where(index == code, _NF4[code] if FORMAT == "nf4" else _MXFP4[code], table)
    return table


@triton.jit
def decode(words, table, FORMAT: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """(ROWS, COLUMNS) fp32 code values of int32 words (ROWS, COLUMNS / 8).

    The first of a byte's two codes is its high half in NF4, its low half in MXFP4. Codes are shifted out, and looked up
    by a gather of shared memory.
    """
    if FORMAT == "nf4":
        first = tl.join(tl.join(words >> 4, words >> 20), tl.join(words >> 12, words >> 28))
        second = tl.join(tl.join(words, words >> 16), tl.join(words >> 8, words >> 24))
    else:
        first = tl.join(tl.join(words, words >> 16), tl.join(words >> 8, words >> 24))
        second = tl.join(tl.join(words >> 4, words >> 20), tl.join(words >> 12, words >> 28))
    codes = tl.join(first, second) & 15
    return tl.gather(table, codes.reshape(ROWS * COLUMNS), 0).reshape(ROWS, COLUMNS)


@triton.jit
def factors(scales, FORMAT: tl.constexpr):
    """What values are multiplied by: NF4's scales as they are, 2^(exponent - 127) of MXFP4's bytes."""
    if FORMAT == "mxfp4":
        exponents = scales.to(tl.int32)
        scales = tl.where(exponents == 0, 1 << 22, exponents << 23).to(tl.float32, bitcast=True)
    return scales


@triton.jit
def scaled(values, scale, ROWS: tl.constexpr, COLUMNS: tl.constexpr, SHARED: tl.constexpr):
    """``values`` (ROWS, COLUMNS) times scale (ROWS, COLUMNS / SHARED): SHARED neighbours of a row have one scale."""
    if SHARED == COLUMNS:
        values = values * scale
    else:
        values = (values.reshape(ROWS, COLUMNS // SHARED, SHARED) * scale[:, :, None]).reshape(ROWS, COLUMNS)
    return values
