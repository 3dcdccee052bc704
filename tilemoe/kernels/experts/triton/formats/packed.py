"""The loads of 4-bit weights: codes to values and scales to factors, by format; and NF4's scales from a byte each.

E experts · p, q a weight's last two dimensions, as stored · m = p q / 64 scales of an expert
"""
# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

import torch
import triton
import triton.language as tl

from tilemoe.kernels.experts.formats import mxfp4, nf4
from tilemoe.kernels.experts.formats.nf4 import Nf4Weight
from tilemoe.runtime.launch import ceil_div, launch_of

_NESTED = tl.constexpr(nf4.nested_values())
_NESTED_BLOCK = tl.constexpr(nf4.NESTED_BLOCK)
_NESTED_BLOCKS = 16  # blocks per CTA, which first makes the table of values
_NF4 = tl.constexpr(nf4.CODES)
_MXFP4 = tl.constexpr(mxfp4.VALUES)


def with_whole_scales(weight: Nf4Weight) -> Nf4Weight:
    """`Nf4Weight.with_whole_scales` without its temporaries: scales (E, p, q / 64) fp32."""
    if weight.nested is None:
        return weight
    stored = weight if weight.blocked == 2 else weight.transpose(1, 2)
    absmax, nested = stored.absmax.contiguous(), weight.nested
    out = torch.empty(absmax.shape, dtype=torch.float32, device=absmax.device)
    experts, count = absmax.shape[0], absmax[0].numel()
    grid = (ceil_div(count, _NESTED_BLOCKS * nf4.NESTED_BLOCK), experts)
    args = (absmax, nested, out, count, nested.stride(0))
    launch_of(nested_scales_kernel, grid, args, {"BLOCKS": _NESTED_BLOCKS}, num_warps=8).run()
    out.add_(nested[:, :1, None])  # in the kernel it would be an fma, without the rounding between product and sum
    whole = Nf4Weight(stored.codes, out)
    return whole if weight.blocked == 2 else whole.transpose(1, 2)


@triton.jit
def nested_scales_kernel(absmax, nested, out, count, stride_nested, BLOCKS: tl.constexpr):
    """out (E, count) fp32: the value of each byte of absmax times its block's scale in nested, without the mean."""
    expert = tl.program_id(1).to(tl.int64)
    absmax, out, nested = absmax + expert * count, out + expert * count, nested + expert * stride_nested + 1
    value = tl.arange(0, 256)
    table = tl.zeros((256,), tl.float32)
    for code in tl.static_range(256):
        table = tl.where(value == code, _NESTED[code], table)
    for block in tl.range(tl.program_id(0) * BLOCKS, (tl.program_id(0) + 1) * BLOCKS):
        index = block * _NESTED_BLOCK + tl.arange(0, _NESTED_BLOCK)
        inside = index < count
        codes = tl.load(absmax + index, mask=inside, other=0).to(tl.int32)
        scale = tl.load(nested + block, mask=block * _NESTED_BLOCK < count, other=0.0)
        tl.store(out + index, tl.gather(table, codes, 0) * scale, mask=inside)


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

    The first of a byte's two codes is its high half in NF4, its low half in MXFP4. Codes are extracted by shifts, and
    looked up by a gather from shared memory.
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
    """The factors of the values: NF4's scales unchanged, or 2^(exponent - 127) for MXFP4's bytes."""
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
