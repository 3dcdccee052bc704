"""Transposed copies of the FP8 operands of down_proj_wgrad and up_proj_wgrad, ``out_e = A_e^T B_e``.

T tokens · E experts · R_max static row capacity · p, q widths of A (gathered: x or do) and B (dh or a_scaled)
C capacity of the list of row tiles · L = C * 128 length of the copies along the rows · c width of a slice of A

Tensor cores need 8-bit operands contiguous along the contraction, here an expert's rows. So both operands are copied.
A's quantised tokens are gathered and transposed to (c, L), one slice of columns after the other to bound the memory.
B is multiplied by its tokens' scales, quantised with one scale per expert, and transposed to (q, L). An expert's rows
take whole blocks of 128, from `first_block` on, padded with zeros. The GEMM (`hopper.gemm_wgrad`) multiplies only its
result by a scale, the expert's.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from tilemoe.kernels.experts.formats.fp8 import BLOCK
from tilemoe.kernels.experts.triton.formats.quantize import quantized_blocks, rounded, scale_for
from tilemoe.kernels.experts.triton.tiles import listed_tiles
from tilemoe.plan import RoutingPlan, TileList
from tilemoe.runtime.launch import Launch, ceil_div, launch_of

_BLOCK = tl.constexpr(BLOCK)
SLICE = 2048  # columns of A whose gathered copy exists at a time
PART = 2048  # columns of B whose largest magnitude one CTA finds
_PART = tl.constexpr(PART)


class WgradOperands(NamedTuple):
    """The operands for A's columns from ``first`` on: by_token (c, L) and by_row (q, L), e4m3; scale (E), unspecified
    for an expert without rows.
    """

    first: int
    by_token: Tensor
    by_row: Tensor
    scale: Tensor


def wgrad_operands(by_token: Tensor, by_row: Tensor, plan: RoutingPlan) -> Iterator[WgradOperands]:
    """Yields the operands for each slice of by_token's columns. by_token (T, p) has contiguous rows, by_row (R_max, q)
    is contiguous; p and q are multiples of 128.

    A slice overwrites the one before: launch a slice's GEMM before asking for the next.
    """
    p = by_token.shape[1]
    tokens, tiles = quantized_blocks(by_token, p), listed_tiles(plan, BLOCK)
    find, largest = largest_launch(by_row, tokens.scale, plan, tiles)
    quantize, right, scale = quantize_launch(by_row, tokens.scale, largest, plan, tiles)
    find.run()
    quantize.run()
    left = tokens.data.new_empty(min(p, SLICE), tiles.capacity * BLOCK)
    for first in range(0, p, SLICE):
        columns = tokens.data[:, first : first + SLICE]
        of_slice = left[: columns.shape[1]]
        gather_launch(columns, of_slice, plan, tiles).run()
        yield WgradOperands(first, of_slice, right, scale)


def gather_launch(data: Tensor, out: Tensor, plan: RoutingPlan, tiles: TileList) -> Launch:
    """The launch that gathers each row's token of data (T, c), e4m3, and writes it transposed to out (c, L)."""
    indices = (plan.token_of_row, plan.row_start_of_expert, *tiles)
    width = data.shape[1]
    args = (data.view(torch.uint8), out.view(torch.uint8), *indices, width, data.stride(0), tiles.capacity)
    return launch_of(gather_transposed_kernel, (tiles.capacity * (width // BLOCK),), args, {}, num_warps=8)


def largest_launch(rows: Tensor, scale: Tensor, plan: RoutingPlan, tiles: TileList) -> tuple[Launch, Tensor]:
    """(launch, largest (C, parts) fp32): the largest magnitude of rows (R_max, q) times scale (T, 1), in each part of
    `PART` columns of each row tile.
    """
    width = rows.shape[1]
    largest = scale.new_empty(tiles.capacity, ceil_div(width, PART))
    args = (rows, scale, largest, plan.token_of_row, *tiles[1:], width)
    return launch_of(largest_of_tiles_kernel, (largest.numel(),), args, {}), largest


def quantize_launch(
    rows: Tensor, token_scale: Tensor, largest: Tensor, plan: RoutingPlan, tiles: TileList
) -> tuple[Launch, Tensor, Tensor]:
    """(launch, data (q, L) e4m3, scale (E)): rows (R_max, q) times token_scale (T, 1), quantised and transposed."""
    width = rows.shape[1]
    data = rows.new_empty(width, tiles.capacity * BLOCK, dtype=torch.float8_e4m3fn)
    scale = largest.new_empty(plan.num_experts)
    indices = (plan.token_of_row, plan.row_start_of_expert, *tiles)
    args = (rows, token_scale, largest, data, scale, *indices, width, tiles.capacity)
    return launch_of(quantize_transposed_kernel, (tiles.capacity * (width // BLOCK),), args, {}), data, scale


@triton.jit
def first_block(start, expert):
    """The first block of 128 in the copies for an expert whose rows begin at ``start``.

    Experts do not overlap: ``start // 128 + ceil(count / 128)`` is at most ``(start + count) // 128 + 1``.
    """
    return start // _BLOCK + expert


@triton.jit(do_not_specialize=["capacity"])
def gather_transposed_kernel(
    data, out, token_of_row, row_start_of_expert, expert_of_tile, row_of_tile, end_of_tile, num_tiles,
    width, stride, capacity,
):  # fmt: skip
    """data (T, ``width`` = c) -> out (c, L), both of bytes; a CTA moves 128 columns of a row tile."""
    columns = width // _BLOCK
    tile = tl.program_id(0) // columns
    if tile < tl.load(num_tiles):
        expert, first = tl.load(expert_of_tile + tile), tl.load(row_of_tile + tile)
        row = first + tl.arange(0, _BLOCK)
        inside = row < tl.load(end_of_tile + tile)
        token = tl.load(token_of_row + row, mask=inside, other=0).to(tl.int64)
        column = tl.program_id(0) % columns * _BLOCK + tl.arange(0, _BLOCK)
        values = tl.load(data + token[:, None] * stride + column[None, :], mask=inside[:, None], other=0)
        start = tl.load(row_start_of_expert + expert)
        _store_transposed(out, values, start, expert, first, column, capacity)


@triton.jit
def _store_transposed(out, values, start, expert, first, column, capacity):
    """Store ``values`` (128, 128), of the rows from ``first`` on, transposed to out (., L) at ``column``."""
    block = first_block(start, expert) + (first - start) // _BLOCK
    line = out + column.to(tl.int64)[:, None] * (capacity * _BLOCK)
    tl.store(line + block * _BLOCK + tl.arange(0, _BLOCK)[None, :], tl.trans(values))


@triton.jit
def largest_of_tiles_kernel(rows, token_scale, largest, token_of_row, row_of_tile, end_of_tile, num_tiles, width):
    """rows (R_max, ``width`` = q), token_scale (T) -> largest (C, parts), NaN where a product is NaN.

    A CTA handles one part of a row tile's columns.
    """
    parts = tl.cdiv(width, _PART)
    tile, begin = tl.program_id(0) // parts, tl.program_id(0) % parts * _PART
    if tile < tl.load(num_tiles):
        row = tl.load(row_of_tile + tile) + tl.arange(0, _BLOCK)
        inside = row < tl.load(end_of_tile + tile)
        pointers = rows + row.to(tl.int64)[:, None] * width + tl.arange(0, _BLOCK)[None, :]
        of_row = tl.zeros((_BLOCK,), dtype=tl.float32)
        has_nan = tl.zeros((_BLOCK,), dtype=tl.int32)
        for column in range(begin, tl.minimum(begin + _PART, width), _BLOCK):
            values = tl.load(pointers + column, mask=inside[:, None], other=0.0).to(tl.float32)
            of_row = tl.maximum(of_row, tl.max(tl.abs(values), axis=1))
            has_nan = tl.maximum(has_nan, tl.max((values != values).to(tl.int32), axis=1))
        token = tl.load(token_of_row + row, mask=inside, other=0)
        of_row *= tl.load(token_scale + token, mask=inside, other=0.0)
        bad = tl.max(tl.maximum(has_nan, (of_row != of_row).to(tl.int32)), axis=0)
        tl.store(largest + tl.program_id(0), tl.where(bad > 0, float("nan"), tl.max(of_row, axis=0)))


@triton.jit(do_not_specialize=["capacity"])
def quantize_transposed_kernel(
    rows, token_scale, largest, data, scale, token_of_row, row_start_of_expert,
    expert_of_tile, row_of_tile, end_of_tile, num_tiles, width, capacity,
):  # fmt: skip
    """rows (R_max, ``width`` = q), token_scale (T), largest (C, parts) -> data (q, L), scale (E).

    A CTA handles 128 columns of a row tile.
    """
    columns = width // _BLOCK
    tile, column_tile = tl.program_id(0) // columns, tl.program_id(0) % columns
    if tile < tl.load(num_tiles):
        expert, first, end = tl.load(expert_of_tile + tile), tl.load(row_of_tile + tile), tl.load(end_of_tile + tile)
        start = tl.load(row_start_of_expert + expert)
        first_tile = tile - (first - start) // _BLOCK
        parts = tl.cdiv(width, _PART)
        of_expert = _scale_of_expert(largest + first_tile * parts, tl.cdiv(end - start, _BLOCK) * parts)
        tl.store(scale + expert, of_expert, mask=(tile == first_tile) & (column_tile == 0))
        row = first + tl.arange(0, _BLOCK)
        inside = row < end
        token = tl.load(token_of_row + row, mask=inside, other=0)
        factor = tl.load(token_scale + token, mask=inside, other=0.0)
        column = column_tile * _BLOCK + tl.arange(0, _BLOCK)
        pointers = rows + row.to(tl.int64)[:, None] * width + column[None, :]
        values = tl.load(pointers, mask=inside[:, None], other=0.0).to(tl.float32) * factor[:, None]
        _store_transposed(data, rounded(values, of_expert), start, expert, first, column, capacity)


@triton.jit
def _scale_of_expert(largest, count):
    """The scale of an expert, from the ``count`` largest magnitudes of its parts."""
    most, has_nan = 0.0, 0
    for at in range(0, count, _BLOCK):
        index = at + tl.arange(0, _BLOCK)
        found = tl.load(largest + index, mask=index < count, other=0.0)
        most = tl.maximum(most, tl.max(found, axis=0))
        has_nan = tl.maximum(has_nan, tl.max((found != found).to(tl.int32), axis=0))
    return scale_for(most, has_nan)
