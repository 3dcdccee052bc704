"""The row GEMMs with a frozen weight in 4 bits: ``out_r = rows_r weight_e (+ bias_e)``, decoded tile by tile.

E experts · R_max static row capacity · BM, BN, BK tile · all widths are multiples of the format's block and of BK

Persistent CTAs walk the tile list, column tiles innermost. Each k-block of the weight is decoded in registers just
before it is multiplied; two CTAs share an SM where they can (`packed_registers`). Codes are read as int32 words of 8
neighbours. In up_proj and down_proj these lie along the contraction (decoded as (BN, BK), then transposed), in
down_proj_dgrad and up_proj_dgrad along the output (decoded as (BK, BN)). `formats.packed` has each format's loads.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from tilemoe.kernels.experts.formats.packed import PackedWeight
from tilemoe.kernels.experts.triton.configs import choose_packed_tile, packed_registers
from tilemoe.kernels.experts.triton.formats.packed import code_table, decode, factors, scaled
from tilemoe.kernels.experts.triton.host import arithmetic_constants, blocks, needs_int64
from tilemoe.kernels.experts.triton.operands import column_slices, line_pointers, load_bias, multiply_add, store_rows
from tilemoe.kernels.experts.triton.tiles import listed_tiles
from tilemoe.plan import RoutingPlan
from tilemoe.runtime.device import Device
from tilemoe.runtime.launch import Launch, ceil_div, launch_of, persistent_grid

_WORD = tl.constexpr(8)  # codes in an int32


def packed_launch(
    rows: Tensor, index: Tensor | None, weight: PackedWeight, bias: Tensor | None, plan: RoutingPlan, device: Device
) -> tuple[Launch, Tensor]:
    """(launch, out (R_max, q)): rows (R_max, p), or rows[index], times a packed weight (E, p, q), plus bias (E, q)."""
    p, q = weight.shape[1:]
    out = rows.new_empty(plan.capacity, q)
    tile = choose_packed_tile(p, rows.element_size(), device)
    tiles = listed_tiles(plan, tile.block_m)
    is_blocked_in = weight.blocked == 1
    stored = weight.transpose(1, 2) if is_blocked_in else weight
    codes, scales = stored.codes.view(torch.int32), stored.scales
    bias_strides = (0, 0) if bias is None else bias.stride()
    strides = (rows.stride(0), *codes.stride()[:2], *scales.stride()[:2], *bias_strides)
    args = (rows, index, codes, scales, bias, out, *tiles, p, q, *strides)
    constants = {
        "FORMAT": weight.name,
        "BLOCK": weight.block,
        "GATHER": index is not None,
        "HAS_BIAS": bias is not None,
        "BLOCKED_IN": is_blocked_in,
        "INT64_OFFSETS": needs_int64(rows),
        **arithmetic_constants(rows.dtype),
        "SLICES": tile.slices,
        **blocks(tile),
    }
    registers = packed_registers(rows.element_size(), device)
    grid = persistent_grid(device, tiles.capacity * ceil_div(q, tile.block_n), 1 if registers is None else 2)
    launch = launch_of(gemm_packed_kernel, grid, args, constants, tile.num_warps, tile.num_stages, registers)
    return launch, out


@triton.jit
def gemm_packed_kernel(
    rows,
    index,
    codes,
    scales,
    bias,
    out,
    expert_of_tile,
    row_of_tile,
    end_of_tile,
    num_tiles,
    width_in,
    width_out,
    stride_rows,
    stride_ce,
    stride_cline,
    stride_se,
    stride_sline,
    stride_be,
    stride_bout,
    FORMAT: tl.constexpr,
    BLOCK: tl.constexpr,
    GATHER: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    BLOCKED_IN: tl.constexpr,
    INT64_OFFSETS: tl.constexpr,
    PRECISION: tl.constexpr,
    SPLIT_ACCUM: tl.constexpr,
    SLICES: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """``out_r = rows_r weight_e (+ bias_e)``, for down_proj and up_proj_dgrad. GATHER reads ``rows[index[r]]``, for
    the GEMMs of up_proj and down_proj_dgrad.

    codes (E, lines, words) and scales (E, lines, blocks), both contiguous along their last dimension. With BLOCKED_IN a
    line is an output column, with blocks along the contraction; else a line is one index of the contraction.
    """
    # ``// m * m`` tells the compiler that these are multiples of m, so that it emits 16-byte loads.
    width_in, width_out, stride_rows = width_in // BLOCK * BLOCK, width_out // BLOCK * BLOCK, stride_rows // 8 * 8
    WORDS: tl.constexpr = BLOCK // _WORD
    stride_ce, stride_cline = stride_ce // WORDS * WORDS, stride_cline // WORDS * WORDS
    ALONG: tl.constexpr = BLOCK_K if BLOCKED_IN else BLOCK_N  # elements of a line in the tile
    SHARED: tl.constexpr = BLOCK if ALONG > BLOCK else ALONG  # how many of these share one scale
    table = code_table(FORMAT)
    column_tiles = tl.cdiv(width_out, BLOCK_N)
    total = tl.load(num_tiles) * column_tiles
    for number in tl.range(tl.program_id(0), total, tl.num_programs(0)):
        tile = number // column_tiles
        col = (number % column_tiles) * BLOCK_N
        expert = tl.load(expert_of_tile + tile).to(tl.int64)
        row = tl.load(row_of_tile + tile)
        end = tl.load(end_of_tile + tile)
        # Clamped: rows past the expert's end repeat its last row and are not stored.
        line = tl.minimum(row + tl.arange(0, BLOCK_M), end - 1)
        if GATHER:
            line = tl.load(index + line)
        left_pointers = line_pointers(rows, line, stride_rows, tl.arange(0, BLOCK_K), INT64_OFFSETS)
        code_base, scale_base = codes + expert * stride_ce, scales + expert * stride_se
        if BLOCKED_IN:
            column = tl.minimum(col + tl.arange(0, BLOCK_N), width_out - 1)
            words, blocks_in = tl.arange(0, BLOCK_K // _WORD), tl.arange(0, BLOCK_K // SHARED)
            code_pointers = code_base + column[:, None] * stride_cline + words[None, :]
            scale_pointers = scale_base + column[:, None] * stride_sline + blocks_in[None, :]
        else:
            step = tl.arange(0, BLOCK_K)
            words = col // _WORD + tl.arange(0, BLOCK_N // _WORD)
            blocks_out = col // BLOCK + tl.arange(0, BLOCK_N // SHARED)
            code_pointers = code_base + step[:, None] * stride_cline + words[None, :]
            scale_pointers = scale_base + step[:, None] * stride_sline + blocks_out[None, :]
            of_words, of_scales = (words * _WORD < width_out)[None, :], (blocks_out * BLOCK < width_out)[None, :]
        acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
        for k in range(0, width_in, BLOCK_K):
            left = tl.load(left_pointers + k)
            if BLOCKED_IN:
                values = decode(tl.load(code_pointers + k // _WORD), table, FORMAT, BLOCK_N, BLOCK_K)
                scale = factors(tl.load(scale_pointers + k // BLOCK), FORMAT)
                right = scaled(values, scale, BLOCK_N, BLOCK_K, SHARED).to(left.dtype).T
            else:
                tile_words = tl.load(code_pointers + tl.cast(k, tl.int64) * stride_cline, mask=of_words, other=0)
                tile_scales = tl.load(scale_pointers + tl.cast(k, tl.int64) * stride_sline, mask=of_scales, other=0)
                values = decode(tile_words, table, FORMAT, BLOCK_K, BLOCK_N)
                right = scaled(values, factors(tile_scales, FORMAT), BLOCK_K, BLOCK_N, SHARED).to(left.dtype)
            acc = multiply_add(left, right, acc, PRECISION, SPLIT_ACCUM)
        if HAS_BIAS:
            acc += load_bias(bias, expert, col, width_out, stride_be, stride_bout, BLOCK_N)[None, :]
        width: tl.constexpr = BLOCK_N // SLICES
        slices = column_slices(acc, BLOCK_M, BLOCK_N, SLICES)
        for i in tl.static_range(SLICES):
            store_rows(out, slices[i], end, row, col + i * width, width_out, False, BLOCK_M, width)
