"""Grouped GEMMs over rows: up_proj, ``a = act(x w1^T + b1)`` with x gathered; down_proj and up_proj_dgrad,
``out_r = rows_r weight_e + bias_e``.

T tokens · d hidden_size · n intermediate_size · E experts · R_max static row capacity · w = 2n gated, n ungated
BM, BN, BK tile

Persistent: an output tile is a row tile of a list on the device (`TileList`) and a column tile. CTA i of P computes the
output tiles i, i + P, ..., column tiles innermost, in bands of columns if the output is wide (`tile_place`). Triton
software-pipelines the loads, with FLATTEN also across tiles. The epilogue works on one slice of columns at a time.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

import triton
import triton.language as tl

from tilemoe.kernels.experts.triton.activations import gated_value, inner
from tilemoe.kernels.experts.triton.operands import (
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
from tilemoe.kernels.experts.triton.tiles import tile_place


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
    SPLIT_ACCUM: tl.constexpr,
    FLATTEN: tl.constexpr,
    BAND: tl.constexpr,
    SLICES: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """down_proj and up_proj_dgrad: rows (R_max, in), weight (E, 1, in, out), bias (E, out), out (R_max, out)."""
    # ``// 8 * 8`` tells the compiler that these are multiples of 8, so that it emits 16-byte loads.
    width_in, width_out = width_in // 8 * 8, width_out // 8 * 8
    column_tiles = tl.cdiv(width_out, BLOCK_N)
    row_tiles = tl.load(num_tiles)
    for index in tl.range(tl.program_id(0), row_tiles * column_tiles, tl.num_programs(0), flatten=FLATTEN):
        tile, column_tile = tile_place(index, row_tiles, column_tiles, BAND)
        col = column_tile * BLOCK_N
        expert = tl.load(expert_of_tile + tile)
        row = tl.load(row_of_tile + tile)
        end = tl.load(end_of_tile + tile)
        acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
        for k in range(0, width_in, BLOCK_K):
            if USE_TMA:
                left = rows.load([row, k])
            else:
                # Clamped: rows past the expert's end repeat its last row and are not stored.
                line = tl.minimum(row + tl.arange(0, BLOCK_M), end - 1).to(tl.int64)
                left = load_pointers(
                    rows + line[:, None] * width_in + tl.arange(0, BLOCK_K)[None, :], k, width_in, EVEN_K, BLOCK_K
                )
            right = load_weight(
                weight, expert, k, col, width_in, width_out, stride_we, 0, stride_win, stride_wout,
                1, WEIGHT_ACCESS, EVEN_K, BLOCK_K, BLOCK_N,
            )  # fmt: skip
            acc = multiply_add(left, right, acc, PRECISION, SPLIT_ACCUM)
        if HAS_BIAS:
            acc += load_bias(bias, expert, col, width_out, stride_be, stride_bout, BLOCK_N)[None, :]
        # Staging one slice at a time leaves shared memory for one more pipeline stage.
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
    GATHER_BY_TMA: tl.constexpr,
    INT64_OFFSETS: tl.constexpr,
    USE_TMA: tl.constexpr,
    WEIGHT_ACCESS: tl.constexpr,
    EVEN_K: tl.constexpr,
    PRECISION: tl.constexpr,
    SPLIT_ACCUM: tl.constexpr,
    FLATTEN: tl.constexpr,
    BAND: tl.constexpr,
    SLICES: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """up_proj: ``h = x w1^T + b1`` and ``a = act(h)``; x (T, d) gathered, a (R_max, n).

    If gate and up are concatenated, weight is (E, 2, d, n), h is (R_max, 2, n), and they are the halves of a tile. Else
    they are (E, 1, d, w) and (R_max, w), and interleaved columns are split in registers. h is written only if KEEP_H.
    """
    # ``// 8 * 8`` tells the compiler that these are multiples of 8, so that it emits 16-byte loads.
    d, n, stride_x = d // 8 * 8, n // 8 * 8, stride_x // 8 * 8
    PARTS: tl.constexpr = 2 if GATED and not INTERLEAVED else 1
    WIDTH: tl.constexpr = 2 * BLOCK_N if INTERLEAVED else BLOCK_N  # columns of a part
    width_out = 2 * n if INTERLEAVED else n
    column_tiles = tl.cdiv(n, BLOCK_N)
    row_tiles = tl.load(num_tiles)
    for index in tl.range(tl.program_id(0), row_tiles * column_tiles, tl.num_programs(0), flatten=FLATTEN):
        tile, column_tile = tile_place(index, row_tiles, column_tiles, BAND)
        col = column_tile * WIDTH
        expert = tl.load(expert_of_tile + tile)
        row = tl.load(row_of_tile + tile)
        end = tl.load(end_of_tile + tile)
        # Clamped: rows past the expert's end repeat its last row and are not stored.
        token = tl.load(token_of_row + tl.minimum(row + tl.arange(0, BLOCK_M), end - 1))
        if not GATHER_BY_TMA:
            x_pointers = line_pointers(x, token, stride_x, tl.arange(0, BLOCK_K), INT64_OFFSETS)
        acc = tl.zeros((BLOCK_M, PARTS * WIDTH), dtype=tl.float32)
        for k in range(0, d, BLOCK_K):
            left = x.gather(token, k) if GATHER_BY_TMA else load_pointers(x_pointers, k, d, EVEN_K, BLOCK_K)
            right = load_weight(
                weight, expert, k, col, d, width_out, stride_we, stride_wpart, stride_win, stride_wout,
                PARTS, WEIGHT_ACCESS, EVEN_K, BLOCK_K, WIDTH,
            )  # fmt: skip
            acc = multiply_add(left, right, acc, PRECISION, SPLIT_ACCUM)
        if PARTS == 2:
            gate, up = halves(acc, BLOCK_M, 2 * BLOCK_N)
        else:
            gate, up = acc, acc
        if HAS_BIAS:
            gate += load_bias(bias, expert, col, width_out, stride_be, stride_bout, WIDTH)[None, :]
            if PARTS == 2:
                up += load_bias(bias + stride_bpart, expert, col, n, stride_be, stride_bout, BLOCK_N)[None, :]
        width: tl.constexpr = WIDTH // SLICES
        gates = column_slices(gate, BLOCK_M, WIDTH, SLICES)
        ups = column_slices(up, BLOCK_M, WIDTH, SLICES)
        for i in tl.static_range(SLICES):
            act_epilogue(
                gates[i], ups[i], a, h, end, row, col + i * width, n, limit, alpha,
                ACTIVATION, PRECISE, GATED, INTERLEAVED, KEEP_H, USE_TMA, BLOCK_M, width,
            )  # fmt: skip


@triton.jit
def act_epilogue(
    gate, up, a, h, end, row, col, n, limit, alpha,
    ACTIVATION: tl.constexpr, PRECISE: tl.constexpr, GATED: tl.constexpr, INTERLEAVED: tl.constexpr,
    KEEP_H: tl.constexpr, USE_TMA: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """up_proj's epilogue for gate and up (BM, BN). If they are interleaved, or the activation has no gate, ``gate`` is
    h and ``up`` is not used."""
    if INTERLEAVED:
        if KEEP_H:
            store_rows(h, gate, end, row, col, 2 * n, USE_TMA, BLOCK_M, BLOCK_N)
        gate, up = gate.reshape(BLOCK_M, BLOCK_N // 2, 2).split()
        value = gated_value(gate, up, limit, alpha, ACTIVATION, PRECISE)
        store_rows(a, value, end, row, col // 2, n, USE_TMA, BLOCK_M, BLOCK_N // 2)
    elif GATED:
        if KEEP_H:
            store_gate_up(h, gate, up, end, row, col, n, False, USE_TMA, BLOCK_M, BLOCK_N)
        value = gated_value(gate, up, limit, alpha, ACTIVATION, PRECISE)
        store_rows(a, value, end, row, col, n, USE_TMA, BLOCK_M, BLOCK_N)
    else:
        if KEEP_H:
            store_rows(h, gate, end, row, col, n, USE_TMA, BLOCK_M, BLOCK_N)
        value, _slope = inner(gate, ACTIVATION, PRECISE)
        store_rows(a, value, end, row, col, n, USE_TMA, BLOCK_M, BLOCK_N)
