"""Bias gradients ``db1_e = sum of e's dh_r`` and ``db2_e = sum of s_r do_t(r)``, and the term ``<do_t, b2_e>`` of ds.

T tokens · d hidden_size · E experts · R_max static row capacity · w columns of h · C capacity of a list of row tiles
BM, BN, BK tile

do is multiplied in two small dense GEMMs, by b2 and by the scores scattered to (E, T); a gather would read do K times.
db2's GEMM is split-K over the tokens; db1 is a two-level sum (tiles, then experts). All sums have a fixed order.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from tilemoe.kernels.experts.triton.configs import (
    MIN_BLOCK,
    choose_bias_products_tile,
    choose_scores_tile,
    stage_bytes,
    tile_rows,
)
from tilemoe.kernels.experts.triton.descriptors import aligned_rows, can_describe_rows, rows_argument
from tilemoe.kernels.experts.triton.host import arithmetic_constants, blocks
from tilemoe.kernels.experts.triton.operands import line_pointers, multiply_add
from tilemoe.kernels.experts.triton.tiles import listed_tiles
from tilemoe.plan import RoutingPlan, TileList
from tilemoe.runtime.device import Device, device_of
from tilemoe.runtime.launch import Launch, ceil_div, launch_of, power_of_two

_LOWER_SCALE = tl.constexpr(2048.0)  # factor of a score's lower part, without which it would underflow in fp16
_FEWEST_EXPERTS = 128  # smallest BLOCK_E: layers with at most this many experts share one binary
_SUM_COLUMNS = 128  # columns per CTA of db1's sums
_SUM_TILES = 16  # tiles' sums that `expert_sums_kernel` adds per step


def down_proj_bias_grad(do: Tensor, s: Tensor, plan: RoutingPlan, device: Device) -> Tensor:
    """db2 (E, d) fp32: each expert's sum of s do over its rows; do (T, d) has aligned rows. R_max > 0."""
    launch, dense = dense_scores_launch(do, s, plan, device)
    launch.run()
    launch, sums = scores_times_grad_launch(do, dense, plan, device)
    launch.run()
    return sums.sum(0)


def up_proj_bias_grad(dh: Tensor, plan: RoutingPlan, device: Device) -> Tensor:
    """db1 (E, w) fp32: the sum of each expert's rows of dh (R_max, w), contiguous. R_max > 0."""
    tile_m = tile_rows(dh.element_size(), device)
    launch, sums = tile_sums_launch(dh, listed_tiles(plan, tile_m), tile_m)
    launch.run()
    launch, out = expert_sums_launch(sums, plan, tile_m)
    launch.run()
    return out


def row_products(do: Tensor, b2: Tensor) -> Tensor:
    """`products_launch`'s products (T, E), for any strides. Tiles and summation order do not depend on T. T > 0."""
    launch, products = products_launch(aligned_rows(do), aligned_rows(b2), device_of(do))
    launch.run()
    return products


def products_launch(do: Tensor, b2: Tensor, device: Device) -> tuple[Launch, Tensor]:
    """(launch, products (T, E) fp32): ``<do_t, b2_e>`` of do (T, d) and b2 (E, d), both with aligned rows."""
    (num_tokens, d), num_experts = do.shape, b2.shape[0]
    products = do.new_empty(num_tokens, num_experts, dtype=torch.float32)
    tile = choose_bias_products_tile(num_experts, do.element_size(), device)
    use_tma = can_describe_rows(device, do, b2)
    left = rows_argument(do, [tile.block_m, tile.block_k], use_tma)
    right = rows_argument(b2, [tile.block_n, tile.block_k], use_tma)
    args = (left, right, products, num_tokens, num_experts, d, do.stride(0), b2.stride(0))
    constants = {"USE_TMA": use_tma, **arithmetic_constants(do.dtype), **blocks(tile)}
    grid = (ceil_div(num_tokens, tile.block_m) * ceil_div(num_experts, tile.block_n),)
    return launch_of(bias_products_kernel, grid, args, constants, tile.num_warps, tile.num_stages), products


def dense_scores_launch(do: Tensor, s: Tensor, plan: RoutingPlan, device: Device) -> tuple[Launch, Tensor]:
    """(launch, dense (E, parts, width)): the scores by expert and token, in do's dtype; two parts if that is 16-bit.

    width: T rounded up, so that rows are aligned. `dense_scores_kernel` describes the parts.
    """
    parts = 1 if do.dtype == torch.float32 else 2
    width = ceil_div(plan.num_tokens, MIN_BLOCK) * MIN_BLOCK
    dense = do.new_zeros(plan.num_experts, parts, width)
    tile_m = tile_rows(do.element_size(), device)
    tiles = listed_tiles(plan, tile_m)
    args = (s, dense, plan.token_of_row, plan.pair_of_row, plan.row_start_of_expert, *tiles, width)
    return launch_of(dense_scores_kernel, (tiles.capacity,), args, {"PARTS": parts, "BLOCK_M": tile_m}), dense


def scores_times_grad_launch(do: Tensor, dense: Tensor, plan: RoutingPlan, device: Device) -> tuple[Launch, Tensor]:
    """(launch, out (splits, E, d) fp32), which the caller sums over the splits; dense is from `dense_scores_launch`."""
    (num_experts, parts, width), d = dense.shape, do.shape[1]
    tile = choose_scores_tile(num_experts, parts, do.element_size(), device)
    tiles = ceil_div(d, tile.block_m) * ceil_div(num_experts, tile.block_n)
    bytes_of_cta = tile.num_stages * stage_bytes(tile, parts, do.element_size())
    resident = device.multiprocessors * max(1, device.shared_bytes // bytes_of_cta)
    splits = max(1, min(resident, 2 * device.multiprocessors) // tiles)
    out = do.new_empty(splits, num_experts, d, dtype=torch.float32)
    scores = dense.view(num_experts * parts, width)
    use_tma = can_describe_rows(device, do, scores)
    left = rows_argument(do, [tile.block_k, tile.block_m], use_tma)
    right = rows_argument(scores, [parts * tile.block_n, tile.block_k], use_tma)
    args = (left, right, out, plan.num_tokens, num_experts, d, do.stride(0), width, splits)
    constants = {"PARTS": parts, "USE_TMA": use_tma, **arithmetic_constants(do.dtype), **blocks(tile)}
    return launch_of(scores_times_grad_kernel, (tiles, splits), args, constants, tile.num_warps, tile.num_stages), out


def tile_sums_launch(rows: Tensor, tiles: TileList, tile_m: int) -> tuple[Launch, Tensor]:
    """(launch, sums (C, width) fp32): the sum of each tile's rows of ``rows`` (R_max, width)."""
    width = rows.shape[1]
    sums = rows.new_empty(tiles.capacity, width, dtype=torch.float32)
    args = (rows, sums, tiles.row_of_tile, tiles.end_of_tile, tiles.num_tiles, width)
    grid = (tiles.capacity * ceil_div(width, _SUM_COLUMNS),)
    return launch_of(tile_sums_kernel, grid, args, {"BLOCK_M": tile_m, "BLOCK_N": _SUM_COLUMNS}), sums


def expert_sums_launch(sums: Tensor, plan: RoutingPlan, tile_m: int) -> tuple[Launch, Tensor]:
    """(launch, out (E, width) fp32): the sum of each expert's tiles in ``sums`` (C, width)."""
    width = sums.shape[1]
    out = sums.new_empty(plan.num_experts, width)
    experts = max(_FEWEST_EXPERTS, power_of_two(plan.num_experts))
    constants = {"TILE_M": tile_m, "BLOCK_E": experts, "BLOCK_M": _SUM_TILES, "BLOCK_N": _SUM_COLUMNS}
    grid = (ceil_div(width, _SUM_COLUMNS), plan.num_experts)
    return launch_of(expert_sums_kernel, grid, (sums, out, plan.row_start_of_expert, width), constants), out


@triton.jit
def _load_tile(
    source, row, col, num_rows, width, stride,
    USE_TMA: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """(BM, BN) at (row, col) of a matrix (num_rows, width); zero past ``width``, unspecified past the last row."""
    if USE_TMA:
        tile = source.load([row, col])
    else:
        line = tl.minimum(row + tl.arange(0, BLOCK_M), num_rows - 1)
        columns = col + tl.arange(0, BLOCK_N)
        pointers = line_pointers(source, line, stride, columns, True)
        tile = tl.load(pointers, mask=(columns < width)[None, :], other=0.0)
    return tile


@triton.jit(do_not_specialize=["num_tokens"])
def bias_products_kernel(
    do,
    bias,
    products,
    num_tokens,
    num_experts,
    d,
    stride_do,
    stride_bias,
    USE_TMA: tl.constexpr,
    PRECISION: tl.constexpr,
    SPLIT_ACCUM: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """products (T, E) fp32: ``<do_t, b2_e>`` of do (T, d) and b2 (E, d). One CTA per tile, experts innermost."""
    # ``// 8 * 8`` tells the compiler that these are multiples of 8, so that it emits 16-byte loads.
    d, stride_do, stride_bias = d // 8 * 8, stride_do // 8 * 8, stride_bias // 8 * 8
    expert_tiles = tl.cdiv(num_experts, BLOCK_N)
    token = tl.program_id(0) // expert_tiles * BLOCK_M
    expert = tl.program_id(0) % expert_tiles * BLOCK_N
    acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for k in range(0, d, BLOCK_K):
        left = _load_tile(do, token, k, num_tokens, d, stride_do, USE_TMA, BLOCK_M, BLOCK_K)
        right = _load_tile(bias, expert, k, num_experts, d, stride_bias, USE_TMA, BLOCK_N, BLOCK_K)
        acc = multiply_add(left, right.T, acc, PRECISION, SPLIT_ACCUM)
    tokens, experts = token + tl.arange(0, BLOCK_M), expert + tl.arange(0, BLOCK_N)
    pointers = products + tokens.to(tl.int64)[:, None] * num_experts + experts[None, :]
    tl.store(pointers, acc, mask=(tokens < num_tokens)[:, None] & (experts < num_experts)[None, :])


@triton.jit(do_not_specialize=["width"])
def dense_scores_kernel(
    s,
    dense,
    token_of_row,
    pair_of_row,
    row_start_of_expert,
    expert_of_tile,
    row_of_tile,
    end_of_tile,
    num_tiles,
    width,
    PARTS: tl.constexpr,
    BLOCK_M: tl.constexpr,
):
    """Scatter the score of each (expert, token) that has a row to dense (E, PARTS, width), which is zeroed before.

    The two parts are the score rounded to dense's dtype, and the remainder times `_LOWER_SCALE`. If a token has the
    same expert several times, its rows are adjacent; the first writes the sum of their scores, added in row order.
    """
    tile = tl.program_id(0)
    if tile < tl.load(num_tiles):
        expert = tl.load(expert_of_tile + tile)
        start, end = tl.load(row_start_of_expert + expert), tl.load(end_of_tile + tile)
        rows = tl.load(row_of_tile + tile) + tl.arange(0, BLOCK_M)
        line = tl.minimum(rows, end - 1)
        token = tl.load(token_of_row + line)
        before = tl.load(token_of_row + tl.maximum(line - 1, start))
        writes = (rows < end) & ((line == start) | (before != token))
        score = tl.load(s + tl.load(pair_of_row + line)).to(tl.float32)
        after = tl.minimum(line + 1, end - 1)
        repeats = writes & (after > line) & (tl.load(token_of_row + after) == token)
        while tl.max(repeats.to(tl.int32), axis=0) > 0:
            score += tl.where(repeats, tl.load(s + tl.load(pair_of_row + after)).to(tl.float32), 0.0)
            repeats = repeats & (after + 1 < end)
            after = tl.minimum(after + 1, end - 1)
            repeats = repeats & (tl.load(token_of_row + after) == token)
        place = dense + PARTS * expert.to(tl.int64) * width + token
        upper = score.to(dense.dtype.element_ty)
        tl.store(place, upper, mask=writes)
        if PARTS == 2:
            lower = (score - upper.to(tl.float32)) * _LOWER_SCALE
            tl.store(place + width, lower.to(dense.dtype.element_ty), mask=writes)


@triton.jit(do_not_specialize=["num_tokens", "width", "splits"])
def scores_times_grad_kernel(
    do,
    dense,
    out,
    num_tokens,
    num_experts,
    d,
    stride_do,
    width,
    splits,
    PARTS: tl.constexpr,
    USE_TMA: tl.constexpr,
    PRECISION: tl.constexpr,
    SPLIT_ACCUM: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """out (splits, E, d) fp32: ``sum over a split's tokens of score[e, t] do_t``, do (T, d), dense (E * PARTS, width).

    Grid: (tiles, splits); a tile is BM columns of do by BN experts.
    """
    # ``// 8 * 8`` tells the compiler that these are multiples of 8, so that it emits 16-byte loads.
    d, stride_do, width = d // 8 * 8, stride_do // 8 * 8, width // 8 * 8
    expert_tiles = tl.cdiv(num_experts, BLOCK_N)
    col = tl.program_id(0) // expert_tiles * BLOCK_M
    expert = tl.program_id(0) % expert_tiles * BLOCK_N
    share = tl.cdiv(tl.cdiv(num_tokens, splits), BLOCK_K) * BLOCK_K
    start = tl.program_id(1) * share
    acc = tl.zeros((BLOCK_M, PARTS * BLOCK_N), dtype=tl.float32)
    # Past the last token the scores are zero.
    for k in range(start, tl.minimum(start + share, num_tokens), BLOCK_K):
        left = _load_tile(do, k, col, num_tokens, d, stride_do, USE_TMA, BLOCK_K, BLOCK_M)
        right = _load_tile(
            dense, PARTS * expert, k, PARTS * num_experts, width, width, USE_TMA, PARTS * BLOCK_N, BLOCK_K
        )
        acc = multiply_add(left.T, right.T, acc, PRECISION, SPLIT_ACCUM)
    if PARTS == 2:
        upper, lower = acc.reshape(BLOCK_M, BLOCK_N, 2).split()
        acc = upper + lower * (1 / _LOWER_SCALE)
    experts, columns = expert + tl.arange(0, BLOCK_N), col + tl.arange(0, BLOCK_M)
    line = tl.program_id(1).to(tl.int64) * num_experts + experts
    pointers = out + line[:, None] * d + columns[None, :]
    tl.store(pointers, acc.T, mask=(experts < num_experts)[:, None] & (columns < d)[None, :])


@triton.jit
def tile_sums_kernel(
    rows, sums, row_of_tile, end_of_tile, num_tiles, width, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr
):
    """sums (tiles, width) fp32: the sum of each tile's rows of ``rows`` (R_max, width). One CTA per BN columns."""
    width = width // 8 * 8  # tells the compiler that it is a multiple of 8, so that it emits 16-byte loads
    column_tiles = tl.cdiv(width, BLOCK_N)
    tile = tl.program_id(0) // column_tiles
    if tile < tl.load(num_tiles):
        row, end = tl.load(row_of_tile + tile), tl.load(end_of_tile + tile)
        columns = tl.program_id(0) % column_tiles * BLOCK_N + tl.arange(0, BLOCK_N)
        pointers = rows + row.to(tl.int64) * width + tl.arange(0, BLOCK_M)[:, None] * width + columns[None, :]
        mask = (row + tl.arange(0, BLOCK_M) < end)[:, None] & (columns < width)[None, :]
        value = tl.load(pointers, mask=mask, other=0.0).to(tl.float32)
        tl.store(sums + tile.to(tl.int64) * width + columns, tl.sum(value, axis=0), mask=columns < width)


@triton.jit
def expert_sums_kernel(
    sums,
    out,
    row_start_of_expert,
    width,
    TILE_M: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """out (E, width) fp32: the sum of each expert's tiles in ``sums`` (tiles, width). Grid: (column tiles, E)."""
    columns, expert = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N), tl.program_id(1)
    others = tl.arange(0, BLOCK_E)
    starts = tl.load(row_start_of_expert + others, mask=others < expert, other=0)
    ends = tl.load(row_start_of_expert + others + 1, mask=others < expert, other=0)
    first = tl.sum(tl.cdiv(ends - starts, TILE_M), axis=0)
    num_rows = tl.load(row_start_of_expert + expert + 1) - tl.load(row_start_of_expert + expert)
    acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    count = tl.cdiv(num_rows, TILE_M)
    for tile in range(0, count, BLOCK_M):
        slot = tile + tl.arange(0, BLOCK_M)
        pointers = sums + (first + slot).to(tl.int64)[:, None] * width + columns[None, :]
        acc += tl.load(pointers, mask=(slot < count)[:, None] & (columns < width)[None, :], other=0.0)
    tl.store(out + expert.to(tl.int64) * width + columns, tl.sum(acc, axis=0), mask=columns < width)
