"""up_proj and down_proj for inference with few rows per expert (decoding), bound by reading each expert's weights once.

T tokens · d hidden_size · n intermediate_size · E experts · R_max static row capacity · w = 2n gated, n ungated
BM, BN, BK tile

``a = act(x w1^T + b1)`` without storing h, and ``y = a w2^T + b2``. The kernels are not persistent: each CTA has one
small tile, so that many CTAs have loads in flight. A CTA finds its tile from row_start_of_expert, without a tile list.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from tilemoe.activations import ActivationSpec
from tilemoe.kernels.experts.triton.activations import gated_value, inner
from tilemoe.kernels.experts.triton.configs import TileConfig, choose_small_m_tile
from tilemoe.kernels.experts.triton.descriptors import wide_axis
from tilemoe.kernels.experts.triton.host import activation_constants, arithmetic_constants, blocks, gate_up_layout
from tilemoe.kernels.experts.triton.operands import halves, line_pointers, multiply_add, store_rows
from tilemoe.plan import RoutingPlan
from tilemoe.runtime.device import Device
from tilemoe.runtime.launch import Launch, ceil_div, launch_of, power_of_two


def up_proj_act_launch(
    x: Tensor, w1: Tensor, b1: Tensor | None, plan: RoutingPlan, spec: ActivationSpec, block_m: int, device: Device
) -> tuple[Launch, Tensor]:
    """up_proj without h: a (R_max, n), R_max > 0, in tiles of ``block_m`` rows. x's columns are contiguous."""
    d, n = x.shape[1], w1.shape[1] // spec.width_factor
    weight = w1.transpose(1, 2)
    tile = choose_small_m_tile("up_proj_act", block_m, d, n, x.element_size(), device, gate_up_layout(spec))
    a = x.new_empty(plan.capacity, n)
    args = (x, a, plan.token_of_row, *_weight_args(weight, b1, plan), d, n, x.stride(0), spec.limit, spec.alpha)
    constants = {**activation_constants(spec, x.dtype), **_constants(weight, n, b1, tile, plan)}
    grid = _grid(plan, n, tile)
    return launch_of(up_proj_act_small_m_kernel, grid, args, constants, tile.num_warps, tile.num_stages), a


def down_proj_launch(
    a: Tensor, w2: Tensor, b2: Tensor | None, plan: RoutingPlan, block_m: int, device: Device
) -> tuple[Launch, Tensor]:
    """down_proj: y (R_max, c), R_max > 0, from w2 (E, c, n) and b2 (E, c), in tiles of ``block_m`` rows. a is
    contiguous."""
    (d, n), weight = w2.shape[1:], w2.transpose(1, 2)
    tile = choose_small_m_tile("down_proj", block_m, n, d, a.element_size(), device, None)
    y = a.new_empty(plan.capacity, d)
    args = (a, y, *_weight_args(weight, b2, plan), d, n)
    constants, grid = _constants(weight, d, b2, tile, plan), _grid(plan, d, tile)
    return launch_of(down_proj_small_m_kernel, grid, args, constants, tile.num_warps, tile.num_stages), y


def _grid(plan: RoutingPlan, width: int, tile: TileConfig) -> tuple[int, int]:
    """The grid: (largest possible number of row tiles, number of column tiles)."""
    rows = plan.capacity
    return min(rows, ceil_div(rows, tile.block_m) + plan.num_experts), ceil_div(width, tile.block_n)


def _weight_args(weight: Tensor, bias: Tensor | None, plan: RoutingPlan) -> tuple[Any, ...]:
    """Kernel arguments of weight (E, in, out) and bias (E, out), of any strides."""
    strides = (*weight.stride(), *((0, 0) if bias is None else bias.stride()))
    return weight, bias, plan.row_start_of_expert, plan.num_experts, *strides


def _constants(weight: Tensor, width: int, bias: Tensor | None, tile: TileConfig, plan: RoutingPlan) -> dict[str, Any]:
    """Compile-time constants. width: columns of the output; a gated up_proj's weight has twice as many."""
    return {
        "HAS_BIAS": bias is not None,
        "WIDE_LOADS": wide_axis(weight),
        "EVEN": weight.shape[1] % tile.block_k == 0 and width % tile.block_n == 0,
        **arithmetic_constants(weight.dtype),
        **blocks(tile),
        "BLOCK_E": max(16, power_of_two(plan.num_experts)),
    }


@triton.jit
def up_proj_act_small_m_kernel(
    x,
    a,
    token_of_row,
    weight,
    bias,
    row_start_of_expert,
    num_experts,
    stride_we,
    stride_win,
    stride_wout,
    stride_be,
    stride_bout,
    d,
    n,
    stride_x,
    limit,
    alpha,
    ACTIVATION: tl.constexpr,
    PRECISE: tl.constexpr,
    GATED: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    WIDE_LOADS: tl.constexpr,
    EVEN: tl.constexpr,
    PRECISION: tl.constexpr,
    SPLIT_ACCUM: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_E: tl.constexpr,
):
    """up_proj: ``a = act(x w1^T + b1)``; x (T, d) gathered, weight (E, d, w), bias (E, w), a (R_max, n)."""
    # ``// 8 * 8`` tells the compiler that these are multiples of 8, so that it emits 16-byte loads.
    d, n, stride_x = d // 8 * 8, n // 8 * 8, stride_x // 8 * 8
    expert, row, end = _tile(row_start_of_expert, tl.program_id(0), num_experts, BLOCK_M, BLOCK_E)
    if expert == num_experts:
        return
    col = tl.program_id(1) * BLOCK_N
    PARTS: tl.constexpr = 2 if GATED else 1
    column = tl.arange(0, PARTS * BLOCK_N)
    if INTERLEAVED:
        column += PARTS * col
    else:
        column = col + column % BLOCK_N + column // BLOCK_N * n  # gate's, then up's
    used = row + tl.arange(0, BLOCK_M) < end
    token = tl.load(token_of_row + row + tl.arange(0, BLOCK_M), mask=used, other=0)
    h = _multiply(
        line_pointers(x, token, stride_x, tl.arange(0, BLOCK_K), True), used, weight, expert, column, d, PARTS * n,
        stride_we, stride_win, stride_wout, WIDE_LOADS, EVEN, PRECISION, SPLIT_ACCUM, BLOCK_M, PARTS * BLOCK_N, BLOCK_K,
    )  # fmt: skip
    if HAS_BIAS:
        h += _bias(bias, expert, column, PARTS * n, stride_be, stride_bout)
    if GATED:
        if INTERLEAVED:
            gate, up = h.reshape(BLOCK_M, BLOCK_N, 2).split()
        else:
            gate, up = halves(h, BLOCK_M, 2 * BLOCK_N)
        value = gated_value(gate, up, limit, alpha, ACTIVATION, PRECISE)
    else:
        value, _slope = inner(h, ACTIVATION, PRECISE)
    store_rows(a, value, end, row, col, n, False, BLOCK_M, BLOCK_N)


@triton.jit
def down_proj_small_m_kernel(
    a,
    y,
    weight,
    bias,
    row_start_of_expert,
    num_experts,
    stride_we,
    stride_win,
    stride_wout,
    stride_be,
    stride_bout,
    d,
    n,
    HAS_BIAS: tl.constexpr,
    WIDE_LOADS: tl.constexpr,
    EVEN: tl.constexpr,
    PRECISION: tl.constexpr,
    SPLIT_ACCUM: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_E: tl.constexpr,
):
    """down_proj: ``y = a w2^T + b2``; a (R_max, n), weight (E, n, d), bias (E, d), y (R_max, d)."""
    d, n = d // 8 * 8, n // 8 * 8
    expert, row, end = _tile(row_start_of_expert, tl.program_id(0), num_experts, BLOCK_M, BLOCK_E)
    if expert == num_experts:
        return
    col = tl.program_id(1) * BLOCK_N
    column = col + tl.arange(0, BLOCK_N)
    line = row + tl.arange(0, BLOCK_M)
    value = _multiply(
        line_pointers(a, line, n, tl.arange(0, BLOCK_K), True), line < end, weight, expert, column, n, d,
        stride_we, stride_win, stride_wout, WIDE_LOADS, EVEN, PRECISION, SPLIT_ACCUM, BLOCK_M, BLOCK_N, BLOCK_K,
    )  # fmt: skip
    if HAS_BIAS:
        value += _bias(bias, expert, column, d, stride_be, stride_bout)
    store_rows(y, value, end, row, col, d, False, BLOCK_M, BLOCK_N)


@triton.jit
def _tile(row_start_of_expert, index, num_experts, BLOCK_M: tl.constexpr, BLOCK_E: tl.constexpr):
    """(expert, first row, end of the expert's rows) of row tile ``index``; expert is num_experts past the last tile."""
    experts = tl.arange(0, BLOCK_E)
    exists = experts < num_experts
    start = tl.load(row_start_of_expert + experts, mask=exists, other=0)
    end = tl.load(row_start_of_expert + experts + 1, mask=exists, other=0)
    next_tile = tl.cumsum(tl.cdiv(end - start, BLOCK_M), axis=0)
    passed = exists & (next_tile <= index)
    expert = tl.sum(passed.to(tl.int32), axis=0)
    first_tile = tl.max(tl.where(passed, next_tile, 0), axis=0)
    here = experts == expert
    row = tl.sum(tl.where(here, start, 0), axis=0) + (index - first_tile) * BLOCK_M
    return expert, row, tl.sum(tl.where(here, end, 0), axis=0)


@triton.jit
def _multiply(
    left, used, weight, expert, column, width_in, width_out, stride_we, stride_win, stride_wout,
    WIDE_LOADS: tl.constexpr, EVEN: tl.constexpr, PRECISION: tl.constexpr, SPLIT_ACCUM: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """(BM, BN) fp32: rows times the weight's columns ``column`` (BN); left (BM, BK) points to the rows' first k-block.

    Only the rows ``used`` are loaded: loading a tile's unused rows too would add a quarter to the bytes.
    """
    if WIDE_LOADS == "in":
        stride_we, stride_wout = stride_we // 8 * 8, stride_wout // 8 * 8
    elif WIDE_LOADS == "out":
        stride_we, stride_win = stride_we // 8 * 8, stride_win // 8 * 8
    step = tl.arange(0, BLOCK_K)
    right = weight + expert.to(tl.int64) * stride_we
    right = right + step.to(tl.int64)[:, None] * stride_win + column.to(tl.int64)[None, :] * stride_wout
    acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for k in range(0, width_in, BLOCK_K):
        # The weight is loaded first: its address is known earlier than those of the gathered rows.
        if EVEN:
            columns = tl.load(right + tl.cast(k, tl.int64) * stride_win)
            rows = tl.load(left + k, mask=used[:, None], other=0.0)
        else:
            inside = k + step < width_in
            mask = inside[:, None] & (column < width_out)[None, :]
            columns = tl.load(right + tl.cast(k, tl.int64) * stride_win, mask=mask, other=0.0)
            rows = tl.load(left + k, mask=used[:, None] & inside[None, :], other=0.0)
        acc = multiply_add(rows, columns, acc, PRECISION, SPLIT_ACCUM)
    return acc


@triton.jit
def _bias(bias, expert, column, width, stride_e, stride_out):
    """(1, BN) fp32 of one expert's bias."""
    pointers = bias + expert.to(tl.int64) * stride_e + column.to(tl.int64) * stride_out
    return tl.load(pointers, mask=column < width, other=0.0).to(tl.float32)[None, :]
