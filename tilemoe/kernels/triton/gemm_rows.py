"""The grouped GEMMs over rows, each expert's rows times its weight: F1 with the gather and the activation, F2 and B3.

T tokens · d hidden_size · n intermediate_size · E experts · R_max row capacity · parts = 2 gated, 1 ungated
BM, BN, BK: rows, columns and contraction step of a tile

Persistent programs walk a list of (expert, first row) tiles that lies on the device; its length is read there.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

import triton
import triton.language as tl

from tilemoe.kernels.triton.activations import gated_value, inner
from tilemoe.kernels.triton.operands import (
    column_slices,
    halves,
    line_pointers,
    load_bias,
    load_pointers,
    load_weight,
    multiply_add,
    store_gate_up,
    store_rows,
)


@triton.jit
def gemm_rows_kernel(
    rows,
    weight,
    bias,
    out,
    expert_of_tile,
    row_of_tile,
    end_of_tile,
    num_tiles,
    width_in,
    width_out,
    stride_we,
    stride_win,
    stride_wout,
    stride_be,
    stride_bout,
    HAS_BIAS: tl.constexpr,
    USE_TMA: tl.constexpr,
    WEIGHT_ACCESS: tl.constexpr,
    EVEN_K: tl.constexpr,
    PRECISION: tl.constexpr,
    APART: tl.constexpr,
    FLATTEN: tl.constexpr,
    SLICES: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """F2 and B3: ``out_r = rows_r weight_e (+ bias_e)``; rows (R_max, in), weight (E, 1, in, out), out (R_max, out)."""
    # The compiler is told that they are multiples of 8, whence 16-byte loads.
    width_in, width_out = width_in // 8 * 8, width_out // 8 * 8
    column_tiles = tl.cdiv(width_out, BLOCK_N)
    total = tl.load(num_tiles) * column_tiles
    for index in tl.range(tl.program_id(0), total, tl.num_programs(0), flatten=FLATTEN):
        tile = index // column_tiles
        col = (index % column_tiles) * BLOCK_N
        expert = tl.load(expert_of_tile + tile)
        row = tl.load(row_of_tile + tile)
        end = tl.load(end_of_tile + tile)
        acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
        for k in range(0, width_in, BLOCK_K):
            if USE_TMA:
                left = rows.load([row, k])
            else:
                # A row past the expert's end is another's or none: the last one is read again instead.
                line = tl.minimum(row + tl.arange(0, BLOCK_M), end - 1).to(tl.int64)
                left = load_pointers(
                    rows + line[:, None] * width_in + tl.arange(0, BLOCK_K)[None, :], k, width_in, EVEN_K, BLOCK_K
                )
            right = load_weight(
                weight, expert, k, col, width_in, width_out, stride_we, 0, stride_win, stride_wout,
                1, WEIGHT_ACCESS, EVEN_K, BLOCK_K, BLOCK_N,
            )  # fmt: skip
            acc = multiply_add(left, right, acc, PRECISION, APART)
        if HAS_BIAS:
            acc += load_bias(bias, expert, col, width_out, stride_be, stride_bout, BLOCK_N)[None, :]
        # What a slice less takes of shared memory on its way out is a load more in flight.
        width: tl.constexpr = BLOCK_N // SLICES
        slices = column_slices(acc, BLOCK_M, BLOCK_N, SLICES)
        for i in tl.static_range(SLICES):
            store_rows(out, slices[i], end, row, col + i * width, width_out, USE_TMA, BLOCK_M, width)


@triton.jit
def up_proj_act_kernel(
    x,
    weight,
    bias,
    a,
    h,
    token_of_row,
    expert_of_tile,
    row_of_tile,
    end_of_tile,
    num_tiles,
    d,
    n,
    stride_x,
    stride_we,
    stride_wpart,
    stride_win,
    stride_wout,
    stride_be,
    stride_bpart,
    stride_bout,
    limit,
    alpha,
    ACTIVATION: tl.constexpr,
    PRECISE: tl.constexpr,
    GATED: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    KEEP_H: tl.constexpr,
    WIDE: tl.constexpr,
    USE_TMA: tl.constexpr,
    WEIGHT_ACCESS: tl.constexpr,
    EVEN_K: tl.constexpr,
    PRECISION: tl.constexpr,
    APART: tl.constexpr,
    FLATTEN: tl.constexpr,
    SLICES: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """F1: ``h = x w1^T + b1`` and ``a = act(h)``; x (T, d) gathered by pointer, weight (E, parts, d, n).

    h (R_max, parts, n), or (R_max, 2n) when interleaved; not written unless KEEP_H. a (R_max, n).
    """
    # The compiler is told that they are multiples of 8, whence 16-byte loads.
    d, n, stride_x = d // 8 * 8, n // 8 * 8, stride_x // 8 * 8
    PARTS: tl.constexpr = 2 if GATED else 1
    column_tiles = tl.cdiv(n, BLOCK_N)
    total = tl.load(num_tiles) * column_tiles
    for index in tl.range(tl.program_id(0), total, tl.num_programs(0), flatten=FLATTEN):
        tile = index // column_tiles
        col = (index % column_tiles) * BLOCK_N
        expert = tl.load(expert_of_tile + tile)
        row = tl.load(row_of_tile + tile)
        end = tl.load(end_of_tile + tile)
        # Rows past the expert's end compute its last row again, and are not stored.
        token = tl.load(token_of_row + tl.minimum(row + tl.arange(0, BLOCK_M), end - 1))
        x_pointers = line_pointers(x, token, stride_x, tl.arange(0, BLOCK_K), WIDE)
        acc = tl.zeros((BLOCK_M, PARTS * BLOCK_N), dtype=tl.float32)
        for k in range(0, d, BLOCK_K):
            left = load_pointers(x_pointers, k, d, EVEN_K, BLOCK_K)
            right = load_weight(
                weight, expert, k, col, d, n, stride_we, stride_wpart, stride_win, stride_wout,
                PARTS, WEIGHT_ACCESS, EVEN_K, BLOCK_K, BLOCK_N,
            )  # fmt: skip
            acc = multiply_add(left, right, acc, PRECISION, APART)
        if GATED:
            gate, up = halves(acc, BLOCK_M, 2 * BLOCK_N)
        else:
            gate, up = acc, acc
        if HAS_BIAS:
            gate += load_bias(bias, expert, col, n, stride_be, stride_bout, BLOCK_N)[None, :]
            if GATED:
                up += load_bias(bias + stride_bpart, expert, col, n, stride_be, stride_bout, BLOCK_N)[None, :]
        width: tl.constexpr = BLOCK_N // SLICES
        gates = column_slices(gate, BLOCK_M, BLOCK_N, SLICES)
        ups = column_slices(up, BLOCK_M, BLOCK_N, SLICES)
        for i in tl.static_range(SLICES):
            _finish(
                gates[i], ups[i], a, h, end, row, col + i * width, n, limit, alpha,
                ACTIVATION, PRECISE, GATED, INTERLEAVED, KEEP_H, USE_TMA, BLOCK_M, width,
            )  # fmt: skip


@triton.jit
def _finish(
    gate, up, a, h, end, row, col, n, limit, alpha,
    ACTIVATION: tl.constexpr, PRECISE: tl.constexpr, GATED: tl.constexpr, INTERLEAVED: tl.constexpr,
    KEEP_H: tl.constexpr, USE_TMA: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """F1's epilogue for (BM, BN) of gate and up, of which an ungated activation has the first only."""
    if KEEP_H:
        if GATED:
            store_gate_up(h, gate, up, end, row, col, n, INTERLEAVED, USE_TMA, BLOCK_M, BLOCK_N)
        else:
            store_rows(h, gate, end, row, col, n, USE_TMA, BLOCK_M, BLOCK_N)
    if GATED:
        value = gated_value(gate, up, limit, alpha, ACTIVATION, PRECISE)
    else:
        value, _slope = inner(gate, ACTIVATION, PRECISE)
    store_rows(a, value, end, row, col, n, USE_TMA, BLOCK_M, BLOCK_N)
